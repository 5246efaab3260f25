"""Training with a Gaussian posterior over the weights, in spectral form."""

from .posterior import SpectralPosterior

__all__ = ["SpectralPosterior"]
