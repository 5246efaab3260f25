"""What users pass in, in the type that they use, and where the search may go: bounds, integers,
scales.

The Gaussian searches in coordinates ``u`` without constraints. What the function sees is ``x``:
scaled, reflected at walls like a ball, which keeps distances, and rounded where it must be an
integer. Where a function falls towards a bound, that would make a sharp edge, which a Gaussian
cannot fit. So the walls stand a little outside, and a margin of ``u`` on both sides of the bound is
bent into the inside, ``x = lower + (u - wall)^2 / (4 margin)``: a smooth valley.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.checks import check_number, check_size
from ..core.numpy_twin import Array

Point = Any  # A numpy array or a torch tensor, as the user's start is
# Larger starts and step sizes, or step sizes below one over this, could overflow somewhere
LARGEST = 1e150


class Form:
    """The type that points have for the user: numpy arrays, or torch tensors of some dtype on some
    device.
    """

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
    """Return a copy, which can be given to functions that change what they get."""
    return point.clone() if hasattr(point, "detach") else point.copy()


def to_numpy(values: Any) -> Array:
    """Return real numbers as a float64 array, from any device; ``None`` among others
    becomes NaN.
    """
    if values is None:
        raise TypeError("numbers must be real, got None")
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values if values.is_complex() else values.double()).numpy()
    elif isinstance(values, (list, tuple)):
        values = [value.detach().cpu() if hasattr(value, "detach") else value for value in values]
    array = np.asarray(values)
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


def to_number(value: object) -> float:
    """Return a function value as a float, or say what is wrong with it; numbers too large for a
    float have failed.
    """
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


def read_vector(x: Any, name: str) -> Array:
    """Return a vector of finite numbers, as the argument ``name`` must be."""
    try:
        vector = to_numpy(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a vector of numbers, got {x!r} ({error})") from error
    if vector.ndim != 1 or len(vector) == 0 or not np.isfinite(vector).all():
        raise ValueError(f"{name} must be a vector of finite numbers, got shape {vector.shape}")
    if np.abs(vector).max() > LARGEST:
        raise ValueError(
            f"{name} must have entries of at most {LARGEST} in size, got {np.abs(vector).max():.3g}"
        )
    return vector.copy()


def read_sigma(sigma0: Any, d: int) -> tuple[float, Array]:
    """Return the step size and the scale of the coordinates."""
    given = to_numpy(sigma0)
    if given.shape not in ((), (d,)) or not ((given >= 1 / LARGEST) & (given <= LARGEST)).all():
        raise ValueError(
            f"sigma0 must be a positive number, or {d} of them, between {1 / LARGEST} and "
            f"{LARGEST}; got {sigma0!r}"
        )
    return (float(given), np.ones(d)) if given.ndim == 0 else (1.0, given.copy())


def check_start(start: Array, deviations: Array, tolx: float, form: Form) -> None:
    """Raise where a search could not take its first step."""
    if deviations.max() < tolx:
        raise ValueError(
            f"sigma0 is {deviations.max():.3g}, below tolx={tolx:.3g}, so the search would be over "
            "at once: "
            "choose a larger sigma0 or a smaller tolx"
        )
    swallowed = (start + 0.2 * deviations == start) | (
        form.round(start + deviations) == form.round(start)
    )
    if swallowed.any():
        j = int(swallowed.argmax())
        raise ValueError(
            f"sigma0 is {deviations[j]:.3g} at coordinate {j}, so small that rounding swallows it "
            "when it is added to "
            f"x0, which is {start[j]:.3g} there: choose a larger sigma0"
        )


def check_options(
    *, sizes: Mapping[str, object], numbers: Mapping[str, tuple[object, float]]
) -> None:
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


MARGIN = 0.1  # Largest margin of a bound, as a part of the distance between the bounds


@dataclass(frozen=True)
class Domain:
    """The set of allowed points."""

    scale: Array  # size of one unit of u in each coordinate of x, shape (d,)
    lower: Array  # least allowed x, -inf where there is none
    upper: Array  # largest allowed x, inf where there is none
    integer: NDArray[np.bool_]  # which coordinates are integers
    # how far outside of the bounds the walls are, and how far inside points are moved, shape (d,)
    margin: Array
    categories: Mapping[int, int]  # which coordinates are categories, and how many values they have

    @classmethod
    def build(
        cls,
        scale: Array,
        bounds: object,
        integers: Sequence[int] | NDArray[np.bool_] | None,
        sigma: float = 1.0,
        form: Form | None = None,
        categories: Mapping[int, int] | None = None,
    ) -> Domain:
        """Check what the user asks for."""
        d, form = len(scale), form or Form()
        lower, upper = (form.round(side) for side in _read_bounds(bounds, d))
        mask = _read_integers(integers, d)
        categories = _read_categories(categories, d)
        for j, count in categories.items():
            mask[j], lower[j], upper[j], scale[j] = True, 0.0, count - 1.0, 1.0
        with np.errstate(invalid="ignore"):
            lower, upper = (
                np.where(mask, np.ceil(lower), lower),
                np.where(mask, np.floor(upper), upper),
            )
        wrong = np.flatnonzero(np.where(mask, lower > upper, lower >= upper))
        if len(wrong):
            j = wrong[0]
            kind = "integer " if mask[j] else ""
            raise ValueError(
                f"bounds of {kind}coordinate {j} leave no room: lower {lower[j]}, upper {upper[j]}"
            )
        margin = np.where(mask, 0.0, np.minimum(sigma * scale, MARGIN * (upper - lower)))
        return cls(scale, lower, upper, mask, margin, categories)

    @cached_property
    def bounded(self) -> bool:
        """Whether there is any bound."""
        return bool(np.isfinite(self.lower).any() or np.isfinite(self.upper).any())

    @cached_property
    def whole(self) -> bool:
        """Whether any coordinate is an integer."""
        return bool(self.integer.any())

    @cached_property
    def boxed(self) -> bool:
        """Whether every coordinate has both bounds."""
        return bool(np.isfinite(self.lower).all() and np.isfinite(self.upper).all())

    def contains(self, x: Array) -> bool:
        """Whether all of ``x`` is within the bounds."""
        return bool(((x >= self.lower) & (x <= self.upper)).all())

    def decode(self, u: Array) -> Array:
        """Return the points ``x`` that the function sees."""
        x = u * self.scale
        if self.bounded:
            x = _reflect(x, *self._walls)[0]
            low, high = self._walls
            smooth = np.maximum(self.margin, 1e-300)
            with np.errstate(
                invalid="ignore", over="ignore"
            ):  # far from the bounds, where they are not used
                above = self.lower + (x - low) * ((x - low) / (4 * smooth))
                below = self.upper - (high - x) * ((high - x) / (4 * smooth))
            x = np.where(
                x < self.lower + self.margin,
                above,
                np.where(x > self.upper - self.margin, below, x),
            )
        if self.whole:
            x = np.where(self.integer, np.rint(x), x)
        # Rounding may step over a bound by the last digit.
        return np.clip(x, self.lower, self.upper) if self.bounded else x

    def encode(self, x: Array) -> Array:
        """Return coordinates ``u`` of points within the bounds."""
        if self.bounded:
            low, high = self._walls
            near_low, near_high = x < self.lower + self.margin, x > self.upper - self.margin
            above = low + 2 * np.sqrt(self.margin * np.where(near_low, x - self.lower, 0.0))
            below = high - 2 * np.sqrt(self.margin * np.where(near_high, self.upper - x, 0.0))
            x = np.where(
                near_low & ~self.integer, above, np.where(near_high & ~self.integer, below, x)
            )
        return x / self.scale

    def fold(self, u: Array) -> tuple[Array, NDArray[np.bool_]]:
        """Bring a mean back between the walls; tell which coordinates that has flipped."""
        x, flipped = _reflect(u * self.scale, *self._walls)
        return np.where(x == u * self.scale, u, x / self.scale), flipped

    def random(self, rng: np.random.Generator) -> Array:
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
        return np.where(self.integer, np.maximum(1.0, least / (deviations * self.scale)), 1.0)

    @cached_property
    def _walls(self) -> tuple[Array, Array]:
        """Where to reflect; integers round from half a unit beyond their bounds."""
        margin = np.where(self.integer, 0.5, self.margin)
        return self.lower - margin, self.upper + margin


def _reflect(x: Array, lower: Array, upper: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return ``x`` reflected into ``[lower, upper]``, and where the number of
    reflections is odd.
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


def _read_bounds(bounds: object, d: int) -> tuple[Array, Array]:
    expected = f"bounds must be (lower, upper), or one such pair for each of the {d} coordinates"
    if bounds is None:
        return np.full(d, -math.inf), np.full(d, math.inf)
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):  # scipy.optimize.Bounds
        bounds = (bounds.lb, bounds.ub)
    if not isinstance(bounds, (Sequence, np.ndarray)):
        raise TypeError(f"{expected}; got {type(bounds).__name__}")
    pairs = len(bounds) == d and all(np.ndim(pair) == 1 and np.size(pair) == 2 for pair in bounds)
    # Two pairs for two coordinates are read coordinate by coordinate, as SciPy does.
    if not pairs and len(bounds) != 2:
        raise ValueError(f"{expected}; got {len(bounds)} entries")
    sides = [[pair[side] for pair in bounds] if pairs else bounds[side] for side in (0, 1)]
    lower, upper = (
        _read_side(side, missing, d)
        for side, missing in zip(sides, (-math.inf, math.inf), strict=True)
    )
    return lower, upper


def _read_side(side: Any, missing: float, d: int) -> Array:
    if side is None or np.ndim(side) == 0:
        side = [side] * d
    if len(side) != d:
        raise ValueError(f"bounds must have {d} entries on each side, got {len(side)}")
    try:
        numbers = np.array([missing if entry is None else float(entry) for entry in side])
    except (TypeError, ValueError) as error:
        raise TypeError(f"bounds must be numbers or None ({error})") from error
    if np.isnan(numbers).any():
        raise ValueError("bounds must not be NaN; use None where there is no bound")
    return numbers


def _read_integers(integers: Sequence[int] | NDArray[np.bool_] | None, d: int) -> NDArray[np.bool_]:
    given = np.asarray([] if integers is None else integers)
    if given.dtype == bool:
        if given.shape != (d,):
            raise ValueError(f"integers as a mask must have shape ({d},), got {given.shape}")
        return given.copy()
    if given.size and (given.dtype.kind != "i" or given.ndim != 1):
        raise TypeError(f"integers must be indices of coordinates or a mask, got {integers!r}")
    if given.size and (given.min() < -d or given.max() >= d):
        raise ValueError(f"integers must be indices below {d}, got {integers!r}")
    mask = np.zeros(d, dtype=bool)
    mask[given.astype(int)] = True
    return mask


def _read_categories(categories: Mapping[int, int] | None, d: int) -> dict[int, int]:
    if categories is None:
        return {}
    if not isinstance(categories, Mapping):
        raise TypeError(
            "categories must be a dictionary of coordinates and numbers of values, got "
            f"{categories!r}"
        )
    for j, count in categories.items():
        check_size(count, f"categories[{j}]")
        if isinstance(j, bool) or not isinstance(j, int) or not 0 <= j < d or count < 2:
            raise ValueError(
                f"categories must have keys below {d} and at least 2 values each, got "
                f"{categories!r}"
            )
    if len(categories) == d:
        raise ValueError("categories must leave at least one coordinate that is a number")
    return dict(sorted(categories.items()))
