"""What users pass in: read, checked, and remembered in the type that they use."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.arguments import check_number, check_size
from ..core.numpy_twin import Array

Point = Any  # A numpy array or a torch tensor, as the user's start is
LARGEST = 1e150  # Larger starts and step sizes, or step sizes below one over this, could overflow somewhere


class Form:
    """The type that points have for the user: numpy arrays, or torch tensors of some dtype on some device."""

    def __init__(self, dtype: Any = None, device: Any = None, largest: float = np.inf) -> None:
        """Remember the type, and the largest number that it can hold; without a dtype, numpy."""
        self._dtype, self._device, self._largest = dtype, device, largest

    @classmethod
    def of(cls, x: Any) -> Form:
        """Return the form of a point."""
        if not hasattr(x, "detach"):
            return cls()
        if not x.is_floating_point():
            raise TypeError(f"x0 must be a floating-point tensor, got {x.dtype}")
        import torch

        return cls(x.dtype, x.device, torch.finfo(x.dtype).max)

    def make(self, x: Array) -> Point:
        """Return a copy of points in this form, cut at the largest number that it can hold."""
        if self._dtype is None:
            return x.copy()
        return self._convert(np.clip(x, -self._largest, self._largest))

    def round(self, x: Array) -> Array:
        """Return numbers as they are after they have been in this form."""
        return x if self._dtype is None else to_numpy(self._convert(x))

    def _convert(self, x: Array) -> Point:
        import torch

        return torch.tensor(x, dtype=self._dtype, device=self._device)


def copy_point(point: Point) -> Point:
    """Return a copy, which can be given to functions that change what they get."""
    return point.clone() if hasattr(point, "detach") else point.copy()


def to_numpy(values: Any) -> Array:
    """Return real numbers as a float64 array, from any device; ``None`` among others becomes NaN."""
    if values is None:
        raise TypeError("numbers must be real, got None")
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values if values.is_complex() else values.double()).numpy()
    elif isinstance(values, (list, tuple)):
        values = [value.detach().cpu() if hasattr(value, "detach") else value for value in values]
    array = np.asarray(values)
    if array.dtype.kind == "c":
        raise TypeError("numbers must be real, got complex ones; take their real part or their absolute value")
    if array.dtype.kind not in "biufO":
        raise TypeError(f"numbers must be real, got {array.dtype}")
    try:
        return array.astype(np.float64, copy=False)
    except (OverflowError, TypeError, ValueError) as error:
        raise TypeError(f"numbers must be real, and not too large for float64 ({error})") from error


def to_number(value: object) -> float:
    """Return a function value as a float, or say what is wrong with it; numbers too large for a float have failed."""
    if isinstance(value, (int, float)):
        return float(value) if abs(value) <= sys.float_info.max else math.inf
    try:
        array = to_numpy(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"fun must return a real number, got {type(value).__name__} ({error})") from error
    if array.size != 1:
        raise TypeError(f"fun must return a real number, got an array of shape {array.shape}")
    return float(array.reshape(()))


def read_vector(x: Any, name: str) -> Array:
    """Return a vector of finite numbers, as the argument ``name`` must be."""
    try:
        vector = to_numpy(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a vector of numbers, got {x!r} ({error})") from error
    if vector.ndim != 1 or len(vector) == 0 or not np.isfinite(vector).all():
        raise ValueError(f"{name} must be a vector of finite numbers, got shape {vector.shape}")
    if np.abs(vector).max() > LARGEST:
        raise ValueError(f"{name} must have entries of at most {LARGEST} in size, got {np.abs(vector).max():.3g}")
    return vector.copy()


def read_sigma(sigma0: Any, d: int) -> tuple[float, Array]:
    """Return the step size and the scale of the coordinates."""
    given = to_numpy(sigma0)
    if given.shape not in ((), (d,)) or not ((given >= 1 / LARGEST) & (given <= LARGEST)).all():
        raise ValueError(
            f"sigma0 must be a positive number, or {d} of them, between {1 / LARGEST} and {LARGEST}; got {sigma0!r}"
        )
    return (float(given), np.ones(d)) if given.ndim == 0 else (1.0, given.copy())


def check_start(start: Array, deviations: Array, tolx: float, form: Form) -> None:
    """Raise where a search could not take its first step."""
    if deviations.max() < tolx:
        raise ValueError(
            f"sigma0 is {deviations.max():.3g}, below tolx={tolx:.3g}, so the search would be over at once: "
            "choose a larger sigma0 or a smaller tolx"
        )
    swallowed = (start + 0.2 * deviations == start) | (form.round(start + deviations) == form.round(start))
    if swallowed.any():
        j = int(swallowed.argmax())
        raise ValueError(
            f"sigma0 is {deviations[j]:.3g} at coordinate {j}, so small that rounding swallows it when it is added to "
            f"x0, which is {start[j]:.3g} there: choose a larger sigma0"
        )


def check_options(*, sizes: Mapping[str, object], numbers: Mapping[str, tuple[object, float]]) -> None:
    """Raise unless all options are possible; ``None`` is allowed."""
    for name, value in sizes.items():
        if value is not None:
            check_size(value, name)
    for name, (number, least) in numbers.items():
        if number is not None:
            check_number(number, name, least)


def check_population(population: int | None) -> None:
    """Raise unless a population is large enough to learn from, or left open."""
    if population is not None:
        check_size(population, "population")
        if population < 4:
            raise ValueError(f"population must be at least 4, got {population}")
