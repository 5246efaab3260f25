"""eigenstep: learn positive-definite curvature in spectral form, without matrix decompositions.

Importing the package sets up nothing; modules are loaded when their names are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .curvature import Dense, OuterProducts, project
    from .optim import Spectral
    from .spd import Diagonal, Full, Identity, Kronecker

__version__ = "0.1.0"

_HOME = {
    "Dense": "curvature",
    "OuterProducts": "curvature",
    "project": "curvature",
    "Diagonal": "spd",
    "Full": "spd",
    "Identity": "spd",
    "Kronecker": "spd",
    "Spectral": "optim",
}

__all__ = [
    "Dense",
    "Diagonal",
    "Full",
    "Identity",
    "Kronecker",
    "OuterProducts",
    "Spectral",
    "project",
]


def __getattr__(name: str) -> object:
    """Load a public name from its module."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted([*globals(), *_HOME])
