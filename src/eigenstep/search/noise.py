"""Noisy functions: find out how much noise changes the order of samples, and average it away by re-evaluation.

Each generation evaluates a few samples once more. If that changes their rank by more than could be put up with, all
samples are evaluated more often from then on, and their values averaged; if not, less often. (The measure is that of
UH-CMA-ES, Hansen et al., 2009.)
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.numpy_twin import Array
from .sampling import sanitize

TOLERANCE = 0.2  # Rank changes below this quantile of random ones are put up with
GROWTH, DECAY = 1.5, 0.9  # How the number of evaluations changes where there is too much noise, and where there is not


@dataclass
class Reevaluation:
    """How often each sample is evaluated."""

    repeats: float = 1.0  # evaluations of each sample, rounded down in use
    most: int = 64  # upper limit of it

    @property
    def final(self) -> int:
        """How often to evaluate the answer."""
        return max(2, int(self.repeats))

    def plan(self, population: int, left: int) -> NDArray[np.int64]:
        """Return which sample each evaluation is of: all ``repeats`` times, then a few once more."""
        repeats, again = int(self.repeats), max(2, population // 5)
        if repeats * population + again > left:
            population = min(population, left)
            repeats, again = divmod(left, population)
        return np.concatenate([np.repeat(np.arange(population), repeats), np.arange(again)])

    def average(self, plan: NDArray[np.int64], values: Array) -> Array:
        """Return the mean value of each sample, and learn how noisy they are."""
        population = int(plan.max()) + 1
        repeats = int((plan == population - 1).sum())
        values = sanitize(values)
        first = mean(values[: population * repeats].reshape(population, -1))
        again = values[population * repeats :]
        if not len(again):
            return first
        # Before the first look is beyond doubt, do not react to it strongly: one step in either direction.
        change = GROWTH if rank_change(first, again) > 0 else DECAY
        self.repeats = float(np.clip(self.repeats * change, 1.0, self.most))
        means = first.copy()
        share = 1 / (repeats + 1)
        means[: len(again)] = (1 - share) * first[: len(again)] + share * again
        return means


def mean(values: Array) -> Array:
    """Return the mean along the last axis, of at most 128 numbers whose sum might overflow."""
    return (values / 128).mean(-1) * 128


def rank_change(first: Array, again: Array) -> float:
    """Return by how much rank changes exceed the tolerated ones, on average over the samples evaluated again."""
    count = len(again)
    together = np.concatenate([first, again])
    ranks = together.argsort(kind="stable").argsort() + 1
    old, new = ranks[:count], ranks[len(first) :]
    change = np.abs(new - old) - 1
    others = np.arange(1, len(together))
    excess = 0.0
    for rank_old, rank_new, moved in zip(old, new, change, strict=True):
        limits = [
            np.quantile(np.abs(others - (rank - (rank > counterpart))), TOLERANCE / 2)
            for rank, counterpart in ((rank_new, rank_old), (rank_old, rank_new))
        ]
        excess += 2 * moved - sum(limits)
    return excess / count if count and not math.isnan(excess) else 0.0
