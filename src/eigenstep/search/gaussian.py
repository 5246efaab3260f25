"""The search distribution in spectral form, ``N(m, sigma^2 B Diag(exp v) B^T)``: how it is sampled,
and how it learns from ranked samples.

The update is that of CMA-ES: paths of the mean, a rank-one and a rank-many update with negative
weights, and a step size that follows the length of a whitened path. But no covariance is
decomposed. In the eigenbasis, the average of the old covariance and the new terms is::

    A = (1 - c_1 - c_mu sum_k w_k) Diag(exp v) + c_1 p p^T + c_mu sum_k w_k y_k y_k^T

The basis turns by ``B <- B Cayley(N)``, where ``N_ij`` is, for small angles, half the Jacobi angle
that diagonalizes ``A`` in the plane of axes ``i`` and ``j``. The eigenvalues become the Rayleigh
quotients of ``A`` along the new axes. This is the step of ``eigenstep.core.step`` with pairwise
rotations, in parts of ``eigenstep.core.numpy_twin``.

Without a basis, memory and time are linear in the dimension. Leading dimensions of all arrays are
searches in parallel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..core.numpy_twin import (
    Array,
    bounded,
    cayley,
    diagonal,
    rayleigh_quotients,
    reorthonormalize,
    transpose,
)
from .sampling import Rates, rates
from .space import Mask, Rng

MAX_LOG_EIGS = 18.0  # Bound of the logarithms around their mean: a condition number of 4e15
MAX_CHANGE = 2.0  # Largest change of the logarithm of an eigenvalue in one turn
SIGMA_RANGE = (1e-150, 1e150)  # Step sizes beyond this would overflow somewhere
REPAIR_INTERVAL = 100  # Turns between two repairs of what rounding does to the basis


@dataclass(frozen=True)
class SpectralGaussian:
    """A Gaussian that learns; all methods return a new one."""

    mean: Array  # m, shape (*batch, d)
    sigma: Array  # step size, shape (*batch,)
    log_eigs: Array  # v, shape (*batch, d), with mean zero after each turn
    basis: Array | None  # B, shape (*batch, d, d), or None for a diagonal covariance
    path: Array  # p, the path of the mean, in the coordinates of the eigenbasis and units of sigma
    step_path: Array  # the whitened path that controls sigma, in the coordinates of the eigenbasis
    average: Array | None = None  # A between turns, where they are several generations apart
    generation: int = 0  # number of updates
    turns: int = 0  # number of turns of the basis
    waiting: int = 0  # generations since the last turn

    rate = 1.0  # Part of each step that is taken

    @classmethod
    def start(cls, mean: Array, sigma: float, *, separable: bool = False) -> SpectralGaussian:
        """Return the isotropic Gaussian around ``mean``, shape ``(*batch, d)``."""
        d = mean.shape[-1]
        basis = None
        if not separable:
            basis = np.broadcast_to(np.eye(d), (*mean.shape, d)).copy()
        zeros = np.zeros_like(mean)
        sigmas = np.full(mean.shape[:-1], float(sigma))
        return cls(mean, sigmas, zeros, basis, path=zeros, step_path=zeros)

    def draw(self, rng: Rng, population: int) -> Array:
        """Return whitened samples ``z``, shape ``(*batch, population, d)``."""
        *batch, d = self.mean.shape
        return mirrored_orthogonal(rng, (*batch,), population, d)

    def sample(self, z: Array, stretch: Array | None = None) -> Array:
        """Return ``m + sigma B Diag(exp v/2) z``."""
        y = self._turn_back(z * np.exp(self.log_eigs / 2)[..., None, :])
        deviations = self.sigma[..., None, None] * y
        return self.mean[..., None, :] + (deviations if stretch is None else stretch * deviations)

    def whiten(self, x: Array, stretch: Array | None = None) -> Array:
        """Return the ``z`` of samples, the inverse of ``sample``."""
        y = (x - self.mean[..., None, :]) / self.sigma[..., None, None]
        if stretch is not None:
            y = y / stretch
        if self.basis is not None:
            y = y @ self.basis
        return y * np.exp(-self.log_eigs / 2)[..., None, :]

    def update(self, z: Array, values: Array, stretch: Array | None = None) -> SpectralGaussian:
        """Learn from samples and their values."""
        population, d = z.shape[-2:]
        c = rates(d, population, self.basis is None)
        rank_one = self.rate * c.rank_one
        rank_many = self.rate * c.rank_many
        weights, mean_weights = assign(values, c.weights, c.mean_weights)
        scale = np.exp(self.log_eigs / 2)
        moved, keep = self._moved(c, times(mean_weights, z), scale, stretch)
        keep = keep - rank_many * weights.sum(-1)[..., None]

        # Bad samples count by their direction alone, as if all had the typical length.
        squares = z * z
        lengths = np.maximum(squares.sum(-1), 1e-300)
        weights = rank_many * np.where(weights < 0, weights * (d / lengths), weights)
        path = moved.path
        eigs = scale * scale
        if self.basis is None:
            many = times(weights, squares)
            return moved._with_eigs(eigs * (keep + many) + rank_one * path * path)
        y = z * scale[..., None, :]
        average = transpose(y * weights[..., None]) @ y
        average += path[..., :, None] * (rank_one * path)[..., None, :]
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
        y = self._turn_back((step * scale)[..., None, :])[..., 0, :]
        move = self.rate * self.sigma[..., None] * y
        mean = self.mean + (move if stretch is None else stretch * move)

        # The step size grows while steps point in one direction, and falls while they cancel.
        gain = (c.step_path * (2 - c.step_path) * c.mean_selected) ** 0.5
        step_path = (1 - c.step_path) * self.step_path + gain * step
        squared = (step_path * step_path).sum(-1)
        excess = np.sqrt(squared) / c.expected_norm - 1
        growth = self.rate * c.step_path / c.step_damping * excess
        sigma = within_range(self.sigma * np.exp(np.minimum(growth, 1.0)))

        # Where sigma is about to grow much, the path of the mean waits: it would only stretch the
        # covariance, too.
        settled = 1 - (1 - c.step_path) ** (2 * self.generation + 2)
        longest = (2 + 4 / (d + 1)) * d * settled
        moving = (squared < longest)[..., None].astype(np.float64)
        gain = (c.path * (2 - c.path) * c.mean_selected) ** 0.5
        path = (1 - c.path) * self.path + (gain * moving) * (step * scale)
        missing = (1 - moving) * c.path * (2 - c.path)
        keep = 1 - self.rate * c.rank_one * (1 - missing)
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
        """Take the core's step: turn the basis towards the eigenvectors of the average, and read
        off the eigenvalues.
        """
        assert self.basis is not None
        turn = cayley(bounded(average))
        basis = self.basis @ turn
        if self.turns % REPAIR_INTERVAL == REPAIR_INTERVAL - 1:
            basis = reorthonormalize(basis)
        turned = replace(
            self,
            basis=basis,
            path=times(self.path, turn),  # in the coordinates of the new basis
            step_path=times(self.step_path, turn),
            average=None,
            turns=self.turns + 1,
            waiting=0,
        )
        return turned._with_eigs(rayleigh_quotients(average, turn))

    def _with_eigs(self, eigs: Array) -> SpectralGaussian:
        """Return the Gaussian with new eigenvalues, whose geometric mean moves into sigma."""
        log_eigs = np.log(np.maximum(eigs, 1e-300))
        log_eigs = clamp(log_eigs, self.log_eigs - MAX_CHANGE, self.log_eigs + MAX_CHANGE)
        center = log_eigs.sum(-1, keepdims=True) / log_eigs.shape[-1]
        scale = np.exp(center / 2)
        return replace(
            self,
            sigma=within_range(self.sigma * scale[..., 0]),
            log_eigs=clamp(log_eigs - center, -MAX_LOG_EIGS, MAX_LOG_EIGS),
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

    def reflected(self, mean: Array, flipped: Mask) -> SpectralGaussian:
        """Return the mirror image with another mean and some coordinates ``flipped``."""
        signs = np.where(flipped, -1.0, 1.0)
        if self.basis is not None:
            return replace(self, mean=mean, basis=signs[..., None] * self.basis)
        return replace(self, mean=mean, path=signs * self.path, step_path=signs * self.step_path)

    def _turn_back(self, x: Array) -> Array:
        """Return rows ``x`` in the eigenbasis as rows in the coordinates of the space."""
        return x if self.basis is None else x @ transpose(self.basis)


def times(vector: Array, matrix: Array) -> Array:
    """Return the product of row vectors and matrices."""
    return (vector[..., None, :] @ matrix)[..., 0, :]


def clamp(x: Array, low: Array | float, high: Array | float) -> Array:
    """Cut numbers at bounds, several times as fast as ``np.clip`` on small arrays."""
    return np.minimum(np.maximum(x, low), high)


def within_range(sigma: Array) -> Array:
    """Cut step sizes that could overflow."""
    return clamp(sigma, *SIGMA_RANGE)


def mirrored_orthogonal(rng: Rng, batch: tuple[int, ...], population: int, d: int) -> Array:
    """Return orthogonal samples ``z`` and ``-z``; in an odd population one is not mirrored."""
    z = orthogonal(rng, batch, (population + 1) // 2, d)
    return np.concatenate([z, -z], -2)[..., :population, :]


def orthogonal(rng: Rng, batch: tuple[int, ...], population: int, d: int) -> Array:
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
        # Few random rows are far from dependent: a Cholesky factor is exact enough, and faster.
        factor = np.linalg.cholesky(z @ z.swapaxes(-2, -1))
        return np.asarray(np.linalg.solve(factor, z))
    q, r = np.linalg.qr(z.swapaxes(-2, -1))
    # Directions are uniform only with a positive diagonal of R, whose signs QR leaves open.
    signs = np.copysign(1.0, np.einsum("...ii->...i", r))
    return q.swapaxes(-2, -1) * signs[..., None]


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
