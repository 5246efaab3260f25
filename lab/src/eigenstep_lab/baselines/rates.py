"""Rules by which evolution strategies weigh samples and choose learning rates.

- ``FixedRates``, xNES of Glasmachers et al. (2010) and Wierstra et al. (2014): utilities by rank
  alone, one learning rate ``(9 + 3 log d) / (5 d sqrt d)`` for size and shape of the Gaussian.
- ``DistanceRates``, DX-NES of Fukushima et al. (2011): an evolution path, the running mean of the
  mean's steps, tells whether the Gaussian is moving, standing or converging. While it moves, far
  samples weigh more, by ``exp(a ||z||)``; size and shape have learning rates of their own, which
  depend on the phase::

                                  size                        shape
      moving      path >= E||z||  1        (K + 2d) min(1, sqrt(K/d)) / (K + 2d^2 + 100)
      standing                    (1 + K/(K + 2d)) / 2        K / (K + 2d^2 + 100)
      converging  path < E||z||/10  1 + K/(K + 2d)            K / (K + 2d^2 + 100)

Both take samples ``z`` in whitened coordinates, shape ``(K, *batch, d)``, and their function values
``(K, *batch)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .paper_nes import default_lr, raw_utilities, utility_table


@dataclass(frozen=True)
class Step:
    """What an update of a strategy needs besides the samples.

    Attributes:
        utilities: of the samples, shape ``(K, *batch)``.
        lr: learning rate of the shape, a number or shape ``(*batch,)``.
        lr_size: learning rate of the size, likewise.
    """

    utilities: Tensor
    lr: Tensor | float
    lr_size: Tensor | float


class Rule(Protocol):
    """A rule, with what it remembers."""

    def next(self, z: Tensor, values: Tensor) -> tuple[Rule, Step]:
        """Return the rule for the next generation, and how to learn from this one."""


@dataclass(frozen=True)
class FixedRates:
    """The rule of xNES, which remembers nothing."""

    def next(self, z: Tensor, values: Tensor) -> tuple[FixedRates, Step]:
        """Return how to learn from a generation; see ``Rule``."""
        lr = default_lr(z.shape[-1])
        return self, Step(rank_utilities(values), lr, lr)


@dataclass(frozen=True)
class DistanceRates:
    """The rule of DX-NES.

    Attributes:
        path: evolution path, shape ``(*batch, d)``, zero at the start.
    """

    path: Tensor

    def next(self, z: Tensor, values: Tensor) -> tuple[DistanceRates, Step]:
        """Return how to learn from a generation; see ``Rule``."""
        population = len(z)
        d = z.shape[-1]
        raw = torch.from_numpy(raw_utilities(population)).to(z)[_ranks(values)]
        weights = raw_utilities(population) / raw_utilities(population).sum()
        mass = float(1 / (weights**2).sum())
        fading = (mass + 2) / (d + mass + 5) / math.sqrt(d)
        utilities = rank_utilities(values)
        step = (utilities[..., None] * z).sum(0)
        path = (1 - fading) * self.path + math.sqrt(fading * (2 - fading) * mass) * step

        expected = math.sqrt(d) * (1 - 1 / (4 * d) + 1 / (21 * d * d))
        length = torch.linalg.vector_norm(path, dim=-1) / expected
        moving = length >= 1
        converging = length < 0.1
        far = raw * (distance_factor(population, d) * torch.linalg.vector_norm(z, dim=-1)).exp()
        utilities = torch.where(moving, far / far.sum(0) - 1 / population, utilities)

        share = population / (population + 2 * d)
        lr_size = torch.where(moving, 1.0, torch.where(converging, 1 + share, (1 + share) / 2))
        few = population / (population + 2 * d * d + 100)
        many = few * (1 + 2 * d / population) * min(1.0, math.sqrt(population / d))
        return DistanceRates(path), Step(
            utilities, torch.where(moving, many, few).to(z), lr_size.to(z)
        )


def distance_factor(population: int, d: int) -> float:
    """Return how strongly DX-NES weighs distance, ``a``; less where samples are few."""
    return (0.9 + 0.15 * math.log(d)) * min(1.0, population / d)


def rank_utilities(values: Tensor) -> Tensor:
    """Return utilities that depend on the order of the values alone: the smallest gets the largest.

    Args:
        values: function values, shape ``(K, *batch)``; NaN ranks last.
    """
    return torch.from_numpy(utility_table(len(values))).to(values)[_ranks(values)]


def _ranks(values: Tensor) -> Tensor:
    return values.argsort(dim=0, stable=True).argsort(dim=0)
