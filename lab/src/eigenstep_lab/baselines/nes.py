"""Natural evolution strategies that hold another factor of the Gaussian than its eigenbasis.

All search with a Gaussian and follow its natural gradient in whitened coordinates ``z``: samples
are ``w = m + A z`` with covariance ``A A^T``, and with utilities ``u_k`` of the samples, best ones
largest, the step is given by::

    g = sum_k u_k z_k          M = sum_k u_k (z_k z_k^T - I)          m <- m + A g

What differs is the factor and how it moves; all agree to first order in ``lr`` (covariance ``+ lr A
M A^T``):

- ``PlainNES``, Wierstra et al. (2008): the covariance itself, ``+ lr A M A^T``; half as much, and
  so on, where it would not stay positive definite.
- ``ExponentialNES``, xNES of Glasmachers et al. (2010): any root, ``A <- A Expm(lr/2 M)``.
- ``CholeskyNES``, Lin et al. (2021): ``S = C C^T`` is the *inverse* covariance with a
  lower-triangular ``C``, so ``A = C^-T``; ``C <- C h(-lr T)`` with ``T`` the lower triangle of
  ``M``, its diagonal halved (so ``T + T^T = M``), and ``h(X) = I + X + X^2/2``, which keeps the
  diagonal positive for every ``X``.

Utilities and learning rates come from a rule of ``eigenstep_lab.baselines.rates``. With a learning
rate of its own for the size, the multiple of the identity in ``M`` has that one, and the rest of
``M`` has ``lr``.

Importance mixing (``Population``) spares evaluations: samples of the generation before are kept
with such a probability that the whole is still distributed as the Gaussian says.

All tensors may carry a batch of independent searches: means ``(*batch, d)``, samples ``(K, *batch,
d)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Generator, Tensor
from torch.linalg import diagonal

Rate = Tensor | float
Strategy = TypeVar("Strategy", bound="NES")


class NES(Protocol):
    """A search distribution that can be sampled and learns from the utilities of its samples."""

    @property
    def mean(self) -> Tensor:
        """Center of the search, shape ``(*batch, d)``."""

    def sample(self, z: Tensor) -> Tensor:
        """Turn standard normal ``z`` of shape ``(K, *batch, d)`` into samples."""

    def whiten(self, x: Tensor) -> Tensor:
        """Return the ``z`` of samples, the inverse of ``sample``."""

    def log_volume(self) -> Tensor:
        """Return ``log det A``, shape ``(*batch,)``."""

    def update(
        self: Strategy, z: Tensor, utilities: Tensor, *, lr: Rate, lr_size: Rate | None = None
    ) -> Strategy:
        """Return the distribution after one step.

        Args:
            z: what the samples were made of, shape ``(K, *batch, d)``.
            utilities: ``u_k``, shape ``(K, *batch)``.
            lr: learning rate of the covariance, a number or shape ``(*batch,)``.
            lr_size: learning rate of its size, if it has one of its own.
        """


@dataclass(frozen=True)
class PlainNES:
    """Plain NES: the covariance.

    Attributes:
        mean: ``m``, shape ``(*batch, d)``.
        covariance: shape ``(*batch, d, d)``.
    """

    mean: Tensor
    covariance: Tensor

    def sample(self, z: Tensor) -> Tensor:
        """Return ``m + A z`` with the Cholesky factor ``A``."""
        return self.mean + _apply(self._root(), z)

    def whiten(self, x: Tensor) -> Tensor:
        """Return ``A^-1 (x - m)``."""
        return torch.linalg.solve_triangular(self._root(), (x - self.mean)[..., None], upper=False)[
            ..., 0
        ]

    def log_volume(self) -> Tensor:
        """Return ``log det A``."""
        return diagonal(self._root()).log().sum(-1)

    def update(
        self, z: Tensor, utilities: Tensor, *, lr: Rate, lr_size: Rate | None = None
    ) -> PlainNES:
        """Return the distribution after one step; see ``NES``."""
        step, moment = natural_gradient(z, utilities, lr, lr_size)
        root = self._root()
        tangent = root @ moment @ root.mT
        for _ in range(60):
            indefinite = torch.linalg.cholesky_ex(self.covariance + tangent).info != 0
            if not indefinite.any():
                break
            tangent = torch.where(indefinite[..., None, None], tangent / 2, tangent)
        return PlainNES(self.mean + _apply(root, step), self.covariance + tangent)

    def _root(self) -> Tensor:
        return torch.linalg.cholesky(self.covariance)


@dataclass(frozen=True)
class ExponentialNES:
    """xNES: covariance ``A A^T``.

    Attributes:
        mean: ``m``, shape ``(*batch, d)``.
        root: ``A``, shape ``(*batch, d, d)``.
    """

    mean: Tensor
    root: Tensor

    def sample(self, z: Tensor) -> Tensor:
        """Return ``m + A z``."""
        return self.mean + _apply(self.root, z)

    def whiten(self, x: Tensor) -> Tensor:
        """Return ``A^-1 (x - m)``."""
        return torch.linalg.solve(self.root, (x - self.mean)[..., None])[..., 0]

    def log_volume(self) -> Tensor:
        """Return ``log |det A|``."""
        return torch.linalg.slogdet(self.root).logabsdet

    def update(
        self, z: Tensor, utilities: Tensor, *, lr: Rate, lr_size: Rate | None = None
    ) -> ExponentialNES:
        """Return the distribution after one step; see ``NES``."""
        step, moment = natural_gradient(z, utilities, lr, lr_size)
        root = self.root @ torch.linalg.matrix_exp(moment / 2)
        return ExponentialNES(self.mean + _apply(self.root, step), root)


@dataclass(frozen=True)
class CholeskyNES:
    """Cholesky NES: inverse covariance ``C C^T``.

    Attributes:
        mean: ``m``, shape ``(*batch, d)``.
        factor: lower-triangular ``C``, shape ``(*batch, d, d)``.
    """

    mean: Tensor
    factor: Tensor

    def sample(self, z: Tensor) -> Tensor:
        """Return ``m + C^-T z``."""
        return self.mean + self._root_times(z)

    def whiten(self, x: Tensor) -> Tensor:
        """Return ``C^T (x - m)``."""
        return _apply(self.factor.mT, x - self.mean)

    def log_volume(self) -> Tensor:
        """Return ``-log det C``."""
        return -diagonal(self.factor).log().sum(-1)

    def update(
        self, z: Tensor, utilities: Tensor, *, lr: Rate, lr_size: Rate | None = None
    ) -> CholeskyNES:
        """Return the distribution after one step; see ``NES``."""
        step, moment = natural_gradient(z, utilities, lr, lr_size)
        triangle = -moment.tril(-1) - torch.diag_embed(diagonal(moment)) / 2
        identity = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
        factor = self.factor @ (identity + triangle + triangle @ triangle / 2)
        return CholeskyNES(self.mean + self._root_times(step), factor)

    def _root_times(self, z: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.mT, z[..., None], upper=True)[..., 0]


@dataclass(frozen=True)
class Population:
    """The samples of one generation.

    Attributes:
        strategy: the Gaussian that they are distributed as.
        points: the samples, shape ``(K, *batch, d)``.
        new: which of them have to be evaluated, shape ``(K, *batch)``.
    """

    strategy: NES
    points: Tensor
    new: Tensor

    @classmethod
    def first(cls, strategy: NES, normal: Callable[[], Tensor]) -> Population:
        """Draw all samples anew; ``normal`` gives standard normal ones."""
        points = strategy.sample(normal())
        return cls(
            strategy, points, torch.ones(points.shape[:-1], dtype=torch.bool, device=points.device)
        )

    def mixed(
        self, strategy: NES, refresh: float, normal: Callable[[], Tensor], generator: Generator
    ) -> Population:
        """Return samples of the next Gaussian, as many as possible from this generation.

        Those of before are kept with probability ``min(1, (1 - refresh) q/p)``, new ones taken with
        probability ``max(refresh, 1 - p/q)``, where ``p`` is the old and ``q`` the new density (Sun
        et al., 2009).

        Args:
            strategy: the next Gaussian.
            refresh: least share of new samples; with 1 all are new.
            normal: gives standard normal candidates.
            generator: decides what is kept.
        """
        if refresh >= 1:
            return self.first(strategy, normal)

        def chance() -> Tensor:
            return torch.rand(self.new.shape, generator=generator, dtype=torch.float64).to(
                self.points.device
            )

        def log_ratio(points: Tensor) -> Tensor:
            return log_density(strategy, points) - log_density(self.strategy, points)

        points = self.points.clone()
        missing = chance() >= (1 - refresh) * log_ratio(points).exp()
        new = missing.clone()
        while missing.any():
            candidates = strategy.sample(normal())
            taken = chance() < (1 - (-log_ratio(candidates)).exp()).clamp_min(refresh)
            # The i-th missing sample of each search becomes its i-th accepted candidate.
            slots, sources = (
                (~mask).to(torch.int8).argsort(dim=0, stable=True) for mask in (missing, taken)
            )
            filled = missing.gather(0, slots) & taken.gather(0, sources)
            picked = candidates.gather(0, sources[..., None].expand_as(candidates))
            kept = points.gather(0, slots[..., None].expand_as(points))
            points.scatter_(
                0, slots[..., None].expand_as(points), torch.where(filled[..., None], picked, kept)
            )
            missing = missing.scatter(0, slots, missing.gather(0, slots) & ~filled)
        return Population(strategy, points, new)


def log_density(strategy: NES, points: Tensor) -> Tensor:
    """Return the logarithm of the density of samples, shape ``(K, *batch)``, up to a constant."""
    return -strategy.whiten(points).square().sum(-1) / 2 - strategy.log_volume()


def natural_gradient(
    z: Tensor, utilities: Tensor, lr: Rate = 1.0, lr_size: Rate | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``g = sum_k u_k z_k`` and ``M = sum_k u_k (z_k z_k^T - I)`` times its rates."""
    weighted = utilities[..., None] * z
    moment = torch.einsum("k...i,k...j->...ij", weighted, z)
    moment = moment - torch.diag_embed(utilities.sum(0)[..., None].expand(*z.shape[1:]))
    size = torch.diag_embed(diagonal(moment).mean(-1, keepdim=True).expand(*z.shape[1:]))
    return weighted.sum(0), _times(lr, moment) + (
        0 if lr_size is None else _times(lr_size - lr, size)
    )


def _times(lr: Rate, matrix: Tensor) -> Tensor:
    return lr[..., None, None] * matrix if isinstance(lr, Tensor) else lr * matrix


def _apply(matrix: Tensor, z: Tensor) -> Tensor:
    return torch.einsum("...ij,...j->...i", matrix, z)
