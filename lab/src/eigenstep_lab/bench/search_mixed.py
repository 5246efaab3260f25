"""Functions of numbers, integers and categories, and what eigenstep, CatCMA and samplers of Optuna
need for them.

Each has five numbers in [-5, 5], five integers from -10 to 10 and five categories of five values;
the least value is 0, at a place that depends on the seed. Categories count as right or wrong, in
any order; where they lead, only those before the first wrong one count. Optuna's samplers take
milliseconds for each evaluation and are made for few: with these, all run for ``TRIALS``
evaluations, and are compared at parts of the value in the middle of the space.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eigenstep.search import Search

from ..console import require_peer
from .search_peers import Array, Counted, until_over

SIZE, VALUES = 5, 5
TARGET = 1e-6
BUDGET, TRIALS = 20_000, 600
PARTS = [10.0 ** (-k / 2) for k in range(1, 17)]
Mixed = Callable[[Array, Array, NDArray[np.bool_]], float]
"""``f(x, z, right)``: distances of numbers and integers from the best ones, and which categories
are right.
"""

ROTATION = np.linalg.qr(np.random.default_rng(1).standard_normal((2 * SIZE, 2 * SIZE)))[0]


def _wrong(right: NDArray[np.bool_]) -> float:
    return float(len(right) - right.sum())


def _follow(right: NDArray[np.bool_]) -> float:
    return float(len(right) - np.cumprod(right).sum())


def _ellipsoid(x: Array, condition: float = 1e4) -> float:
    return float((condition ** (np.arange(len(x)) / (len(x) - 1)) * x * x).sum())


def _rosenbrock(x: Array) -> float:
    y = x + 1
    return float((100 * (y[1:] - y[:-1] ** 2) ** 2 + (y[:-1] - 1) ** 2).sum())


def _ackley(x: Array) -> float:
    waves = math.exp(np.cos(2 * np.pi * x).mean())
    return max(0.0, 20 + math.e - 20 * math.exp(-0.2 * math.sqrt((x * x).mean())) - waves)


def _join(x: Array, z: Array) -> Array:
    return np.concatenate([x, z])


FUNCTIONS: Mapping[str, Mixed] = {
    "sphere": lambda x, z, r: float(x @ x + z @ z) + _wrong(r),
    "sphere, leading": lambda x, z, r: float(x @ x + z @ z) + _follow(r),
    "ellipsoid": lambda x, z, r: _ellipsoid(_join(x, z)) + _wrong(r),
    "ellipsoid, leading": lambda x, z, r: _ellipsoid(_join(x, z)) + _follow(r),
    "rotated ellipsoid of numbers": lambda x, z, r: (
        _ellipsoid(ROTATION[:SIZE, :SIZE] @ x) + float(z @ z) + float(x @ x) + _wrong(r)
    ),
    "rotated sphere of all": lambda x, z, r: _ellipsoid(ROTATION @ _join(x, z), 10.0) + _wrong(r),
    "Rosenbrock": lambda x, z, r: _rosenbrock(x) + float(z @ z) + _wrong(r),
    "Ackley": lambda x, z, r: _ackley(_join(x, z)) + _wrong(r),
    "categories move numbers": lambda x, z, r: float(((x - ~r) ** 2).sum() + z @ z) + _wrong(r),
    "categories weigh numbers": lambda x, z, r: (
        float(((1 + 9 * ~r) * x * x).sum() + z @ z) + 0.1 * _wrong(r)
    ),
}


class Problem:
    """One function with its best point, which counts evaluations."""

    def __init__(self, name: str, seed: int, trials: bool = False) -> None:
        """Choose the best point at random; with ``trials`` count those of Optuna."""
        rng = np.random.default_rng(seed)
        self._function = FUNCTIONS[name]
        self._x, self._z = rng.uniform(-3, 3, SIZE), rng.integers(-6, 7, SIZE)
        self._c = rng.integers(0, VALUES, SIZE)
        first = self._value(np.zeros(3 * SIZE))
        targets = [part * first for part in PARTS] if trials else [TARGET]
        self.counted = Counted(self._value, targets, TRIALS if trials else BUDGET)

    def _value(self, point: Array) -> float:
        x, z, c = point[:SIZE], point[SIZE : 2 * SIZE], point[2 * SIZE :]
        return self._function(x - self._x, z - self._z, c == self._c)


def eigenstep(problem: Problem, seed: int) -> None:
    """Search from the middle of the space."""
    bounds = [(-5.0, 5.0)] * SIZE + [(-10.0, 10.0)] * SIZE + [(None, None)] * SIZE
    search = Search(
        np.zeros(3 * SIZE),
        np.array([2.0] * SIZE + [4.0] * SIZE + [1.0] * SIZE),
        bounds=bounds,
        integers=list(range(SIZE, 2 * SIZE)),
        categories=dict.fromkeys(range(2 * SIZE, 3 * SIZE), VALUES),
        seed=seed,
        restarts="ipop",
        max_evals=BUDGET,
    )
    while not search.stop():
        points = search.ask()
        search.tell(points, [problem.counted(point) for point in points])


def catcma(problem: Problem, seed: int) -> None:
    """Run ``cmaes.CatCMAwM`` with its defaults, again with twice the population whenever it wants
    to stop.
    """
    module, population = require_peer("cmaes"), None
    while True:
        strategy = module.CatCMAwM(
            x_space=[[-5.0, 5.0]] * SIZE,
            z_space=[list(range(-10, 11))] * SIZE,
            c_space=[VALUES] * SIZE,
            seed=seed,
            population_size=population,
        )
        while not strategy.should_stop():
            asked = [strategy.ask() for _ in range(strategy.population_size)]
            points = [np.concatenate([s.x, s.z, s.c.argmax(-1)]) for s in asked]
            strategy.tell([(s, problem.counted(p)) for s, p in zip(asked, points, strict=True)])
        population, seed = 2 * strategy.population_size, seed + 1000


SEARCHES: Mapping[str, Callable[[Problem, int], None]] = {
    "eigenstep": eigenstep,
    "CatCMAwM": catcma,
}


def solve_mixed(search: str, name: str, seed: int) -> float:
    """Return the evaluations until the target; infinite if it was not reached."""
    problem = Problem(name, seed)
    with until_over():
        SEARCHES[search](problem, seed)
    return problem.counted.hits[0]


def samplers(seed: int) -> dict[str, Any]:
    """Return the samplers to compare in Optuna, ours first."""
    optuna = require_peer("optuna")
    own = importlib.import_module("eigenstep_lab.extras.optuna_sampler").SpectralSampler
    return {
        "SpectralSampler": own(seed=seed),
        "TPESampler": optuna.samplers.TPESampler(seed=seed),
        "CmaEsSampler": optuna.samplers.CmaEsSampler(
            seed=seed, with_margin=True, warn_independent_sampling=False
        ),
        "RandomSampler": optuna.samplers.RandomSampler(seed=seed),
    }


SAMPLERS = ("SpectralSampler", "TPESampler", "CmaEsSampler", "RandomSampler")


def solve_trials(sampler: str, name: str, seed: int) -> list[float]:
    """Return the trials of Optuna until parts of the value in the middle; infinite where they were
    not reached.
    """
    optuna, problem = require_peer("optuna"), Problem(name, seed, trials=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: Any) -> float:
        x = [trial.suggest_float(f"x{k}", -5, 5) for k in range(SIZE)]
        z = [trial.suggest_int(f"z{k}", -10, 10) for k in range(SIZE)]
        c = [trial.suggest_categorical(f"c{k}", list(range(VALUES))) for k in range(SIZE)]
        return problem.counted(np.array([*x, *z, *c], dtype=float))

    with until_over():
        optuna.create_study(sampler=samplers(seed)[sampler]).optimize(objective, n_trials=TRIALS)
    return problem.counted.hits
