"""Bayesian inference with Gaussians in spectral form."""

from .descent import FitResult, Iterate
from .estimates import elbo
from .fit import fit_gaussian, laplace
from .gaussian import Gaussian
from .models import Supervised

__all__ = ["FitResult", "Gaussian", "Iterate", "Supervised", "elbo", "fit_gaussian", "laplace"]
