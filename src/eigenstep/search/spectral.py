"""The search distribution in spectral form, ``N(m, sigma^2 B Diag(exp v) B^T)``, and how it learns
from ranked samples.

The update is CMA-ES's: paths of the mean, a rank-one and a rank-many update with negative weights,
and a step size that follows the length of a whitened path. But no covariance is decomposed: in the
eigenbasis that of old and new is::

    A = (1 - c_1 - c_mu sum_k w_k) Diag(exp v) + c_1 p p^T + c_mu sum_k w_k y_k y_k^T

The basis turns by ``B <- B Cayley(N)``, where ``N_ij`` is, for small angles, half the Jacobi angle
that diagonalizes ``A`` in the plane of axes ``i`` and ``j``, and the eigenvalues become the
Rayleigh quotients of ``A`` along the new axes. This is the step of ``eigenstep.core.step`` with
pairwise rotations, in parts of ``eigenstep.core.numpy_twin``.

Without a basis, memory and time are linear in the dimension. Leading dimensions of all arrays are
searches in parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.numpy_twin import (
    Array,
    bounded,
    cayley,
    diagonal,
    rayleigh_quotients,
    reorthonormalize,
    transpose,
)
from .sampling import Rates, assign, mirrored_orthogonal, rates

MAX_LOG_EIGS = 18.0  # Bound of the logarithms around their mean: a condition number of 4e15
MAX_CHANGE = 2.0  # Largest change of the logarithm of an eigenvalue in one turn
SIGMA_RANGE = (1e-150, 1e150)  # Step sizes beyond this would overflow somewhere
REPAIR_INTERVAL = (
    100  # Turns between two steps that remove what rounding has cost the basis of its orthogonality
)


@dataclass(frozen=True)
class SpectralGaussian:
    """A Gaussian that learns; all methods return a new one."""

    mean: Array  # m, shape (*batch, d)
    sigma: Array  # step size, shape (*batch,)
    log_eigs: Array  # v, shape (*batch, d), with mean zero after each turn
    basis: Array | None  # B, shape (*batch, d, d), or None for a diagonal covariance
    path: Array  # p, the path of the mean, in the coordinates of the eigenbasis and units of sigma
    step_path: Array  # the whitened path that controls sigma, in the coordinates of the eigenbasis
    average: Array | None = (
        None  # A while turns wait for several generations, shape (*batch, d, d); else None
    )
    generation: int = 0  # how many updates there were
    turns: int = 0  # how many times the basis has turned
    waiting: int = 0  # generations since it did
    rate: float = 1.0  # part of each step that is taken; less than all only in `.cautious`

    @classmethod
    def start(cls, mean: Array, sigma: float, *, separable: bool = False) -> SpectralGaussian:
        """Return the isotropic Gaussian around ``mean``, shape ``(*batch, d)``."""
        d = mean.shape[-1]
        basis = None if separable else np.broadcast_to(np.eye(d), (*mean.shape, d)).copy()
        zeros = np.zeros_like(mean)
        return cls(mean, np.full(mean.shape[:-1], float(sigma)), zeros, basis, zeros, zeros)

    def draw(self, rng: np.random.Generator, population: int) -> Array:
        """Return whitened samples ``z``, shape ``(*batch, population, d)``."""
        return mirrored_orthogonal(rng, self.mean.shape[:-1], population, self.mean.shape[-1])

    def sample(self, z: Array, stretch: Array | None = None) -> Array:
        """Return ``m + sigma B Diag(exp v/2) z``."""
        deviations = self.sigma[..., None, None] * self._turn_back(
            z * np.exp(self.log_eigs / 2)[..., None, :]
        )
        return self.mean[..., None, :] + (deviations if stretch is None else stretch * deviations)

    def whiten(self, x: Array, stretch: Array | None = None) -> Array:
        """Return the ``z`` of samples, the inverse of ``sample``."""
        deviations = (x - self.mean[..., None, :]) / self.sigma[..., None, None]
        deviations = deviations if stretch is None else deviations / stretch
        turned = deviations if self.basis is None else deviations @ self.basis
        return turned * np.exp(-self.log_eigs / 2)[..., None, :]

    def update(self, z: Array, values: Array, stretch: Array | None = None) -> SpectralGaussian:
        """Learn from samples and their values."""
        population, d = z.shape[-2:]
        c = rates(d, population, self.basis is None)
        if self.rate < 1:
            c = replace(c, rank_one=self.rate * c.rank_one, rank_many=self.rate * c.rank_many)
        weights, mean_weights = assign(values, c.weights, c.mean_weights)
        scale = np.exp(self.log_eigs / 2)
        moved, keep = self._moved(c, (mean_weights[..., None, :] @ z)[..., 0, :], scale, stretch)
        keep = keep - c.rank_many * weights.sum(-1)[..., None]

        # Bad samples count by their direction alone, as if all had the typical length.
        squares = z * z
        lengths = np.maximum(squares.sum(-1), 1e-300)
        weights = c.rank_many * np.where(weights < 0, weights * (d / lengths), weights)
        path, eigs = moved.path, scale * scale
        if self.basis is None:
            eigs = (
                eigs * (keep + (weights[..., None, :] @ squares)[..., 0, :])
                + c.rank_one * path * path
            )
            return moved._with_eigs(eigs)
        y = z * scale[..., None, :]
        average = transpose(y * weights[..., None]) @ y
        average += path[..., :, None] * (c.rank_one * path)[..., None, :]
        if self.average is None:
            diagonal(average)[...] += keep * eigs
        else:
            average += keep[..., None] * self.average
        if self.waiting + 1 < c.interval:
            return replace(moved, average=average, waiting=self.waiting + 1)
        return moved._turned(average)

    def _moved(
        self, c: Rates, step: Array, scale: Array, stretch: Array | None
    ) -> tuple[SpectralGaussian, Array]:
        """Return the Gaussian after its mean has made a whitened step, and how much of its
        covariance to keep.
        """
        d = step.shape[-1]
        move = (
            self.rate
            * self.sigma[..., None]
            * self._turn_back((step * scale)[..., None, :])[..., 0, :]
        )
        mean = self.mean + (move if stretch is None else stretch * move)

        # The step size grows while steps point in one direction, and falls while they cancel.
        gain = (c.step_path * (2 - c.step_path) * c.mean_selected) ** 0.5
        step_path = (1 - c.step_path) * self.step_path + gain * step
        squared = (step_path * step_path).sum(-1)
        factor = self.rate * c.step_path / c.step_damping * (np.sqrt(squared) / c.expected_norm - 1)
        sigma = within_range(self.sigma * np.exp(np.minimum(factor, 1.0)))

        # Where sigma is about to grow much, the path of the mean waits: it would only stretch the
        # covariance, too.
        settled = 1 - (1 - c.step_path) ** (2 * self.generation + 2)
        moving = (squared < (2 + 4 / (d + 1)) * d * settled)[..., None].astype(np.float64)
        gain = (c.path * (2 - c.path) * c.mean_selected) ** 0.5
        path = (1 - c.path) * self.path + (gain * moving) * (step * scale)
        keep = 1 - c.rank_one * (1 - (1 - moving) * c.path * (2 - c.path))
        moved = replace(
            self,
            mean=mean,
            sigma=sigma,
            path=path,
            step_path=step_path,
            generation=self.generation + 1,
        )
        return moved, keep

    def _turned(self, average: Array) -> SpectralGaussian:
        """Take the core's step: generator and map of the average, turn the basis, Rayleigh
        quotients.
        """
        assert self.basis is not None
        turn = cayley(bounded(average))
        basis = self.basis @ turn
        if self.turns % REPAIR_INTERVAL == REPAIR_INTERVAL - 1:
            basis = reorthonormalize(basis)
        # The paths are held in the coordinates of the basis, so they turn back.
        path, step_path = ((p[..., None, :] @ turn)[..., 0, :] for p in (self.path, self.step_path))
        turned = replace(
            self,
            basis=basis,
            path=path,
            step_path=step_path,
            average=None,
            turns=self.turns + 1,
            waiting=0,
        )
        return turned._with_eigs(rayleigh_quotients(average, turn))

    def _with_eigs(self, eigs: Array) -> SpectralGaussian:
        """Return the Gaussian with new eigenvalues, whose geometric mean moves into sigma."""
        log_eigs = np.log(np.maximum(eigs, 1e-300))
        log_eigs = np.minimum(
            np.maximum(log_eigs, self.log_eigs - MAX_CHANGE), self.log_eigs + MAX_CHANGE
        )
        center = log_eigs.sum(-1, keepdims=True) / log_eigs.shape[-1]
        log_eigs = np.minimum(np.maximum(log_eigs - center, -MAX_LOG_EIGS), MAX_LOG_EIGS)
        scale = np.exp(center / 2)
        return replace(
            self,
            sigma=within_range(self.sigma * scale[..., 0]),
            log_eigs=log_eigs,
            path=self.path / scale,
        )

    def deviations(self) -> Array:
        """Return the standard deviation of each coordinate, shape ``(*batch, d)``."""
        eigs = np.exp(self.log_eigs)
        if self.basis is not None:
            eigs = ((self.basis * self.basis) @ eigs[..., None])[..., 0]
        return self.sigma[..., None] * np.sqrt(eigs)

    def axes(self) -> Array:
        """Return the lengths of the principal axes, ``sigma exp(v/2)``, shape ``(*batch, d)``."""
        return self.sigma[..., None] * np.exp(self.log_eigs / 2)

    def reflected(self, mean: Array, flipped: NDArray[np.bool_]) -> SpectralGaussian:
        """Return the mirror image with a given mean, in which the coordinates ``flipped`` point the
        other way.
        """
        signs = np.where(flipped, -1.0, 1.0)
        if self.basis is None:
            return replace(
                self, mean=mean, path=signs * self.path, step_path=signs * self.step_path
            )
        return replace(self, mean=mean, basis=signs[..., None] * self.basis)

    def _turn_back(self, x: Array) -> Array:
        """Return rows ``x`` in the eigenbasis as rows in the coordinates of the space."""
        return x if self.basis is None else x @ transpose(self.basis)


def within_range(sigma: Array) -> Array:
    """Cut step sizes that could overflow."""
    return np.minimum(np.maximum(sigma, SIGMA_RANGE[0]), SIGMA_RANGE[1])


class Distribution(Protocol):
    """Where to look next: something that samples points, and learns from the order of their values.

    It never changes: what learns is the copy that ``update`` returns. Arrays are float64, samples
    rows, without bounds.
    """

    @property
    def mean(self) -> Array:
        """The center, shape ``(d,)``."""

    @property
    def sigma(self) -> Array:
        """The step size, a number or an array without axes."""

    def draw(self, rng: np.random.Generator, population: int) -> Array:
        """Return what samples are made of, ``z``, shape ``(population, d)``: standard normal, or
        nearly so.
        """

    def sample(self, z: Array, stretch: Array | None = None) -> Array:
        """Return the samples made of ``z``; ``stretch`` multiplies the coordinates' deviations from
        the mean.
        """

    def whiten(self, x: Array, stretch: Array | None = None) -> Array:
        """Return the ``z`` of samples, the inverse of ``sample``."""

    def update(self, z: Array, values: Array, stretch: Array | None = None) -> Distribution:
        """Return what is learned from samples, at least two, and their values; failures have the
        value ``inf``.
        """

    def deviations(self) -> Array:
        """Return the standard deviations of the coordinates, shape ``(d,)``."""

    def axes(self) -> Array:
        """Return the lengths of the principal axes, shape ``(d,)``."""

    def reflected(self, mean: Array, flipped: NDArray[np.bool_]) -> Distribution:
        """Return the mirror image with a given mean, in which the coordinates ``flipped`` point the
        other way.
        """


# Begin(mean, sigma) returns the distribution that a run starts with
Begin = Callable[[Array, float], Distribution]
