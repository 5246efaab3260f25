"""Optimizers that precondition gradients with learned curvature."""

from importlib import import_module
from typing import TYPE_CHECKING

from .for_model import for_model
from .options import Fused
from .recipes import SpectralFast
from .spectral import Spectral

if TYPE_CHECKING:
    from ..paper import SpectralPaper
    from ..posterior import SpectralPosterior

__all__ = ["Fused", "Spectral", "SpectralFast", "SpectralPaper", "SpectralPosterior", "for_model"]


def __getattr__(name: str) -> object:
    """Load variants that are built on the optimizer when they are first asked for."""
    if name not in ("SpectralPaper", "SpectralPosterior"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "paper" if name == "SpectralPaper" else "posterior"
    return getattr(import_module(f"eigenstep.{home}"), name)
