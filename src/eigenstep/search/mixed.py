"""Categories without order beside numbers: a Gaussian for the numbers, and chances for the values
of each category.

Chances move towards the categories of good samples and away from those of bad ones, as the mean of
the Gaussian does, and never below a margin (as in CatCMA with margin, Hamano et al., 2024). With
this margin, about one sample in ten has a category that is not the most likely one: with more of
them, the Gaussian would learn too little of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..core.numpy_twin import Array
from .distribution import Begin, Distribution
from .gaussian import assign
from .sampling import rates
from .space import Integers, Mask, Rng

KEEP = 0.9  # Least chance that a sample has the most likely categories, once all are learned


@dataclass(frozen=True)
class Mixed:
    """A distribution of numbers and categories; all methods return a new one."""

    numbers: Distribution  # of the coordinates that are numbers
    chances: Array  # of each category's values, shape (categories, most values); 0 for no value
    columns: Integers  # which coordinates are categories

    rate = 1.0  # Part of each step that is taken

    @classmethod
    def start(cls, mean: Array, sigma: float, begin: Begin, categories: Mapping[int, int]) -> Mixed:
        """Return a distribution in which all values are equally likely, and numbers have the one of
        ``begin``.
        """
        counts = np.array(list(categories.values()))[:, None]
        chances = (np.arange(counts.max()) < counts) / counts
        columns = np.array(list(categories))
        return cls(begin(np.delete(mean, columns), sigma), chances, columns)

    @property
    def mean(self) -> Array:
        """The center: numbers of the Gaussian, and the most likely values."""
        return self._join(self.numbers.mean, self.chances.argmax(-1))

    @property
    def sigma(self) -> Array:
        """The step size of the numbers."""
        return self.numbers.sigma

    def draw(self, rng: Rng, population: int) -> Array:
        """Return what samples are made of: for categories numbers between 0 and 1, evenly spread
        over the samples.
        """
        z = self.numbers.draw(rng, population)
        places = np.tile(np.arange(population), (len(self.columns), 1))
        places = rng.permuted(places, axis=1)
        spread = (places + rng.uniform(size=places.shape)) / population
        return self._join(z, spread.T)

    def sample(self, z: Array, stretch: Array | None = None) -> Array:
        """Return the samples made of ``z``."""
        numbers = self.numbers.sample(self._numbers(z), self._cut(stretch))
        return self._join(numbers, self._values(z))

    def whiten(self, x: Array, stretch: Array | None = None) -> Array:
        """Return a ``z`` that gives these samples."""
        numbers = self.numbers.whiten(self._numbers(x), self._cut(stretch))
        values = np.rint(x[..., self.columns]).astype(int)
        chosen = np.arange(len(self.columns)), values
        middle = self.chances.cumsum(-1)[chosen] - self.chances[chosen] / 2
        return self._join(numbers, middle)

    def update(self, z: Array, values: Array, stretch: Array | None = None) -> Mixed:
        """Learn from samples and their values."""
        numbers = self.numbers.update(self._numbers(z), values, self._cut(stretch))
        c = rates(len(self.columns), len(z))
        (weights,) = assign(values, c.mean_weights)
        counts = (self.chances > 0).sum(-1)
        speed = c.mean_selected / (c.mean_selected + float((counts - 1).sum()))
        # Which value each sample has, shape (population, categories, values)
        chosen = self._values(z)[..., None] == np.arange(self.chances.shape[1])
        moved = self.chances + speed * np.einsum("k,kcv->cv", weights - weights.mean(), chosen)
        return replace(self, numbers=numbers, chances=self._within_margin(moved, counts))

    def _within_margin(self, chances: Array, counts: Integers) -> Array:
        """Raise chances to the margin; what is above it pays for that."""
        change = 1 - KEEP ** (1 / len(counts))
        least = (change / np.maximum(counts - 1, 1))[:, None]
        possible = self.chances > 0
        raised = np.where(possible, np.maximum(chances, least), 0.0)
        above = np.where(possible, raised - least, 0.0)
        room = 1 - least * counts[:, None]
        total = np.maximum(above.sum(-1, keepdims=True), 1e-300)
        return np.where(possible, least + above * room / total, 0.0)

    def deviations(self) -> Array:
        """Return those of the numbers, and for categories the chance of not being the most likely
        value.
        """
        return self._join(self.numbers.deviations(), 1 - self.chances.max(-1))

    def axes(self) -> Array:
        """Return the principal axes of the numbers."""
        return self.numbers.axes()

    def reflected(self, mean: Array, flipped: Mask) -> Mixed:
        """Return the mirror image of the numbers; categories stay."""
        folded = np.delete(flipped, self.columns)
        return replace(self, numbers=self.numbers.reflected(self._numbers(mean), folded))

    def _values(self, z: Array) -> Integers:
        """Return the value of each category, where ``z`` falls among the chances."""
        values = (z[..., self.columns, None] >= self.chances.cumsum(-1)).sum(-1)
        return np.minimum(values, (self.chances > 0).sum(-1) - 1)

    def _numbers(self, x: Array) -> Array:
        """Return the coordinates that are numbers."""
        return np.delete(x, self.columns, -1)

    def _cut(self, stretch: Array | None) -> Array | None:
        return None if stretch is None else self._numbers(stretch)

    def _join(self, numbers: Array, categories: Array | Integers) -> Array:
        """Return numbers and categories as coordinates in their places."""
        d = numbers.shape[-1] + len(self.columns)
        joined = np.empty((*numbers.shape[:-1], d))
        joined[..., np.delete(np.arange(d), self.columns)] = numbers
        joined[..., self.columns] = categories
        return joined
