"""Optimization over positive-definite matrices in spectral form."""

from .minimize import Iterate, SPDResult, minimize_spd
from .parameter import SPDParameter
from .tangent_view import TangentView

__all__ = ["Iterate", "SPDParameter", "SPDResult", "TangentView", "minimize_spd"]
