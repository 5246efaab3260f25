"""A Gaussian for thousands of coordinates, in spectral form: a scale for each coordinate, and a few
directions.

Its covariance is ``sigma^2 D^1/2 (I + V^T Diag(exp v - 1) V) D^1/2``, with a diagonal ``D`` and
``k`` orthonormal rows ``V``, as in VkD-CMA-ES (Akimoto and Hansen, 2016): memory and time are
linear in the dimension ``d``. It approximates CMA-ES's rank-one update. In coordinates divided by
``D^1/2`` the average of old and new covariance is::

    A = (1 - c) (I + V^T Diag(exp v - 1) V) + c p p^T

where ``p`` is the path of the mean. ``A`` differs from a multiple of the identity in ``k + 1``
directions. The shortest of them, which is most like the rest, is given up, and the rest has the
mean of what is left. ``D`` follows the squares of samples. Scales describe few coordinates better
than ``V`` does, so they slowly take over what ``V`` says of single coordinates.

In many dimensions a sample is good or bad mostly by where it lies along the slope. So bad samples
tell as much as good ones, and have the same weights with another sign (Arnold, 2006); mirrored
samples would tell nothing new. And the step size cannot wait for a path, which takes ``d``
generations: it follows the share of values that are better than those of the last generation (the
population success rule of LM-CMA, Loshchilov, 2014). Nothing but the order of values counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..core.numpy_twin import Array
from .gaussian import MAX_LOG_EIGS, assign, orthogonal, within_range
from .sampling import REPULSION, Rates, rates
from .space import Mask, Rng

RANK = 16  # Directions, k
CROWD = 3.0  # In populations of d / CROWD, bad samples count half as much as good ones
SPEED = 1.0  # Rate of the directions, c, for each 1 / d; that of the path is its root
SCALE_SPEED = 2.0  # Rate of the scales, relative to that of ``separable``
ABSORB = 0.3  # How fast scales take over what directions say of coordinates, relative to that rate
SUCCESS_MEMORY = 0.3  # Weight of the last generation in the average success
LARGEST = float(np.finfo(np.float64).max)


@dataclass(frozen=True)
class LowRankGaussian:
    """A Gaussian with few directions that learns; all methods return a new one."""

    mean: Array  # m, shape (d,)
    sigma: Array  # step size, a number
    log_scales: Array  # log D, shape (d,), with mean zero
    directions: Array  # V, shape (k, d)
    log_eigs: Array  # v, shape (k,)
    path: Array  # p, the path of the mean, in coordinates divided by D^1/2 and units of sigma
    success: float = 0.0  # average of how much better generations are than wanted
    last: Array | None = None  # values of the last generation

    rate = 1.0  # Part of each step that is taken

    @classmethod
    def start(cls, mean: Array, sigma: float) -> LowRankGaussian:
        """Return the isotropic Gaussian around ``mean``, shape ``(d,)``."""
        d = len(mean)
        k = min(RANK, d - 1)
        zeros = np.zeros_like(mean)
        return cls(
            mean,
            np.array(float(sigma)),
            log_scales=zeros,
            directions=np.zeros((k, d)),
            log_eigs=np.zeros(k),
            path=zeros,
        )

    def draw(self, rng: Rng, population: int) -> Array:
        """Return whitened samples ``z`` in orthogonal directions, shape ``(population, d)``."""
        return orthogonal(rng, (), population, len(self.mean))

    def sample(self, z: Array, stretch: Array | None = None) -> Array:
        """Return ``m + sigma D^1/2 (I + V^T Diag(exp v/2 - 1) V) z``."""
        return self.mean + self._unit(stretch) * self._lengthened(z)

    def whiten(self, x: Array, stretch: Array | None = None) -> Array:
        """Return the ``z`` of samples, the inverse of ``sample``."""
        return self._lengthened((x - self.mean) / self._unit(stretch), power=-1.0)

    def _unit(self, stretch: Array | None) -> Array:
        unit = self.sigma * np.exp(self.log_scales / 2)
        return unit if stretch is None else stretch * unit

    def _lengthened(self, z: Array, power: float = 1.0) -> Array:
        """Return rows made longer, or shorter, along the directions."""
        along = (z @ self.directions.T) * np.expm1(power * self.log_eigs / 2)
        return z + along @ self.directions

    def update(self, z: Array, values: Array, stretch: Array | None = None) -> LowRankGaussian:
        """Learn from samples and their values."""
        population, d = z.shape
        c = rates(d, population, separable=True)
        repulsion = d / (d + CROWD * population) / REPULSION
        table = np.where(c.mean_weights < 0, c.mean_weights * repulsion, c.mean_weights)
        # A plateau tells nothing.
        (weights,) = assign(values, table if values.min() < values.max() else 0 * table)
        y = self._lengthened(z)
        step = weights @ y
        rate = min(0.5, SPEED / d)
        memory = rate**0.5
        gain = (memory * (2 - memory) / float(table @ table)) ** 0.5
        path = (1 - memory) * self.path + gain * step
        moved = replace(self, mean=self.mean + self._unit(stretch) * step, path=path)
        squares = weights @ (y * y) / self._variances() - weights.sum()
        return moved._sized(values)._scaled(squares, c)._turned(rate)

    def _sized(self, values: Array) -> LowRankGaussian:
        """Adapt the step size to the share of all pairs of a value and a former one that are in the
        right order.
        """
        values = np.minimum(values, LARGEST)
        if self.last is None or len(self.last) != len(values):
            return replace(self, last=values)
        better = (values < self.last[:, None]).mean()
        worse = (values > self.last[:, None]).mean()
        # The share is of pairs without ties: on a plateau nothing is wanted.
        gain = float(better - worse - wanted_success(len(values)) * (better + worse))
        success = self.success + SUCCESS_MEMORY * (gain - self.success)
        sigma = within_range(self.sigma * np.exp(success))
        return replace(self, sigma=sigma, success=success, last=values)

    def _scaled(self, squares: Array, c: Rates) -> LowRankGaussian:
        """Learn scales from the squares of samples, good against bad, and of the path."""
        many = min(0.5, SCALE_SPEED * c.rank_many)
        one = min(0.5, SCALE_SPEED * c.rank_one)
        expected = self._variances()
        change = many * (squares + ABSORB * np.log(expected))
        change = change + one * (self.path**2 / expected - 1)
        log_scales = self.log_scales + np.log(np.maximum(1 + change, 0.1))
        center = log_scales.mean()
        log_scales = np.clip(log_scales - center, -MAX_LOG_EIGS, MAX_LOG_EIGS)
        # Directions and path stay where they were, in the new coordinates; `_turned` makes the
        # directions orthonormal again.
        ratio = np.exp((self.log_scales - log_scales) / 2)
        return replace(
            self,
            sigma=within_range(self.sigma * np.exp(center / 2)),
            log_scales=log_scales,
            path=ratio * self.path,
            directions=ratio * self.directions,
        )

    def _turned(self, rate: float) -> LowRankGaussian:
        """Average with the path's outer product, and keep the longest directions."""
        k, d = self.directions.shape
        rows = np.concatenate([self.directions, self.path[None]])
        weights = np.append((1 - rate) * np.expm1(self.log_eigs), rate)
        basis, triangle = np.linalg.qr(rows.T)
        lengths, turn = np.linalg.eigh((triangle * weights) @ triangle.T)
        eigs = 1 - rate + np.maximum(lengths, 0.0)
        # Eigenvalues are in rising order, and the first one is given up.
        rest = ((1 - rate) * (d - k - 1) + eigs[0]) / (d - k)
        log_eigs = np.clip(np.log(eigs[1:] / rest), 0.0, MAX_LOG_EIGS)
        return replace(self, directions=(basis @ turn[:, 1:]).T, log_eigs=log_eigs)

    def _variances(self) -> Array:
        """Return the variances in coordinates divided by ``D^1/2``."""
        return 1 + np.expm1(self.log_eigs) @ self.directions**2

    def deviations(self) -> Array:
        """Return the standard deviation of each coordinate."""
        return self._unit(None) * np.sqrt(self._variances())

    # The principal axes themselves would take time that is not linear in the dimension.
    axes = deviations

    def reflected(self, mean: Array, flipped: Mask) -> LowRankGaussian:
        """Return the mirror image with another mean and some coordinates ``flipped``."""
        signs = np.where(flipped, -1.0, 1.0)
        return replace(self, mean=mean, path=signs * self.path, directions=signs * self.directions)


def wanted_success(population: int) -> float:
    """Return the success at which the step size stays: the share of better values minus that of
    worse ones, 0.23 with 24 samples.
    """
    return 0.13 + 0.75 * population / (population + 150)
