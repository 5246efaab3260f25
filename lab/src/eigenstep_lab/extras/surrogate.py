"""A quadratic model of the function that proposes samples: ``method=Modeled``.

The model lives in the whitened coordinates of the Gaussian, in its eigenbasis: linear, with a
diagonal or with a full Hessian, as the number of points allows. Before it sees the values of a
generation, it predicts them. Only while the order of its predictions is right, by Kendall's rank
correlation, the model's own minimum takes the place of one sample. So a function of which it knows
nothing costs time, but no evaluations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eigenstep.core.numpy_twin import Array
from eigenstep.search.gaussian import SpectralGaussian

LEAST_AGREEMENT = 0.4  # Rank correlation from which on the model is used
FORGET = 0.5  # How much of the average correlation is that of the last generation
POINTS = 2.0  # That are kept, for each coefficient of the model
SPARE = 1.1  # Points needed, for each coefficient
MOST_COEFFICIENTS = 300  # Larger models would take too long to fit
SHARPNESS = 20.0  # Weight of the best point, relative to the worst
RIDGE = 1e-8  # By which directions without data are held, relative to the others


@dataclass(frozen=True)
class Modeled:
    """A Gaussian with a model of the function; all methods return a new one."""

    gaussian: SpectralGaussian
    archive: Array  # points evaluated last that have not failed, shape (n, d), latest last
    values: Array  # theirs, shape (n,)
    slope: Array  # of the model at the mean, shape (d,)
    hessian: Array  # of the model, shape (d, d)
    filled: int = 0  # how many points there are so far
    agreement: float = 0.0  # average rank correlation of predictions and values

    rate = 1.0  # Part of each step that is taken

    @classmethod
    def start(cls, mean: Array, sigma: float) -> Modeled:
        """Return the isotropic Gaussian around ``mean``, and a model that knows nothing."""
        d = len(mean)
        count = math.ceil(POINTS * _sizes(d)[-1])
        gaussian = SpectralGaussian.start(mean, sigma)
        return cls(gaussian, np.zeros((count, d)), np.zeros(count), np.zeros(d), np.zeros((d, d)))

    @property
    def mean(self) -> Array:
        """The center of the Gaussian."""
        return self.gaussian.mean

    @property
    def sigma(self) -> Array:
        """The step size of the Gaussian."""
        return self.gaussian.sigma

    @property
    def trusted(self) -> bool:
        """Whether predictions have been in the right order."""
        return self.agreement > LEAST_AGREEMENT

    def draw(self, rng: np.random.Generator, population: int) -> Array:
        """Return whitened samples; if the model is trusted, its minimum comes last."""
        z = self.gaussian.draw(rng, population)
        if self.trusted:
            z[-1] = self._minimum()
        return z

    def sample(self, z: Array, stretch: Array | None = None) -> Array:
        """Return the samples made of ``z``."""
        return self.gaussian.sample(z, stretch)

    def whiten(self, x: Array, stretch: Array | None = None) -> Array:
        """Return the ``z`` of samples."""
        return self.gaussian.whiten(x, stretch)

    def update(self, z: Array, values: Array, stretch: Array | None = None) -> Modeled:
        """Learn from samples and their values."""
        share = FORGET * rank_correlation(self.predict(z), values) + (1 - FORGET) * self.agreement
        fine = np.isfinite(values)
        most = len(self.values)
        archive = np.concatenate([self.archive, self.sample(z[fine], stretch)])[-most:]
        kept = np.concatenate([self.values, values[fine]])[-most:]
        filled = min(self.filled + int(fine.sum()), most)
        learned = replace(self, archive=archive, values=kept, filled=filled, agreement=share)
        return replace(learned, gaussian=self.gaussian.update(z, values, stretch))._fitted(stretch)

    def predict(self, z: Array) -> Array:
        """Return what the model says of samples, relative to the mean."""
        return z @ self.slope + 0.5 * ((z @ self.hessian) * z).sum(-1)

    def _fitted(self, stretch: Array | None) -> Modeled:
        """Fit the largest model for which there are enough points, by weighted least squares."""
        first = len(self.values) - self.filled
        z = self.gaussian.whiten(self.archive[first:], stretch)
        values = self.values[first:]
        count, d = z.shape
        sizes = [k for k in _sizes(d) if SPARE * k <= count]
        if not sizes:
            return self
        ranks = values.argsort().argsort()
        weights = np.sqrt(1 + (SHARPNESS - 1) * (1 - ranks / max(count - 1, 1)))
        rows, columns = np.triu_indices(d, 1)
        parts = [np.ones((count, 1)), z, z * z / 2, z[:, rows] * z[:, columns]]
        kept = 2 + _sizes(d).index(sizes[-1])
        with np.errstate(
            over="ignore", invalid="ignore", divide="ignore"
        ):  # equal values, or huge ones: see below
            features = np.concatenate(parts[:kept], 1) * weights[:, None]
            wanted = (values - values.min()) / np.ptp(values) * weights
        found = least_squares(features, wanted)
        if found is None:
            return replace(self, agreement=0.0)
        hessian = np.diag(found[d + 1 : 2 * d + 1]) if kept > 2 else np.zeros((d, d))
        if kept > 3:
            hessian[rows, columns] = hessian[columns, rows] = found[2 * d + 1 :]
        return replace(self, slope=found[1 : d + 1], hessian=hessian)

    def _minimum(self) -> Array:
        """Return where the model is least, not much farther away than samples are."""
        d = len(self.slope)
        longest = math.sqrt(d)
        shift = 0.0
        unit = float(np.abs(np.diag(self.hessian)).mean()) or 1.0
        for _ in range(12):
            matrix = self.hessian + shift * np.eye(d)
            shift = 4 * shift or 0.1 * unit
            try:
                np.linalg.cholesky(matrix)
            except np.linalg.LinAlgError:
                continue
            step = -np.linalg.solve(matrix, self.slope)
            if step @ step <= longest * longest:
                return np.asarray(step)
        return -self.slope * (longest / max(float(np.sqrt(self.slope @ self.slope)), 1e-300))

    def deviations(self) -> Array:
        """Return the standard deviation of each coordinate."""
        return self.gaussian.deviations()

    def axes(self) -> Array:
        """Return the lengths of the principal axes."""
        return self.gaussian.axes()

    def reflected(self, mean: Array, flipped: NDArray[np.bool_]) -> Modeled:
        """Return the mirror image; points that were on the other side are still where they were."""
        return replace(self, gaussian=self.gaussian.reflected(mean, flipped))


def _sizes(d: int) -> list[int]:
    """Return how many coefficients a linear, a diagonal and a full model have."""
    return [
        k for k in (d + 1, 2 * d + 1, (d + 1) * (d + 2) // 2) if k <= max(MOST_COEFFICIENTS, d + 1)
    ]


def least_squares(features: Array, wanted: Array) -> Array | None:
    """Return coefficients of scaled columns; ``None`` where rounding leaves none."""
    sizes = np.sqrt((features * features).sum(0))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scaled = features / sizes
    if not (np.isfinite(scaled).all() and np.isfinite(wanted).all()):
        return None
    gram = scaled.T @ scaled + RIDGE * np.eye(len(sizes))
    found = np.linalg.solve(gram, scaled.T @ wanted) / sizes
    return np.asarray(found) if np.isfinite(found).all() else None


def rank_correlation(one: Array, other: Array) -> float:
    """Return Kendall's tau: the share of pairs in the same order, minus the others'."""
    rows, columns = np.triu_indices(len(one), 1)
    with np.errstate(invalid="ignore"):  # failures are infinite, and in no order
        agree = np.sign(one[rows] - one[columns]) * np.sign(other[rows] - other[columns])
    return float(np.nan_to_num(agree).mean())
