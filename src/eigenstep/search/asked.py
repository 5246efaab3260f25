"""Points that were handed out, and are recognized when they come back with their values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.numpy_twin import Array


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
