"""Recipes: options of ``Spectral`` that make a method of their own, as classes, for trainers that
ask for a class.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import wraps
from typing import Any

from .spectral import Spectral

PAPER: Mapping[str, Any] = {
    "betas": (0.9, 0.95),
    "structure": "kronecker",
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
    "grafting": None,
    "interval": 2,
    "max_dim": None,
    "max_ratio": None,
}
"""The paper's recipe for networks."""
FAST: Mapping[str, Any] = {"max_ratio": 1.0}
"""At most Muon's price."""


def _constructor(recipe: Mapping[str, Any]) -> Any:
    """Return the constructor of ``Spectral`` with other defaults, which its signature shows to
    people and parsers.
    """
    signature = inspect.signature(Spectral.__init__)

    @wraps(Spectral.__init__)
    def constructor(*arguments: Any, **changes: Any) -> None:
        given = signature.bind_partial(*arguments, **changes).arguments
        Spectral.__init__(**{**recipe, **given})

    shown = [
        p.replace(default=recipe.get(name, p.default)) for name, p in signature.parameters.items()
    ]
    constructor.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return constructor


class SpectralFast(Spectral):
    """At most Muon's price: ``Spectral`` with long sides cut into square blocks. Also known as
    ``Spectral.fast``.
    """

    __init__ = _constructor(FAST)


class SpectralPaper(Spectral):
    """The paper's recipe for networks: Kronecker eigenvalues, normalized rotation, truncated maps,
    every 2 steps.

    No side is cut, however long. The paper updates "preconditioners" every 2 steps: here that means
    the bases, and with ``eigenvalues_wait=True`` the eigenvalues and the scale, too. Also known as
    ``Spectral.paper``.
    """

    __init__ = _constructor(PAPER)


Spectral.fast, Spectral.paper = SpectralFast, SpectralPaper
