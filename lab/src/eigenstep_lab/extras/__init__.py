"""Relatives of what the library does: filters, inverse problems, batches of searches, another descent."""

from .batch import BatchResult, minimize_batch
from .descent import BarzilaiBorwein
from .ensemble import ensemble_inversion
from .kalman import State, kalman_filter

__all__ = ["BarzilaiBorwein", "BatchResult", "State", "ensemble_inversion", "kalman_filter", "minimize_batch"]
