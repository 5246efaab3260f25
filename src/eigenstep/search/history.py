"""What happened: a record of each generation that never grows too long, and what a search has asked
for.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.numpy_twin import Array

# When there are this many records, every second one is forgotten and half as many are made from
# then on
LIMIT = 200
SHOWN = 64  # Of longer vectors, this many evenly spaced entries are recorded


@dataclass
class History:
    """Records of a search, one entry of each list for each recorded generation.

    They are evaluations so far, ``nfev``; values: ``fun``, the least of the generation, ``best`` so
    far, and the ``median``; of the distribution the step size ``sigma``, its ``axes``, sorted, with
    the ``ratio`` of the longest and the shortest, its ``mean`` and the ``deviations`` of the
    coordinates (of many, some); the ``population``; and how many restarts there were before,
    ``run``.
    """

    nfev: list[int] = field(default_factory=list)
    fun: list[float] = field(default_factory=list)  # inf if all evaluations failed
    best: list[float] = field(default_factory=list)
    median: list[float] = field(default_factory=list)
    sigma: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    axes: list[Array] = field(default_factory=list)
    mean: list[Array] = field(default_factory=list)
    deviations: list[Array] = field(default_factory=list)
    population: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    stride: int = 1  # generations between two records
    seen: int = 0  # generations so far

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


LISTS = tuple(entry.name for entry in fields(History) if entry.name not in ("stride", "seen"))


def thin(vector: Array) -> Array:
    """Return a vector, or evenly spaced entries of a long one."""
    if len(vector) <= SHOWN:
        return vector.copy()
    return vector[np.linspace(0, len(vector) - 1, SHOWN).astype(int)]


@dataclass(frozen=True)
class Asked:
    """One generation."""

    x: Array  # its points, as the user got them, shape (K, d)
    z: Array  # what the distribution made them of; NaN for points that it did not make
    # Which of them each evaluation is of, if some are evaluated more than once
    plan: NDArray[np.int64] | None

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
