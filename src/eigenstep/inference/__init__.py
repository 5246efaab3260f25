"""Bayesian inference with Gaussians in spectral form."""

from .descent import FitResult, Iterate
from .ensemble import ensemble_inversion
from .estimates import elbo
from .fit import fit_gaussian, laplace
from .gaussian import Gaussian
from .kalman import State, kalman_filter
from .models import Supervised

__all__ = [
    "FitResult",
    "Gaussian",
    "Iterate",
    "State",
    "Supervised",
    "elbo",
    "ensemble_inversion",
    "fit_gaussian",
    "kalman_filter",
    "laplace",
]
