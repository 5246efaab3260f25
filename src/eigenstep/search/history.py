"""What happened: a record of each generation that never grows too long.

Beside it, what a search has asked for, and its whole state as plain arrays and numbers, and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..core.numpy_twin import Array
from .domain import read_vector
from .runs import Progress, Start, known_reason
from .sampling import Reevaluation

if TYPE_CHECKING:
    from .search import Search

LIMIT = 200  # When there are this many records, every second one is forgotten and half as many are made from then on
SHOWN = 64  # Of longer vectors, this many evenly spaced entries are recorded


@dataclass
class History:
    """Records of a search, one entry of each list for each recorded generation.

    Attributes:
        nfev: evaluations so far.
        fun: best value of the generation; ``inf`` if all evaluations failed.
        best: best value so far.
        median: median value of the generation.
        sigma: step size.
        ratio: longest axis of the distribution divided by its shortest.
        axes: lengths of the axes, sorted (of many axes, some).
        mean: center of the distribution in the coordinates of the problem (of many coordinates, some).
        deviations: standard deviations of those coordinates.
        population: samples in the generation.
        run: how many restarts there were before.
        stride: generations between two records.
        seen: generations so far.
    """

    nfev: list[int] = field(default_factory=list)
    fun: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    median: list[float] = field(default_factory=list)
    sigma: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    axes: list[Array] = field(default_factory=list)
    mean: list[Array] = field(default_factory=list)
    deviations: list[Array] = field(default_factory=list)
    population: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    stride: int = 1
    seen: int = 0

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.nfev)

    @property
    def due(self) -> bool:
        """Whether the present generation should be recorded."""
        return self.seen % self.stride == 0

    def add(self, **record: Any) -> None:
        """Add one record, with a value for each list."""
        for name, value in record.items():
            getattr(self, name).append(thin(value) if isinstance(value, np.ndarray) else value)
        if len(self) >= LIMIT:
            self.stride *= 2
            for name in LISTS:
                setattr(self, name, getattr(self, name)[::2])

    def as_dict(self) -> dict[str, Any]:
        """Return everything as arrays and numbers."""
        return {**{name: np.array(getattr(self, name)) for name in LISTS}, "stride": self.stride, "seen": self.seen}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> History:
        """Build from what ``as_dict`` returned, or raise a ``ValueError``."""
        arrays = {name: np.asarray(state[name]) for name in (*LISTS, *NUMBERS)}
        records = arrays["nfev"].shape
        for name, array in arrays.items():
            vectors = name in VECTORS and records != (0,)
            expected = () if name in NUMBERS else records
            if array.shape[:1] != expected or array.ndim != len(expected) + vectors:
                raise ValueError(f"{name!r} has shape {array.shape}")
            whole = name in (*NUMBERS, *WHOLE)
            if array.dtype.kind not in ("iu" if whole and array.size else "iuf"):
                raise ValueError(f"{name!r} holds {array.dtype}")
        stride, seen = (int(arrays[name]) for name in NUMBERS)
        if len(records) != 1 or records[0] >= LIMIT or stride < 1 or seen < 0:
            raise ValueError(f"{records} records with stride {stride} of {seen} generations")
        lists = {n: list(arrays[n]) if n in VECTORS else arrays[n].tolist() for n in LISTS}
        return cls(**lists, stride=stride, seen=seen)


NUMBERS = ("stride", "seen")
VECTORS = ("axes", "mean", "deviations")
WHOLE = ("nfev", "population", "run")
LISTS = tuple(entry.name for entry in fields(History) if entry.name not in NUMBERS)


def thin(vector: Array) -> Array:
    """Return a vector, or evenly spaced entries of a long one."""
    if len(vector) <= SHOWN:
        return vector.copy()
    return vector[np.linspace(0, len(vector) - 1, SHOWN).astype(int)]


COUNTS = ("evaluations", "iterations", "failures", "restarts", "best_fun", "_run_start")


@dataclass(frozen=True)
class Asked:
    """One generation."""

    x: Array  # its points, as the user got them, shape (K, d)
    z: Array  # what the distribution made them of; NaN for points that it did not make
    plan: NDArray[np.int64] | None  # which of them each evaluation is of, if some are evaluated more than once

    @property
    def points(self) -> Array:
        """What to evaluate, as rows."""
        return self.x if self.plan is None else self.x[self.plan]

    def sources(self, x: Array) -> Array:
        """Return the ``z`` of points in any order, NaN for unknown ones."""
        if np.array_equal(x, self.x):
            return self.z.copy()
        known = {row.tobytes(): source for row, source in zip(self.x, self.z, strict=True)}
        missing = np.full(x.shape[1], np.nan)
        return np.array([known.get(row.tobytes(), missing) for row in x])


def save(search: Search) -> dict[str, Any]:
    """Return everything that changes during a search."""
    asked, best_x, restarts = search._asked, search.best_x, search._restarts
    memory = _entries(restarts) if is_dataclass(restarts) else {}  # a plain function has none
    return {
        "distribution": _entries(search.distribution),
        "rng": search._rng.bit_generator.state,
        "present": asdict(search._present),
        "restarts": None if restarts is None else memory,
        "progress": asdict(search._progress),
        "noise": None if search.noise is None else asdict(search.noise),
        "history": search.history.as_dict(),
        "asked": None if asked is None else [asked.x, asked.z, asked.plan],
        "injected": list(search._injected),
        "counts": {name: getattr(search, name) for name in COUNTS},
        "best_x": None if best_x is None else best_x.copy(),
        "reason": search._reason,
        "seconds": search.seconds,
    }


def restore(search: Search, state: Mapping[str, Any]) -> None:
    """Give a search, started with the same arguments, the state that another one had; or leave it as it is."""
    try:
        attributes = _read(search, state)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"state_dict is not one of a search, or is damaged ({error!r})") from error
    for name, value in attributes.items():
        setattr(search, name, value)


def _read(search: Search, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that a search gets from a state."""
    own, loaded = _entries(search.distribution), state["distribution"]
    if set(loaded) != set(own) or np.shape(loaded["mean"]) != (search.dimension,):
        raise ValueError("state_dict is of a search with another method or dimension: start with the same arguments")
    if (state["restarts"] is None) != (search._restarts is None) or (state["noise"] is None) != (search.noise is None):
        raise ValueError("state_dict is of a search with other restarts or noise: start with the same arguments")
    for name, value in loaded.items():
        fits = own[name] is None or value is None or np.shape(value) == np.shape(own[name])
        if not fits or (value is not None and not np.isfinite(value).all()):
            raise ValueError(f"state_dict is damaged: {name!r} of its distribution has another shape, or is not finite")
    rng = np.random.default_rng()
    rng.bit_generator.state = state["rng"]
    restarts = copy(search._restarts)
    for name, value in (state["restarts"] or {}).items():
        setattr(restarts, name, value)
    lists = {name: list(state["progress"][name]) for name in ("best", "median")}
    best_x = state["best_x"]
    return {
        "distribution": replace(search.distribution, **loaded),  # type: ignore[type-var]
        "_rng": rng,
        "_present": Start(**state["present"]),
        "_restarts": restarts,
        "_progress": Progress(**{**state["progress"], **lists}),
        "noise": None if state["noise"] is None else Reevaluation(**state["noise"]),
        "history": History.from_dict(state["history"]),
        "_asked": None if state["asked"] is None else Asked(*state["asked"]),
        "_injected": [read_vector(point, "injected") for point in state["injected"]],
        **{name: state["counts"][name] + 0 for name in COUNTS},
        "best_x": None if best_x is None else read_vector(best_x, "best_x"),
        "_reason": None if state["reason"] is None else known_reason(state["reason"]),
        "_seconds": float(state["seconds"]),
        "_clock": None,
    }


def _entries(thing: Any) -> dict[str, Any]:
    """Return the entries of a dataclass, without copying them."""
    if not is_dataclass(thing):
        got = type(thing).__name__
        raise TypeError(f"state_dict needs a method that makes dataclasses, got {got}: pickle the search instead")
    return {entry.name: getattr(thing, entry.name) for entry in fields(thing)}
