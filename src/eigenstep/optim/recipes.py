"""Recipes: options of ``Spectral`` that make a method of their own, as classes, for trainers that ask for a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from .spectral import Params, Spectral

PAPER: Mapping[str, Any] = {
    "betas": (0.9, 0.95),
    "eigenvalues": "kronecker",
    "rotation": "normalized",
    "basis_lr": 0.5,
    "maps": "truncated",
    "reorthonormalize": False,
    "start": 0.0,
    "turn_first": True,
    "nesterov": False,
    "relative_damping": False,
    "damping": 1e-12,
    "clip": 1.0,
    "interval": 2,
    "max_ratio": None,
}
"""The paper's recipe for networks."""
FAST: Mapping[str, Any] = {"max_ratio": 1.0}
"""At most Muon's price."""


class _Recipe(Spectral):
    """Options that make a method of their own; anything can be overridden."""

    recipe: ClassVar[Mapping[str, Any]]

    def __init__(self, params: Params, lr: float | Tensor = 1e-3, **changes: Any) -> None:
        """Set up the optimizer.

        Args:
            params: as for ``Spectral``.
            lr: learning rate.
            **changes: any other argument of ``Spectral`` overrides the recipe.
        """
        super().__init__(params, lr, **{**self.recipe, **changes})


class SpectralFast(_Recipe):
    """At most Muon's price: ``Spectral`` with long sides cut into square blocks. Also known as ``Spectral.fast``."""

    recipe = FAST


class SpectralPaper(_Recipe):
    """The paper's recipe for networks: Kronecker eigenvalues, normalized rotation, truncated maps, every 2 steps.

    Also known as ``Spectral.paper``.
    """

    recipe = PAPER


Spectral.fast, Spectral.paper = SpectralFast, SpectralPaper
