"""The paper's natural evolution strategy: the inverse covariance in spectral form.

In whitened coordinates ``z`` (samples are ``m + B d^(-1/2) z``) and with utilities ``u_k``, best
samples largest, let ``M = sum_k u_k (z_k z_k^T - I)``. The paper's step for the curvature
``-d^(1/2) M d^(1/2)`` with gamma = 0 is::

    log d <- log d - lr diag M
    N_ij = lr/2 M_ij / (2 sinh((log d_i - log d_j) / 2)), 0 where d_i and d_j are nearly equal
    B <- B Cayley(N)
    m <- m + B d^(-1/2) sum_k u_k z_k

where ``N`` uses the old ``d``. ``minimize(..., method=PaperNES, population=usual_population(d))``
searches with it. Written with sinh, no quotient of eigenvalues can overflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eigenstep.core.numpy_twin import Array, cayley, diagonal, reorthonormalize, transpose
from eigenstep.search.gaussian import MAX_LOG_EIGS, REPAIR_INTERVAL, SIGMA_RANGE, assign
from eigenstep.search.sampling import default_population

GAP = 1e-6
"""Eigenvalues that differ by at most this fraction count as equal, as in the core."""


@dataclass(frozen=True)
class PaperNES:
    """A Gaussian with inverse covariance ``B Diag(d) B^T``.

    Attributes:
        mean: ``m``, shape ``(*batch, d)``.
        log_eigs: ``log d``, shape ``(*batch, d)``.
        basis: ``B``, shape ``(*batch, d, d)``.
        generation: how many updates there were.
    """

    mean: Array
    log_eigs: Array
    basis: Array
    generation: int = 0

    rate = 1.0  # Part of each step that is taken

    @classmethod
    def start(cls, mean: Array, sigma: float) -> PaperNES:
        """Return the isotropic Gaussian around ``mean``, shape ``(*batch, d)``."""
        d = mean.shape[-1]
        basis = np.broadcast_to(np.eye(d), (*mean.shape, d)).copy()
        return cls(mean, np.full_like(mean, -2 * math.log(sigma)), basis)

    @property
    def sigma(self) -> Array:
        """Geometric mean of the axes' lengths, shape ``(*batch,)``."""
        return np.asarray(np.exp(-self.log_eigs.mean(-1) / 2))

    def draw(self, rng: np.random.Generator, population: int) -> Array:
        """Return whitened samples ``z``, shape ``(*batch, population, d)``."""
        return rng.standard_normal((*self.mean.shape[:-1], population, self.mean.shape[-1]))

    def sample(self, z: Array, stretch: Array | None = None) -> Array:
        """Return ``m + B d^(-1/2) z``; ``stretch`` multiplies the coordinates' deviations."""
        deviations = (z * np.exp(-self.log_eigs / 2)[..., None, :]) @ transpose(self.basis)
        return self.mean[..., None, :] + (deviations if stretch is None else stretch * deviations)

    def whiten(self, x: Array, stretch: Array | None = None) -> Array:
        """Return the ``z`` of samples, the inverse of ``sample``."""
        deviations = x - self.mean[..., None, :]
        deviations = deviations if stretch is None else deviations / stretch
        return (deviations @ self.basis) * np.exp(self.log_eigs / 2)[..., None, :]

    def update(self, z: Array, values: Array, stretch: Array | None = None) -> PaperNES:
        """Take one natural-gradient step; arguments as for ``SpectralGaussian``."""
        population, d = z.shape[-2:]
        lr = default_lr(d)
        (utilities,) = assign(values, utility_table(population))
        weighted = utilities[..., None] * z
        moment = transpose(weighted) @ z
        diagonal(moment)[...] -= utilities.sum(-1)[..., None]

        deviation = weighted.sum(-2) * np.exp(-self.log_eigs / 2)
        move = (deviation[..., None, :] @ transpose(self.basis))[..., 0, :]
        mean = self.mean + (move if stretch is None else stretch * move)

        gap = self.log_eigs[..., :, None] - self.log_eigs[..., None, :]
        apart = -np.expm1(-np.abs(gap)) > GAP
        generator = lr / 2 * moment / np.where(apart, 2 * np.sinh(gap / 2), np.inf)
        basis = self.basis @ cayley(generator)
        if self.generation % REPAIR_INTERVAL == REPAIR_INTERVAL - 1:
            basis = reorthonormalize(basis)

        log_eigs = self.log_eigs - lr * diagonal(moment)
        # Only what no computer could hold is cut: the condition number, and the overall size.
        center = log_eigs.mean(-1, keepdims=True)
        size = np.clip(center, -2 * math.log(SIGMA_RANGE[1]), -2 * math.log(SIGMA_RANGE[0]))
        log_eigs = np.where(
            (np.abs(log_eigs - center) > MAX_LOG_EIGS) | (size != center),
            size + np.clip(log_eigs - center, -MAX_LOG_EIGS, MAX_LOG_EIGS),
            log_eigs,
        )
        return PaperNES(mean, log_eigs, basis, self.generation + 1)

    def deviations(self) -> Array:
        """Return the standard deviation of each coordinate, shape ``(*batch, d)``."""
        return np.sqrt(((self.basis * self.basis) @ np.exp(-self.log_eigs)[..., None])[..., 0])

    def axes(self) -> Array:
        """Return the lengths of the principal axes, ``d^(-1/2)``, shape ``(*batch, d)``."""
        return np.exp(-self.log_eigs / 2)

    def reflected(self, mean: Array, flipped: NDArray[np.bool_]) -> PaperNES:
        """Return the mirror image with a given mean; coordinates ``flipped`` are reversed."""
        return replace(self, mean=mean, basis=np.where(flipped, -1.0, 1.0)[..., None] * self.basis)


def utility_table(population: int) -> Array:
    """Return the utilities by rank: the raw ones scaled to the sum one, minus ``1/K``."""
    raw = raw_utilities(population)
    return np.asarray(raw / raw.sum() - 1 / population)


def raw_utilities(population: int) -> Array:
    """Return ``max(0, log(K/2 + 1) - log(rank))`` by rank."""
    return np.maximum(0.0, math.log(population / 2 + 1) - np.log(np.arange(1, population + 1)))


def usual_population(d: int) -> int:
    """Return twice the number of samples of xNES and CMA-ES."""
    return 2 * default_population(d)


def default_lr(d: int) -> float:
    """Return xNES's own learning rate of the covariance, ``(9 + 3 log d) / (5 d sqrt d)``."""
    return (9 + 3 * math.log(d)) / (5 * d * math.sqrt(d))
