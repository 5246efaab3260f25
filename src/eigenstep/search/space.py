"""Points in the user's type and in the search's coordinates, and where they may lie: bounds,
integers, scales.

A distribution searches in coordinates ``u`` without constraints. The function sees ``x``: scaled,
reflected at walls like a ball, which keeps distances, and rounded where it must be an integer.
Where a function falls towards a bound, a reflection there would make a sharp edge, which a Gaussian
cannot fit. So the walls stand a little outside of the bounds, and a margin of ``u`` on both sides
of each bound is bent into the inside, ``x = lower + (u - wall)^2 / (4 margin)``: a smooth valley.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.numpy_twin import Array

Point = Any  # A numpy array or a torch tensor, as the user's start is
Mask = NDArray[np.bool_]
Integers = NDArray[np.int64]
Rng = np.random.Generator


class Form:
    """The user's type of points: numpy arrays, or torch tensors of some dtype on some device."""

    def __init__(self, x: Any = None) -> None:
        """Remember the type of a point; numpy without one."""
        self._like = x.new_empty(0) if hasattr(x, "detach") else None
        if self._like is not None and not x.is_floating_point():
            raise TypeError(f"x0 must be a floating-point tensor, got {x.dtype}")

    @property
    def exact(self) -> bool:
        """Whether points are float64."""
        return self._like is None or self._like.element_size() == 8

    def make(self, x: Array) -> Point:
        """Return a copy of points in this form, cut at the largest number that it can hold."""
        if self._like is None:
            return x.copy()
        import torch

        largest = torch.finfo(self._like.dtype).max
        return self._like.new_tensor(np.clip(x, -largest, largest))

    def round(self, x: Array) -> Array:
        """Return numbers as they are after they have been in this form."""
        return x if self._like is None else to_numpy(self._like.new_tensor(x))


def copy_point(point: Point) -> Point:
    """Return a copy, for functions that change what they get."""
    return point.clone() if hasattr(point, "detach") else point.copy()


def to_numpy(values: Any) -> Array:
    """Return real numbers from any device as a float64 array; ``None`` in a list becomes NaN."""
    if values is None:
        raise TypeError("numbers must be real, got None")
    array = np.asarray(_without_torch(values))
    if array.dtype.kind == "c":
        raise TypeError(
            "numbers must be real, got complex ones; take their real part or their absolute value"
        )
    if array.dtype.kind not in "biufO":
        raise TypeError(f"numbers must be real, got {array.dtype}")
    try:
        return array.astype(np.float64, copy=False)
    except (OverflowError, TypeError, ValueError) as error:
        raise TypeError(f"numbers must be real, and not too large for float64 ({error})") from error


