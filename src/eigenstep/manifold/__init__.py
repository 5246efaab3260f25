"""Optimization over positive-definite matrices in spectral form."""

from .local import Local
from .minimize import Iterate, Result, minimize_spd
from .parameter import SPDParameter

__all__ = ["Iterate", "Local", "Result", "SPDParameter", "minimize_spd"]
