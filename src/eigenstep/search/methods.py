"""Search distributions by name, and what one of your own must be able to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.arguments import choose
from ..core.numpy_twin import Array
from .rates import default_population
from .spectral import SpectralGaussian


class Distribution(Protocol):
    """Where to look next: something that samples points, and learns from the order of their values.

    It never changes: what learns is the copy that ``update`` returns. All arrays are float64. Its coordinates have
    neither bounds nor integers, which are none of its business, and samples are rows. A search can be saved with
    ``state_dict`` if the distribution is a dataclass of arrays and numbers.
    """

    @property
    def mean(self) -> Array:
        """The center, shape ``(d,)``."""

    @property
    def sigma(self) -> Array:
        """The step size, a number or an array without axes."""

    def draw(self, rng: np.random.Generator, population: int) -> Array:
        """Return what samples are made of, ``z``, shape ``(population, d)``: standard normal, or nearly so."""

    def sample(self, z: Array, stretch: Array | None = None) -> Array:
        """Return the samples made of ``z``; ``stretch`` multiplies the coordinates' deviations from the mean."""

    def whiten(self, x: Array, stretch: Array | None = None) -> Array:
        """Return the ``z`` of samples, the inverse of ``sample``."""

    def update(self, z: Array, values: Array, stretch: Array | None = None) -> Distribution:
        """Return what is learned from samples, at least two, and their values; failures have the value ``inf``."""

    def deviations(self) -> Array:
        """Return the standard deviations of the coordinates, shape ``(d,)``."""

    def axes(self) -> Array:
        """Return the lengths of the principal axes, shape ``(d,)``."""

    def reflected(self, mean: Array, flipped: NDArray[np.bool_]) -> Distribution:
        """Return the mirror image with a given mean, in which the coordinates ``flipped`` point the other way."""


Begin = Callable[[Array, float], Distribution]  # begin(mean, sigma) returns the distribution that a run starts with


def even(population: int) -> int:
    """Round up to an even number, so that samples come in pairs."""
    return population + population % 2


def usual_population(d: int) -> int:
    """Return CMA-ES's number of samples per generation, rounded up to an even number."""
    return even(default_population(d))


METHODS: Mapping[str, Begin] = {
    "spectral": SpectralGaussian.start,
    "separable": partial(SpectralGaussian.start, separable=True),
}


def find_method(method: Any) -> Begin:
    """Return a method by its name, or of the user's own: a function, or a class with a constructor ``start``."""
    chosen = choose(method, METHODS, "method")
    return getattr(chosen, "start", chosen)
