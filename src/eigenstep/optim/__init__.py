"""Optimizers that precondition gradients with learned curvature."""

from .inspect import SpectraLog
from .spectral import Spectral

__all__ = ["SpectraLog", "Spectral"]
