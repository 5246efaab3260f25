"""Bayesian inference with Gaussians in spectral form."""

from .descent import FitResult, Iterate
from .estimates import elbo
from .fit import fit_gaussian, laplace
from .gaussian import Gaussian
from .kalman import State, ensemble_inversion, kalman_filter
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
