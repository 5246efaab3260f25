"""How many samples there are, how much each counts, and how fast to learn from them; how often each
is evaluated if there is noise.

Of a noisy function, each generation evaluates a few samples once more. If that changes their ranks
too much, all samples are evaluated more often from then on, and their values averaged; if not, less
often. The measure is that of UH-CMA-ES (Hansen et al., 2009).
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..core.numpy_twin import Array
from .space import Integers, sanitize

COVARIANCE_SPEED = 2.0  # Learning rates of the covariance, as multiples of CMA-ES's
DAMPING = 0.5  # Damping of the step size, as a multiple of CMA-ES's
REPULSION = 0.3  # How much the weights of bad samples push the mean away; 0 in CMA-ES
TURN_INTERVAL = 20  # The basis turns every d / 20 generations: a turn costs d^3 and changes little


@dataclass(frozen=True)
class Rates:
    """Constants of one generation, which follow from the dimension and the number of samples."""

    weights: Array  # w_k of the covariance by rank, best first: sum 1 for good ones, bad ones < 0
    mean_weights: Array  # those of the mean, with smaller negative ones
    mean_selected: float  # effective number of samples, mu_eff, if the order is random
    path: float  # rate of the path of the mean, c_c
    rank_one: float  # rate of its outer product, c_1
    rank_many: float  # rate of the samples' outer products, c_mu
    step_path: float  # rate of the whitened path, c_sigma
    step_damping: float  # damping of the step size, d_sigma
    expected_norm: float  # of a standard normal vector
    interval: int  # generations between two turns of the basis


@lru_cache(maxsize=256)
def rates(d: int, population: int, separable: bool = False) -> Rates:
    """Return the constants of CMA-ES (Hansen, 2016), with the changes above."""
    raw = math.log((population + 1) / 2) - np.log(np.arange(1, population + 1))
    good = raw[raw > 0]
    bad = -raw[raw < 0]
    selected = float(good.sum() ** 2 / (good**2).sum())
    rejected = float(bad.sum() ** 2 / (bad**2).sum())

    faster = COVARIANCE_SPEED * ((d + 2) / 3 if separable else 1)
    rank_one = min(0.5, faster * 2 / ((d + 1.3) ** 2 + selected))
    rank_many = faster * 2 * (0.25 + selected - 2 + 1 / selected) / ((d + 2) ** 2 + selected)
    rank_many = min(1 - rank_one, 0.9, rank_many)

    # The negative weights of the covariance: as much as keeps it positive definite.
    total = min(1 + rank_one / rank_many, 1 + 2 * rejected / (selected + 2))
    total = min(total, (1 - rank_one - rank_many) / (d * rank_many))
    weights = np.where(raw > 0, raw / good.sum(), total * raw / bad.sum())
    mean_weights = np.where(raw > 0, weights, REPULSION * raw / bad.sum())
    # How far the mean moves if the order is random. Samples are mirrored: each has its opposite
    # among the others.
    squares = float((mean_weights**2).sum())
    square = float(mean_weights.sum()) ** 2
    chance = squares - (square - squares) / (population - 1)
    weights.flags.writeable = False
    mean_weights.flags.writeable = False

    step_path = (selected + 2) / (d + selected + 5)
    crowded = 2 * max(0.0, math.sqrt((selected - 1) / (d + 1)) - 1)
    return Rates(
        weights=weights,
        mean_weights=mean_weights,
        mean_selected=1 / chance,
        path=(4 + selected / d) / (d + 4 + 2 * selected / d),
        rank_one=rank_one,
        rank_many=rank_many,
        step_path=step_path,
        step_damping=DAMPING * (1 + crowded + step_path),
        expected_norm=math.sqrt(d) * (1 - 1 / (4 * d) + 1 / (21 * d**2)),
        interval=max(1, d // TURN_INTERVAL),
    )


def default_population(d: int) -> int:
    """Return the number of samples per generation of CMA-ES and xNES, ``4 + floor(3 log d)``."""
    return 4 + math.floor(3 * math.log(d))


def even(population: int) -> int:
    """Round up to an even number, so that samples come in pairs."""
    return population + population % 2


TOLERANCE = 0.2  # Rank changes below this quantile of random ones are tolerated
GROWTH = 1.5  # Factor of the number of evaluations where there is too much noise
DECAY = 0.9  # Factor where there is not


@dataclass
class Reevaluation:
    """How often each sample is evaluated."""

    repeats: float = 1.0  # evaluations of each sample, rounded down in use
    most: int = 64  # upper limit of it; with 1, nothing is evaluated again to see how noisy it is

    @property
    def final(self) -> int:
        """How often to evaluate the answer."""
        return max(2, int(self.repeats))

    def plan(self, population: int, left: int) -> Integers:
        """Return the sample of each evaluation: all ``repeats`` times, then a few once more."""
        repeats = int(self.repeats)
        again = max(2, population // 5) if self.most > 1 else 0
        if repeats * population + again > left:
            population = min(population, left)
            repeats, again = divmod(left, population)
        return np.concatenate([np.repeat(np.arange(population), repeats), np.arange(again)])

    def average(self, plan: Integers, values: Array) -> Array:
        """Return the mean value of each sample, and learn how noisy they are."""
        population = int(plan.max()) + 1
        repeats = int((plan == population - 1).sum())
        values = sanitize(values)
        first = mean(values[: population * repeats].reshape(population, -1))
        again = values[population * repeats :]
        if not len(again):
            return first
        # Until the first answer is certain, go one small step in either direction.
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
    """Return how much rank changes exceed the tolerated ones, on average over the samples evaluated
    again.
    """
    count = len(again)
    together = np.concatenate([first, again])
    ranks = together.argsort(kind="stable").argsort() + 1
    old = ranks[:count]
    new = ranks[len(first) :]
    others = np.arange(1, len(together))

    def limit(rank: Integers, other: Integers) -> Array:
        changes = np.abs(others - (rank - (rank > other))[:, None])
        return np.asarray(np.quantile(changes, TOLERANCE / 2, axis=1))

    excess = 2 * (np.abs(new - old) - 1) - (limit(new, old) + limit(old, new))
    return sum(excess.tolist()) / max(count, 1)
