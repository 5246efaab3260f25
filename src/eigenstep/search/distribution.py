"""What a search needs of the distribution that it samples from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..core.numpy_twin import Array
from .space import Mask, Rng


class Distribution(Protocol):
    """Where to look next: it samples points, and learns from the order of their values.

    A distribution never changes: ``update`` returns another one. Arrays are float64, samples are
    rows, and there are no bounds.
    """

    @property
    def mean(self) -> Array:
        """The center, shape ``(d,)``."""

    @property
    def sigma(self) -> Array:
        """The step size, a number or an array without axes."""

    @property
    def rate(self) -> float:
        """The part of each step that is taken: 1, but for distributions that learn slowly."""

    def draw(self, rng: Rng, population: int) -> Array:
        """Return what samples are made of, ``z``, shape ``(population, d)``, nearly standard
        normal.
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

    def reflected(self, mean: Array, flipped: Mask) -> Distribution:
        """Return the mirror image with another mean and some coordinates ``flipped``."""


# Begin(mean, sigma) returns the distribution that a run starts with
Begin = Callable[[Array, float], Distribution]
