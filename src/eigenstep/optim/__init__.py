"""Optimizers that precondition gradients with learned curvature."""

from .inspect import SpectraLog
from .recipes import SpectralFast, SpectralPaper
from .spectral import Spectral

__all__ = ["SpectraLog", "Spectral", "SpectralFast", "SpectralPaper"]
