"""What users pass in: read, checked, and remembered in the type that they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.arguments import check_number, check_size
from ..core.numpy_twin import Array
from .evaluation import Point, to_numpy


class Form:
    """The type that points have for the user: numpy arrays, or torch tensors of some dtype on some device."""

    def __init__(self, dtype: Any = None, device: Any = None) -> None:
        """Remember the type; without a dtype, numpy."""
        self._dtype, self._device = dtype, device

    @classmethod
    def of(cls, x: Any) -> Form:
        """Return the form of a point."""
        if not hasattr(x, "detach"):
            return cls()
        if not x.is_floating_point():
            raise TypeError(f"x0 must be a floating-point tensor, got {x.dtype}")
        return cls(x.dtype, x.device)

    def make(self, x: Array) -> Point:
        """Return points in this form."""
        if self._dtype is None:
            return x
        import torch

        return torch.from_numpy(np.ascontiguousarray(x)).to(device=self._device, dtype=self._dtype)


def read_vector(x: Any, name: str) -> Array:
    """Return a vector of finite numbers, as the argument ``name`` must be."""
    try:
        vector = to_numpy(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a vector of numbers, got {x!r}") from error
    if vector.ndim != 1 or len(vector) == 0 or not np.isfinite(vector).all():
        raise ValueError(f"{name} must be a vector of finite numbers, got shape {vector.shape}")
    return vector.copy()


def read_sigma(sigma0: Any, d: int) -> tuple[float, Array]:
    """Return the step size and the scale of the coordinates."""
    given = to_numpy(sigma0)
    if given.shape not in ((), (d,)) or not (np.isfinite(given) & (given > 0)).all():
        raise ValueError(f"sigma0 must be a positive number, or {d} of them; got {sigma0!r}")
    return (float(given), np.ones(d)) if given.ndim == 0 else (1.0, given.copy())


def check_options(
    *,
    choices: Mapping[str, tuple[object, Sequence[object]]],
    sizes: Mapping[str, object],
    numbers: Mapping[str, tuple[object, float]],
) -> None:
    """Raise unless all options are possible; ``None`` is allowed for sizes and numbers.

    Args:
        choices: value and allowed values by name.
        sizes: values that must be positive integers.
        numbers: value and lower limit by name.
    """
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}")
    for name, value in sizes.items():
        if value is not None:
            check_size(value, name)
    for name, (value, least) in numbers.items():
        if value is not None:
            check_number(value, name, least)
