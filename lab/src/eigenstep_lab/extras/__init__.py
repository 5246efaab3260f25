"""Relatives of what the library does: filters, inverse problems, batches, logs."""

from .batch import BatchResult, minimize_batch
from .descent import BarzilaiBorwein
from .ensemble import ensemble_inversion
from .histories import load_history, plot_history, save_history
from .kalman import State, kalman_filter
from .minibatches import Minibatches
from .spectra_log import SpectraLog
from .surrogate import Modeled

__all__ = [
    "BarzilaiBorwein",
    "BatchResult",
    "Minibatches",
    "Modeled",
    "SpectraLog",
    "State",
    "ensemble_inversion",
    "kalman_filter",
    "load_history",
    "minimize_batch",
    "plot_history",
    "save_history",
]
