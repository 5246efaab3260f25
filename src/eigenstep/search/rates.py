"""Recombination weights and learning rates: how much each sample counts, and how fast the distribution learns."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..core.numpy_twin import Array

COVARIANCE_SPEED = 2.0  # Learning rates of the covariance, as multiples of CMA-ES's
DAMPING = 0.5  # Damping of the step size, as a multiple of CMA-ES's
REPULSION = 0.3  # How much of the weights of bad samples pushes the mean away from them; CMA-ES has 0

TURN_INTERVAL = 20
"""The basis turns every d divided by this generations: a turn costs d^3, and little changes in one generation."""


@dataclass(frozen=True)
class Rates:
    """Constants of one generation, which depend on the dimension and the number of samples alone."""

    weights: Array  # w_k of the covariance, by rank, best first; the better half positive with sum 1, the rest negative
    mean_weights: Array  # those of the mean, with smaller negative ones
    mean_selected: float  # with how many independent samples the mean would move as much by chance, mu_eff
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
    # How far the mean moves if the order is random. Samples are mirrored: each has its opposite among the others.
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
