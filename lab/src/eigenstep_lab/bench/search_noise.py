"""Functions whose values have noise of constant size, and how near searches come to their minima.

The figure is the true value at the center of the distribution when the budget is used up, which no
search sees.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import numpy as np

from eigenstep.search import Search

from ..console import require_peer
from .search_peers import Array

SIZE, BUDGET, SIGMA = 10, 8000, 2.0
NOISE = (0.1, 3.0)
"""Standard deviations."""
ROTATION = np.linalg.qr(np.random.default_rng(3).standard_normal((SIZE, SIZE)))[0]
SCALES = 100 ** (np.arange(SIZE) / (SIZE - 1))

FUNCTIONS: Mapping[str, Callable[[Array], float]] = {
    "sphere": lambda x: float(x @ x),
    "rotated ellipsoid": lambda x: float((SCALES * (ROTATION @ x) ** 2).sum()),
    "Rosenbrock": lambda x: float((100 * (x[1:] - x[:-1] ** 2) ** 2 + (x[:-1] - 1) ** 2).sum()),
    "Rastrigin": lambda x: float((x * x + 10 * (1 - np.cos(2 * np.pi * x))).sum()),
}
Noisy = Callable[[Array], float]


def eigenstep(function: Noisy, start: Array, seed: int, method: str) -> Array:
    """Return where a method of eigenstep ends."""
    search = Search(start, SIGMA, method=method, noisy=True, seed=seed, max_evals=BUDGET)
    while not search.stop():
        points = search.ask()
        search.tell(points, [function(point) for point in points])
    return np.asarray(search.mean)


def lra(function: Noisy, start: Array, seed: int) -> Array:
    """Return where CMA-ES with learning rate adaptation ends, as the package cmaes has it."""
    strategy, count = require_peer("cmaes").CMA(start, SIGMA, seed=seed, lr_adapt=True), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while count < BUDGET:
            points = [strategy.ask() for _ in range(strategy.population_size)]
            strategy.tell([(point, function(point)) for point in points])
            count += len(points)
    return np.asarray(strategy.mean)


SEARCHES: Mapping[str, Callable[[Noisy, Array, int], Array]] = {
    "cautious": lambda f, x, s: eigenstep(f, x, s, "cautious"),
    "re-evaluation": lambda f, x, s: eigenstep(f, x, s, "spectral"),
    "LRA-CMA": lra,
}


def solve_noisy(search: str, name: str, noise: float, seed: int) -> float:
    """Return the true value at the center in the end."""
    rng = np.random.default_rng(seed)
    start, function = rng.uniform(1, 3, SIZE), FUNCTIONS[name]
    return function(
        SEARCHES[search](lambda x: function(x) + noise * float(rng.standard_normal()), start, seed)
    )
