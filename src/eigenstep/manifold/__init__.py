"""Optimization over positive-definite matrices in spectral form."""

from .minimize import Iterate, Result, minimize_spd
from .parameter import SPDParameter
from .tangent_view import Local

__all__ = ["Iterate", "Local", "Result", "SPDParameter", "minimize_spd"]
