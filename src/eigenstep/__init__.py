"""eigenstep: learn positive-definite curvature in spectral form, without matrix decompositions.

Importing the package sets up nothing; modules are loaded when their names are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core.curvature import Dense, OuterProducts, project
    from .core.matrices import Diagonal, Full, Identity, Kronecker
    from .core.step import Turning
    from .core.update import update
    from .inference import fit_gaussian
    from .manifold import SPDParameter, minimize_spd
    from .optim import Spectral
    from .search import minimize

__version__ = "0.1.0"

_NAMES = {
    "core.curvature": ("Dense", "OuterProducts", "project"),
    "core.matrices": ("Diagonal", "Full", "Identity", "Kronecker"),
    "core.step": ("Turning",),
    "core.update": ("update",),
    "optim": ("Spectral",),
    "search": ("minimize",),
    "manifold": ("SPDParameter", "minimize_spd"),
    "inference": ("fit_gaussian",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Dense",
    "Diagonal",
    "Full",
    "Identity",
    "Kronecker",
    "OuterProducts",
    "SPDParameter",
    "Spectral",
    "Turning",
    "fit_gaussian",
    "minimize",
    "minimize_spd",
    "project",
    "update",
]


def __getattr__(name: str) -> object:
    """Load a public name from its module."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted([*globals(), *_HOME])
