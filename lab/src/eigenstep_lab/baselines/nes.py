"""Natural evolution strategies that hold another factor of the Gaussian than its eigenbasis.

Both search with a Gaussian and follow its natural gradient in whitened coordinates ``z``: samples are ``w = m + A z``
with covariance ``A A^T``, and with utilities ``u_k`` of the samples, best ones largest, the step is given by::

    g = sum_k u_k z_k          M = sum_k u_k (z_k z_k^T - I)          m <- m + lr_mean A g

What differs is the factor and how it moves; all agree to first order in ``lr`` (covariance ``+ lr A M A^T``):

- :class:`ExponentialNES`, xNES of Glasmachers et al. (2010): any root, ``A <- A Expm(lr/2 M)``.
- :class:`CholeskyNES`, Lin et al. (2021): ``S = C C^T`` is the *inverse* covariance with a lower-triangular ``C``, so
  ``A = C^-T``; ``C <- C h(-lr T)`` with ``T`` the lower triangle of ``M``, its diagonal halved (so ``T + T^T = M``),
  and ``h(X) = I + X + X^2/2``, which keeps the diagonal positive for every ``X``.

Utilities, learning rates and populations are those of :mod:`eigenstep_lab.baselines.paper_nes`.

All tensors may carry a batch of independent searches: means ``(*batch, d)``, samples ``(K, *batch, d)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.linalg import diagonal

from .paper_nes import utility_table

Strategy = TypeVar("Strategy", bound="NES")


class NES(Protocol):
    """A search distribution that can be sampled and learns from the utilities of its samples."""

    @property
    def mean(self) -> Tensor:
        """Center of the search, shape ``(*batch, d)``."""

    def sample(self, z: Tensor) -> Tensor:
        """Turn standard normal ``z`` of shape ``(K, *batch, d)`` into samples."""

    def update(self: Strategy, z: Tensor, utilities: Tensor, *, lr: float, lr_mean: float = 1.0) -> Strategy:
        """Return the distribution after one step.

        Args:
            z: what the samples were made of, shape ``(K, *batch, d)``.
            utilities: ``u_k``, shape ``(K, *batch)``.
            lr: learning rate of the covariance.
            lr_mean: learning rate of the mean.
        """


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

    def update(self, z: Tensor, utilities: Tensor, *, lr: float, lr_mean: float = 1.0) -> ExponentialNES:
        """Return the distribution after one step; see :class:`NES`."""
        step, moment = natural_gradient(z, utilities)
        root = self.root @ torch.linalg.matrix_exp(lr / 2 * moment)
        return ExponentialNES(self.mean + lr_mean * _apply(self.root, step), root)


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

    def update(self, z: Tensor, utilities: Tensor, *, lr: float, lr_mean: float = 1.0) -> CholeskyNES:
        """Return the distribution after one step; see :class:`NES`."""
        step, moment = natural_gradient(z, utilities)
        triangle = -lr * (moment.tril(-1) + torch.diag_embed(diagonal(moment)) / 2)
        identity = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
        factor = self.factor @ (identity + triangle + triangle @ triangle / 2)
        return CholeskyNES(self.mean + lr_mean * self._root_times(step), factor)

    def _root_times(self, z: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.mT, z[..., None], upper=True)[..., 0]


def natural_gradient(z: Tensor, utilities: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``g = sum_k u_k z_k`` and ``M = sum_k u_k (z_k z_k^T - I)``."""
    weighted = utilities[..., None] * z
    moment = torch.einsum("k...i,k...j->...ij", weighted, z)
    return weighted.sum(0), moment - torch.diag_embed(utilities.sum(0)[..., None].expand(*z.shape[1:]))


def rank_utilities(values: Tensor) -> Tensor:
    """Return utilities that depend on the order of the values alone: the smallest gets the largest.

    Args:
        values: function values, shape ``(K, *batch)``; NaN ranks last.
    """
    table = torch.from_numpy(utility_table(len(values))).to(values)
    return table[values.argsort(dim=0, stable=True).argsort(dim=0)]


def _apply(matrix: Tensor, z: Tensor) -> Tensor:
    return torch.einsum("...ij,...j->...i", matrix, z)
