"""Functions with known minima, of one vector or of many as rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eigenstep.search import Search

Array = NDArray[np.float64]


def sphere(x: Array) -> Array:
    return (x * x).sum(-1)


def ellipsoid(x: Array, condition: float = 1e4) -> Array:
    d = x.shape[-1]
    return (condition ** (np.arange(d) / max(d - 1, 1)) * x * x).sum(-1)


def rosenbrock(x: Array) -> Array:
    return (100 * (x[..., 1:] - x[..., :-1] ** 2) ** 2 + (x[..., :-1] - 1) ** 2).sum(-1)


def rastrigin(x: Array) -> Array:
    return (x * x + 10 * (1 - np.cos(2 * np.pi * x))).sum(-1)


def rotation(d: int, seed: int = 0) -> Array:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))[0]


def advance(search: Search, fun: Callable[[Any], Any], generations: int = 1) -> None:
    """Tell a search the values of the points that it asks for."""
    for _ in range(generations):
        points = search.ask()
        search.tell(points, fun(points))


class Recorded:
    """A function that remembers its points, and raises an error at some calls."""

    def __init__(
        self,
        fun: Callable[[Any], Any],
        error: BaseException | None = None,
        fails: Callable[[int], bool] = lambda call: True,
    ) -> None:
        self.fun, self.error, self.fails = fun, error, fails
        self.points: list[Any] = []

    @property
    def calls(self) -> int:
        return len(self.points)

    def __call__(self, x: Any) -> Any:
        self.points.append(x)
        if self.error is not None and self.fails(self.calls):
            raise self.error
        return self.fun(x)


@dataclass(frozen=True)
class Isotropic:
    """The smallest distribution that can search: one step size, which follows the success of the
    mean's neighbors.
    """

    mean: Array
    sigma: Array

    rate = 1.0

    @classmethod
    def start(cls, mean: Array, sigma: float) -> Isotropic:
        return cls(mean, np.asarray(sigma))

    def draw(self, rng: np.random.Generator, population: int) -> Array:
        return rng.standard_normal((population, len(self.mean)))

    def sample(self, z: Array, stretch: Array | None = None) -> Array:
        return self.mean + self.sigma * z * (1.0 if stretch is None else stretch)

    def whiten(self, x: Array, stretch: Array | None = None) -> Array:
        return (x - self.mean) / (self.sigma * (1.0 if stretch is None else stretch))

    def update(self, z: Array, values: Array, stretch: Array | None = None) -> Isotropic:
        best = z[values.argsort()[: max(1, len(z) // 4)]].mean(0)
        longer = np.linalg.norm(best) ** 2 > len(best) / max(1, len(z) // 4)
        return Isotropic(
            self.sample(best[None], stretch)[0], self.sigma * (1.2 if longer else 0.85)
        )

    def deviations(self) -> Array:
        return np.full(len(self.mean), float(self.sigma))

    axes = deviations

    def reflected(self, mean: Array, flipped: NDArray[np.bool_]) -> Isotropic:
        return replace(self, mean=mean)
