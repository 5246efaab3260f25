"""Optional packages: imported when needed, and asked for in a sentence when missing."""

from __future__ import annotations

import importlib
from typing import Any


class MissingPackage(ImportError):
    """An optional package is not installed; the message says how to install it."""


def require(module: str, install: str) -> Any:
    """Import an optional package, or say what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"this needs the package {module!r}, which cannot be imported ({error}). "
            f"Install it with: pip install '{install}'"
        ) from error
