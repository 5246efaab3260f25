"""What a search remembers: what it has asked for, the values of a run, a history that never grows
too long; and the state of all that as plain arrays and numbers.

Unlike a pickle, such a state can be read from strangers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np

from ..core.numpy_twin import Array
from .space import Integers, to_numpy

CHECK_INTERVAL = 10  # Generations between two looks at whether a run is over
LIMIT = 200  # With this many records, every second one is forgotten, and fewer are made
SHOWN = 64  # Of longer vectors, this many evenly spaced entries are recorded


@dataclass
class Asked:
    """The points that a search has asked for last."""

    x: Array | None = None  # as the user got them, shape (population, d)
    drawn: int = (
        0  # number of them that the search has made: the others were injected, and are last
    )
    plan: Integers | None = None  # which point each evaluation is of, if there is noise

    @property
    def points(self) -> Array:
        """What to evaluate, as rows."""
        assert self.x is not None
        return self.x if self.plan is None else self.x[self.plan]

    def is_told(self, x: Array) -> bool:
        """Whether points are all of those to evaluate, in order."""
        return self.x is not None and np.array_equal(x, self.points)

    def rows(self, x: Array) -> Integers:
        """Return where each point is among those that the search has made; -1 for others."""
        if self.x is None:
            return np.full(len(x), -1)
        rows = np.arange(len(x))
        if x is not self.x and not np.array_equal(x, self.x):
            places = {point.tobytes(): row for row, point in enumerate(self.x)}
            rows = np.array([places.get(point.tobytes(), -1) for point in x])
        if self.drawn < len(self.x):
            rows[rows >= self.drawn] = -1
        return rows


@dataclass
class Progress:
    """Values of one run, from its start to its end."""

    best: list[float] = field(default_factory=list)  # least value of each generation
    median: list[float] = field(default_factory=list)  # median value of each generation
    spread: float = math.inf  # range of the last generation's values
    flat: int = 0  # how many generations in a row had equal values

    @property
    def due(self) -> bool:
        """Whether to look if the run is over."""
        return len(self.best) % CHECK_INTERVAL == 0

    def add(self, values: Array) -> None:
        """Take note of one generation's values, failures being ``inf``."""
        ordered = np.sort(values)
        count = len(ordered)
        low = float(ordered[0])
        high = float(ordered[-1])
        self.best.append(low)
        self.median.append(float(ordered[(count - 1) // 2]))
        self.spread = high - low if math.isfinite(high) else math.inf
        # A quarter of the values equal to the best is enough: so many samples are on one plateau.
        plateau = low == ordered[min(math.ceil(count / 4), count - 1)] and math.isfinite(low)
        self.flat = self.flat + 1 if plateau else 0


@dataclass
class History:
    """Records of a search, one entry of each list for each recorded generation."""

    nfev: list[int] = field(default_factory=list)  # evaluations so far
    fun: list[float] = field(default_factory=list)  # least value; inf if all evaluations failed
    best: list[float] = field(default_factory=list)  # least value so far
    median: list[float] = field(default_factory=list)  # median value
    sigma: list[float] = field(default_factory=list)  # step size
    ratio: list[float] = field(default_factory=list)  # longest axis divided by the shortest one
    axes: list[Array] = field(default_factory=list)  # lengths of the axes, sorted
    mean: list[Array] = field(default_factory=list)  # center; of many coordinates, some
    deviations: list[Array] = field(default_factory=list)  # standard deviations of coordinates
    population: list[int] = field(default_factory=list)  # number of points
    run: list[int] = field(default_factory=list)  # number of restarts so far
    stride: int = 1  # generations between two records
    seen: int = 0  # generations so far

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.nfev)

    @property
    def due(self) -> bool:
        """Whether to record the present generation."""
        return self.seen % self.stride == 0

    def add(self, **record: Any) -> None:
        """Add one record, with a value for each list."""
        for name, value in record.items():
            getattr(self, name).append(thin(value) if isinstance(value, np.ndarray) else value)
        if len(self) >= LIMIT:
            self.stride *= 2
            for name in LISTS:
                setattr(self, name, getattr(self, name)[::2])


LISTS = tuple(entry.name for entry in fields(History) if entry.name not in ("stride", "seen"))


def thin(vector: Array) -> Array:
    """Return a vector, or evenly spaced entries of a long one."""
    if len(vector) <= SHOWN:
        return vector.copy()
    return vector[np.linspace(0, len(vector) - 1, SHOWN).astype(int)]


def entries(thing: Any) -> dict[str, Any]:
    """Return the fields of a dataclass but those that never change, which have metadata."""
    return {entry.name: getattr(thing, entry.name) for entry in fields(thing) if not entry.metadata}


def save(thing: Any) -> Any:
    """Return plain arrays, numbers, lists and dictionaries of what something consists of."""
    if is_dataclass(thing):
        return {name: save(value) for name, value in entries(thing).items()}
    if isinstance(thing, np.random.Generator):
        return thing.bit_generator.state
    if isinstance(thing, (list, np.ndarray)):
        return copy(thing)  # an array keeps the order in memory, on which sums depend
    if callable(thing):  # a schedule that is a function, and remembers nothing
        return {}
    if thing is None or isinstance(thing, (str, bool, int, float, np.generic)):
        return thing
    got = type(thing).__name__
    raise TypeError(
        f"a state needs a method that makes dataclasses, got {got}: pickle the search instead"
    )


def restore(like: Any, state: Any, name: str = "state") -> Any:
    """Return what ``save`` was given: something of the kind of ``like``, with a checked state."""
    if is_dataclass(like):
        parts = entries(like)
        if not isinstance(state, Mapping) or state.keys() != parts.keys():
            raise damaged(name)
        restored = {key: restore(part, state[key], key) for key, part in parts.items()}
        return replace(like, **restored)  # type: ignore[type-var]
    if isinstance(like, np.random.Generator):
        rng = np.random.default_rng()
        rng.bit_generator.state = state
        return rng
    if callable(like):
        return like
    return _restore_leaf(like, state, name)


def _restore_leaf(like: Any, state: Any, name: str) -> Any:
    """Return arrays, numbers, texts and lists if they fit; ``None`` may become numbers."""
    if like is None and state is None:
        return None
    if isinstance(like, (str, list)):
        fits = isinstance(state, type(like)) and (isinstance(state, str) or _is_plain(state))
    else:
        numbers = to_numpy(state)
        finite = np.isfinite(numbers) if not isinstance(like, float) else ~np.isnan(numbers)
        fits = bool(finite.all()) and (like is None or numbers.shape == np.shape(like))
    if not fits:
        raise damaged(name)
    return copy(state)


def _is_plain(items: list[Any]) -> bool:
    """Whether items are texts, or else numbers or equally long vectors of them."""
    return all(isinstance(item, str) for item in items) or to_numpy(items).ndim <= 2


def damaged(name: str) -> ValueError:
    """Return an error for an entry of a state that does not fit."""
    return ValueError(
        f"the state is damaged: {name!r} has another shape, or is not finite; or it is of a search "
        "with other options: start with the same arguments"
    )