def _without_torch(values: Any) -> Any:
    """Return tensors, alone or in a list, as arrays."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        return (values if values.is_complex() else values.double()).numpy()
    if isinstance(values, (list, tuple)):
        return [_without_torch(value) if hasattr(value, "detach") else value for value in values]
    return values


def to_number(value: object) -> float:
    """Return a function value as a float; numbers too large for a float count as failures."""
    if isinstance(value, (int, float)):
        return float(value) if abs(value) <= sys.float_info.max else math.inf
    try:
        array = to_numpy(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"fun must return a real number, got {type(value).__name__} ({error})"
        ) from error
    if array.size != 1:
        raise TypeError(f"fun must return a real number, got an array of shape {array.shape}")
    return float(array.reshape(()))


def sanitize(values: Array) -> Array:
    """Return values with ``+inf``, the worst one, for failures: what is no finite number."""
    return np.where(np.isfinite(values), values, np.inf)


@dataclass(frozen=True)
class Space:
    """The set of allowed points."""

    scale: Array  # size of one unit of u in each coordinate of x, shape (d,)
    lower: Array  # least allowed x, -inf where there is none
    upper: Array  # largest allowed x, inf where there is none
    integer: Mask  # which coordinates are integers
    margin: Array  # distance of the walls from the bounds, and width of the bent zone, shape (d,)
    categories: Mapping[int, int]  # which coordinates are categories, and how many values they have

    @cached_property
    def bounded(self) -> bool:
        """Whether there is any bound."""
        return bool(np.isfinite([self.lower, self.upper]).any())

    @cached_property
    def whole(self) -> bool:
        """Whether any coordinate is an integer."""
        return bool(self.integer.any())

    @cached_property
    def boxed(self) -> bool:
        """Whether every coordinate has both bounds."""
        return bool(np.isfinite([self.lower, self.upper]).all())

    @cached_property
    def _walls(self) -> tuple[Array, Array]:
        """Where to reflect; integers round from half a unit beyond their bounds."""
        margin = np.where(self.integer, 0.5, self.margin)
        return self.lower - margin, self.upper + margin

    def contains(self, x: Array) -> bool:
        """Whether all of ``x`` is within the bounds."""
        return bool(((x >= self.lower) & (x <= self.upper)).all())

    def decode(self, u: Array) -> Array:
        """Return the points ``x`` that the function sees."""
        x = u * self.scale
        if self.bounded:
            x = self._bend(_reflect(x, *self._walls)[0])
        if self.whole:
            x = np.where(self.integer, np.rint(x), x)
        # Rounding may step over a bound by the last digit.
        return np.clip(x, self.lower, self.upper) if self.bounded else x

    def _bend(self, x: Array) -> Array:
        """Move points between a wall and the end of its margin to the inside of the bound."""
        low, high = self._walls
        smooth = np.maximum(self.margin, 1e-300)
        with np.errstate(invalid="ignore", over="ignore"):  # far from the bounds, where unused
            above = self.lower + (x - low) * ((x - low) / (4 * smooth))
            below = self.upper - (high - x) * ((high - x) / (4 * smooth))
        inside = np.where(x > self.upper - self.margin, below, x)
        return np.where(x < self.lower + self.margin, above, inside)

    def encode(self, x: Array) -> Array:
        """Return coordinates ``u`` of points within the bounds."""
        if not self.bounded:
            return x / self.scale
        low, high = self._walls
        near_low = x < self.lower + self.margin
        near_high = x > self.upper - self.margin
        rise = np.where(near_low, x - self.lower, 0.0)
        fall = np.where(near_high, self.upper - x, 0.0)
        above = low + 2 * np.sqrt(self.margin * rise)
        below = high - 2 * np.sqrt(self.margin * fall)
        inside = np.where(near_high & ~self.integer, below, x)
        return np.where(near_low & ~self.integer, above, inside) / self.scale

    def fold(self, u: Array) -> tuple[Array, Mask]:
        """Bring a mean back between the walls; tell which coordinates that has flipped."""
        x, flipped = _reflect(u * self.scale, *self._walls)
        return np.where(x == u * self.scale, u, x / self.scale), flipped

    def random(self, rng: Rng) -> Array:
        """Return a uniformly random point of a box."""
        x = rng.uniform(self.lower, self.upper)
        return np.where(self.integer, np.rint(x), x)

    def stretch(self, deviations: Array, population: int) -> Array | None:
        """Return factors that keep integer coordinates moving, shape ``(d,)``; ``None`` without
        integers.

        A deviation much smaller than 1 would give the same integer for ever. It is stretched so
        that a mean in the middle of what rounds to its integer leaves it with probability ``1 / (d
        K)``, about once in each generation.
        """
        if not self.whole:
            return None
        chance = 1 / max(2.0, len(self.scale) * population)
        least = 0.5 / NormalDist().inv_cdf(1 - chance / 2)
        factors = np.maximum(1.0, least / (deviations * self.scale))
        return np.where(self.integer, factors, 1.0)


def _reflect(x: Array, lower: Array, upper: Array) -> tuple[Array, Mask]:
    """Return ``x`` reflected into ``[lower, upper]``, and where that took an odd number of
    reflections.
    """
    below = x < lower
    outside = below | (x > upper)
    if not outside.any():
        return x, outside
    both = np.isfinite(lower) & np.isfinite(upper)
    width = np.where(both, upper - lower, 1.0)
    start = np.where(np.isfinite(lower), lower, 0.0)
    phase = np.mod(x - start, 2 * width)
    inside = start + np.where(phase > width, 2 * width - phase, phase)
    with np.errstate(invalid="ignore"):
        once = np.where(below, 2 * lower - x, 2 * upper - x)
    flipped = np.where(both, outside & (phase > width), outside)
    return np.where(outside, np.where(both, inside, once), x), flipped
