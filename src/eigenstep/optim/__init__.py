"""Optimizers that precondition gradients with learned curvature."""

from .spectra import SpectraLog
from .spectral import Spectral

__all__ = ["SpectraLog", "Spectral"]
