"""Samples: how they are drawn, how much each counts, and how fast to learn from them; how often, if
there is noise.

Of a noisy function, each generation evaluates a few samples once more. If that changes their rank
by more than could be put up with, all samples are evaluated more often from then on, and their
values averaged; if not, less often. (The measure is that of UH-CMA-ES, Hansen et al., 2009.)
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..core.numpy_twin import Array


def mirrored_orthogonal(
    rng: np.random.Generator, batch: tuple[int, ...], population: int, d: int
) -> Array:
    """Return orthogonal samples ``z`` and ``-z``; an odd population has one without a
    mirror image.
    """
    z = orthogonal(rng, batch, (population + 1) // 2, d)
    return np.concatenate([z, -z], -2)[..., :population, :]


def orthogonal(rng: np.random.Generator, batch: tuple[int, ...], population: int, d: int) -> Array:
    """Return samples whose directions are orthogonal, as far as ``d`` of them can be.

    Each sample alone is standard normal: its direction is uniform, and it keeps the length that it
    was drawn with.
    """
    z = rng.standard_normal((*batch, population, d))
    lengths = np.sqrt((z * z).sum(-1, keepdims=True))
    for start in range(0, population, d):
        block = slice(start, start + d)
        z[..., block, :] = orthonormal_rows(z[..., block, :]) * lengths[..., block, :]
    return z


def orthonormal_rows(z: Array) -> Array:
    """Return what Gram and Schmidt make of ``k <= d`` rows, shape ``(*batch, k, d)``."""
    rows, d = z.shape[-2:]
    if 2 * rows <= d:
        # Few random rows are far from dependent: the Cholesky factor of their products is exact
        # enough, and faster.
        return np.asarray(np.linalg.solve(np.linalg.cholesky(z @ z.swapaxes(-2, -1)), z))
    q, r = np.linalg.qr(z.swapaxes(-2, -1))
    # Directions are uniform only with a positive diagonal of R, whose signs QR leaves open.
    signs = np.copysign(1.0, np.einsum("...ii->...i", r))
    return q.swapaxes(-2, -1) * signs[..., None]


def sanitize(values: Array) -> Array:
    """Return the values with everything that is no finite number, a failure, ranked
    last: ``+inf``.
    """
    return np.where(np.isfinite(values), values, np.inf)


def assign(values: Array, *tables: Array) -> tuple[Array, ...]:
    """Give each sample its weight from each of several tables.

    Samples with equal values share the mean of their weights: on a plateau, where all are equal,
    nothing is selected.
    """
    order = values.argsort(-1)
    ordered = np.take_along_axis(values, order, -1)
    ranks = order.argsort(-1)
    leads = np.ones(values.shape, dtype=bool)  # the first sample of each set of equal ones
    leads[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    if leads.all():
        return tuple(table[ranks] for table in tables)
    ties = leads.ravel().cumsum() - 1  # which set each sample belongs to, over the whole batch
    sizes = np.bincount(ties)

    def share(table: Array) -> Array:
        sums = np.bincount(ties, np.broadcast_to(table, values.shape).ravel())
        shared = (sums / sizes)[ties].reshape(values.shape)
        return np.take_along_axis(shared, ranks, -1)

    return tuple(share(table) for table in tables)


COVARIANCE_SPEED = 2.0  # Learning rates of the covariance, as multiples of CMA-ES's
DAMPING = 0.5  # Damping of the step size, as a multiple of CMA-ES's
REPULSION = (
    0.3  # How much of the weights of bad samples pushes the mean away from them; CMA-ES has 0
)
# The basis turns every d / 20 generations: it costs d^3, and little changes in one generation
TURN_INTERVAL = 20


@dataclass(frozen=True)
class Rates:
    """Constants of one generation, which depend on the dimension and the number of
    samples alone.
    """

    # w_k of the covariance, by rank, best first; the better half positive with sum 1, the rest
    # negative
    weights: Array
    mean_weights: Array  # those of the mean, with smaller negative ones
    mean_selected: (
        float  # with how many independent samples the mean would move as much by chance, mu_eff
    )
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
    good, bad = raw[raw > 0], -raw[raw < 0]
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
    squares, square = float((mean_weights**2).sum()), float(mean_weights.sum()) ** 2
    chance = squares - (square - squares) / (population - 1)
    weights.flags.writeable = mean_weights.flags.writeable = False

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


TOLERANCE = 0.2  # Rank changes below this quantile of random ones are put up with
# How the number of evaluations changes where there is too much noise, and where there is not
GROWTH, DECAY = (1.5, 0.9)


@dataclass
class Reevaluation:
    """How often each sample is evaluated."""

    repeats: float = 1.0  # evaluations of each sample, rounded down in use
    most: int = 64  # upper limit of it; with 1, nothing is evaluated again to see how noisy it is

    @property
    def final(self) -> int:
        """How often to evaluate the answer."""
        return max(2, int(self.repeats))

    def plan(self, population: int, left: int) -> NDArray[np.int64]:
        """Return which sample each evaluation is of: all ``repeats`` times, then a few
        once more.
        """
        repeats, again = int(self.repeats), max(2, population // 5) if self.most > 1 else 0
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
        # Before the first look is beyond doubt, do not react to it strongly: one step in either
        # direction.
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
    """Return by how much rank changes exceed the tolerated ones, on average over the samples
    evaluated again.
    """
    count = len(again)
    together = np.concatenate([first, again])
    ranks = together.argsort(kind="stable").argsort() + 1
    old, new = ranks[:count], ranks[len(first) :]
    change = np.abs(new - old) - 1
    others = np.arange(1, len(together))
    limits: Array = sum(
        np.quantile(np.abs(others - (rank - (rank > other))[:, None]), TOLERANCE / 2, axis=1)
        for rank, other in ((new, old), (old, new))
    )
    return sum((2 * change - limits).tolist()) / max(count, 1)
