"""Optimizers that precondition gradients with learned curvature."""

from .for_model import for_model
from .posterior import SpectralPosterior
from .recipes import SpectralFast, SpectralPaper
from .spectral import Spectral

__all__ = ["Spectral", "SpectralFast", "SpectralPaper", "SpectralPosterior", "for_model"]
