"""What users pass to a search, read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.checks import check_number, check_size
from ..core.numpy_twin import Array
from .space import Form, Mask, Space, to_numpy

LARGEST = 1e150  # Larger starts and step sizes, or step sizes below one over this, could overflow
MARGIN = 0.1  # Largest margin of a bound, as a part of the distance between the bounds


def read_vector(x: Any, name: str) -> Array:
    """Return a vector of finite numbers, as the argument ``name`` must be."""
    try:
        vector = to_numpy(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a vector of numbers, got {x!r} ({error})") from error
    if vector.ndim != 1 or len(vector) == 0 or not np.isfinite(vector).all():
        raise ValueError(f"{name} must be a vector of finite numbers, got shape {vector.shape}")
    largest = np.abs(vector).max()
    if largest > LARGEST:
        raise ValueError(
            f"{name} must have entries of at most {LARGEST} in size, got {largest:.3g}"
        )
    return vector.copy()


def read_sigma(sigma0: Any, d: int) -> tuple[float, Array]:
    """Return the step size and the scale of the coordinates."""
    sizes = to_numpy(sigma0)
    possible = ((sizes >= 1 / LARGEST) & (sizes <= LARGEST)).all()
    if sizes.shape not in ((), (d,)) or not possible:
        raise ValueError(
            f"sigma0 must be a positive number, or {d} of them, between {1 / LARGEST} and "
            f"{LARGEST}; got {sigma0!r}"
        )
    if sizes.ndim == 0:
        return float(sizes), np.ones(d)
    return 1.0, sizes.copy()


def check_start(start: Array, deviations: Array, tolx: float, form: Form) -> None:
    """Raise where a search could not take its first step."""
    if deviations.max() < tolx:
        raise ValueError(
            f"sigma0 is {deviations.max():.3g}, below tolx={tolx:.3g}, so the search would be over "
            "at once: choose a larger sigma0 or a smaller tolx"
        )
    same = form.round(start + deviations) == form.round(start)
    swallowed = same | (start + 0.2 * deviations == start)
    if swallowed.any():
        j = int(swallowed.argmax())
        raise ValueError(
            f"sigma0 is {deviations[j]:.3g} at coordinate {j}, so small that rounding swallows it "
            f"when it is added to x0, which is {start[j]:.3g} there: choose a larger sigma0"
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


def read_space(
    scale: Array,
    bounds: object = None,
    integers: object = None,
    categories: object = None,
    *,
    sigma: float = 1.0,
    form: Form | None = None,
) -> Space:
    """Return where a search may go, or say why that is impossible."""
    d = len(scale)
    form = form or Form()
    lower, upper = (form.round(side) for side in _read_bounds(bounds, d))
    mask = _read_integers(integers, d)
    counts = _read_categories(categories, d)
    for j, count in counts.items():
        mask[j] = True
        lower[j] = 0.0
        upper[j] = count - 1.0
        scale[j] = 1.0
    with np.errstate(invalid="ignore"):
        lower = np.where(mask, np.ceil(lower), lower)
        upper = np.where(mask, np.floor(upper), upper)
    _check_room(lower, upper, mask)
    margin = np.minimum(sigma * scale, MARGIN * (upper - lower))
    return Space(scale, lower, upper, mask, np.where(mask, 0.0, margin), counts)


def _check_room(lower: Array, upper: Array, mask: Mask) -> None:
    crossed = np.flatnonzero(np.where(mask, lower > upper, lower >= upper))
    if len(crossed):
        j = crossed[0]
        kind = "integer " if mask[j] else ""
        raise ValueError(
            f"bounds of {kind}coordinate {j} leave no room: lower {lower[j]}, upper {upper[j]}"
        )


def _read_bounds(bounds: Any, d: int) -> tuple[Array, Array]:
    expected = f"bounds must be (lower, upper), or one such pair for each of the {d} coordinates"
    if bounds is None:
        bounds = (None, None)
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):  # scipy.optimize.Bounds
        bounds = (bounds.lb, bounds.ub)
    if not isinstance(bounds, (Sequence, np.ndarray)):
        raise TypeError(f"{expected}; got {type(bounds).__name__}")
    # Two pairs for two coordinates are read coordinate by coordinate, as SciPy does.
    if len(bounds) == d and all(np.ndim(pair) == 1 and np.size(pair) == 2 for pair in bounds):
        bounds = list(zip(*bounds, strict=True))
    elif len(bounds) != 2:
        raise ValueError(f"{expected}; got {len(bounds)} entries")
    return _read_side(bounds[0], -math.inf, d), _read_side(bounds[1], math.inf, d)


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


def _read_integers(integers: Any, d: int) -> Mask:
    indices = np.asarray([] if integers is None else integers)
    if indices.dtype == bool:
        if indices.shape != (d,):
            raise ValueError(f"integers as a mask must have shape ({d},), got {indices.shape}")
        return indices.copy()
    if indices.size and (indices.dtype.kind != "i" or indices.ndim != 1):
        raise TypeError(f"integers must be indices of coordinates or a mask, got {integers!r}")
    if indices.size and (indices.min() < -d or indices.max() >= d):
        raise ValueError(f"integers must be indices below {d}, got {integers!r}")
    mask = np.zeros(d, dtype=bool)
    mask[indices.astype(int)] = True
    return mask


def _read_categories(categories: Any, d: int) -> dict[int, int]:
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
