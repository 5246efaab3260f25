"""A Gaussian for noisy values: it takes only a part of each step, as small as the noise demands.

Each step of the mean, in whitened coordinates, is signal and noise. Running averages of steps, in
which noise cancels, and of their squared lengths, in which it does not, tell their ratio (learning
rate adaptation, Nomura et al., 2023). The part that is taken follows this ratio: with much noise,
many generations act as one with many samples. One rate serves mean, covariance and step size. The
smaller it is, the longer steps should be: sigma grows as the rate falls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from ..core.numpy_twin import Array
from .gaussian import SpectralGaussian, within_range

MEMORY = 0.1  # Rate of the averages, beta
WANTED = 1.4  # Signal-to-noise ratio at which the rate stays, divided by the rate, alpha
SPEED = 0.1  # How fast the rate changes, relative to itself, gamma
LEAST_RATE = 1e-3


@dataclass(frozen=True)
class CautiousGaussian(SpectralGaussian):
    """A Gaussian that learns from noisy values; all methods return a new one."""

    # Average step, whitened, in the coordinates of the space
    trend: Array = field(default_factory=lambda: np.zeros(0))
    energy: float = 0.0  # average of squared lengths of steps
    rate: float = 1.0  # part of each step that is taken

    @classmethod
    def start(cls, mean: Array, sigma: float, *, separable: bool = False) -> CautiousGaussian:
        """Return the isotropic Gaussian around ``mean``, which takes whole steps at first."""
        plain = SpectralGaussian.start(mean, sigma, separable=separable)
        return cls(**{**vars(plain), "trend": np.zeros_like(mean)})

    def update(self, z: Array, values: Array, stretch: Array | None = None) -> CautiousGaussian:
        """Learn from samples and their values, and how much to learn next time."""
        learned = super().update(z, values, stretch)
        assert isinstance(learned, CautiousGaussian)
        step = self._turn_back(self.whiten(learned.mean[None], stretch))[0] / self.rate
        trend = (1 - MEMORY) * self.trend + MEMORY * step
        energy = (1 - MEMORY) * self.energy + MEMORY * float(step @ step)
        rate = next_rate(self.rate, float(trend @ trend), energy)
        sigma = within_range(learned.sigma * (self.rate / rate))
        return replace(learned, trend=trend, energy=energy, rate=rate, sigma=sigma)


def next_rate(rate: float, squared: float, energy: float) -> float:
    """Return the rate after ``rate``: ``squared`` is the squared length of the trend."""
    noise = energy - squared
    # Of a trend without signal, the averages leave this part of the energy.
    signal = squared - MEMORY / (2 - MEMORY) * energy
    ratio = signal / noise if noise > 0 else 0.0
    change = min(SPEED * rate, MEMORY) * min(max(ratio / (WANTED * rate) - 1, -1.0), 1.0)
    return min(1.0, max(LEAST_RATE, rate * math.exp(change)))
