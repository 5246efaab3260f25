"""Functions of thousands of coordinates, and searches whose memory is linear in them.

Functions are turned by signs, a permutation and a cosine transform: a dense rotation that needs no
matrix. Searches are compared by evaluations until the value has fallen to parts of the first one.
Budgets are small, because a run to the minimum takes peers tens of millions of evaluations.
``FUNCTIONS`` are those on which the default of ``minimize`` is compared, which may use slopes;
``RANKED`` those for searches that see the order of values alone.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from eigenstep.search import Search

from ..console import UserError, require_peer
from .search_peers import Array, Counted, until_over

BUDGETS = {1000: 60, 10_000: 4}
"""Evaluations per dimension."""
PARTS = [10.0 ** (-k / 2) for k in range(1, 25)]
"""Of the value at the start: the targets."""
SIGMA, CONDITION = 0.5, 1e6


Problem = tuple[Callable[[Array], float], Array]
"""A function, and where to start."""


def convex(d: int, seed: int, form: str, turned: bool = True, noise: float = 0.0) -> Problem:
    """Return a sum of powers of coordinates, in the coordinates of a random rotation or not, maybe
    with noise.
    """
    dct = require_peer("scipy.fft").dct
    rng = np.random.default_rng(seed)
    before, after = rng.choice([-1.0, 1.0], (2, d))
    order, at = rng.permutation(d), np.arange(d) / (d - 1)
    scales, powers = {
        "ellipsoid": (CONDITION**at, 2.0),
        "cigar": (np.where(at == 0, 1.0, CONDITION), 2.0),
        "discus": (np.where(at == 0, CONDITION, 1.0), 2.0),
        "powers": (1.0, 2 + 4 * at),
        "edges": (CONDITION ** (at / 2), 1.0),
    }[form]

    def function(x: Array) -> float:
        y = after * dct((before * x)[order], norm="ortho") if turned else x[order]
        value = float((scales * np.abs(y) ** powers).sum())
        return value * (1 + noise * float(rng.standard_normal())) if noise else value

    return function, rng.uniform(-1, 1, d)


def rosenbrock(d: int, seed: int) -> Problem:
    """Return the function, and where to start."""

    def function(x: Array) -> float:
        return float((100 * (x[1:] - x[:-1] ** 2) ** 2 + (x[:-1] - 1) ** 2).sum())

    return function, np.random.default_rng(seed).uniform(-2, 2, d)


FUNCTIONS: Mapping[str, Callable[[int, int], Problem]] = {
    "rotated ellipsoid": partial(convex, form="ellipsoid"),
    "Rosenbrock": rosenbrock,
}
TUNED: Mapping[str, Callable[[int, int], Problem]] = {
    **FUNCTIONS,
    "ellipsoid": partial(convex, form="ellipsoid", turned=False),
    "rotated cigar": partial(convex, form="cigar"),
}
"""Functions that had a part in choosing the constants of ``lowrank``, with another seed."""
RANKED: Mapping[str, Callable[[int, int], Problem]] = {
    **TUNED,
    "rotated discus": partial(convex, form="discus"),
    "rotated powers": partial(convex, form="powers"),
    "powers": partial(convex, form="powers", turned=False),
    "rotated edges": partial(convex, form="edges"),
    "edges": partial(convex, form="edges", turned=False),
    "rotated ellipsoid, noise 1 %": partial(convex, form="ellipsoid", noise=0.01),
}
RANKED_SIZE, RANKED_BUDGET, FIRST_SEED = 1000, 30, 11


def eigenstep(function: Counted, start: Array, budget: int, seed: int, method: str) -> None:
    """Run a method of eigenstep."""
    search = Search(start, SIGMA, method=method, seed=seed, max_evals=budget)
    while not search.stop():
        points = search.ask()
        search.tell(points, [function(point) for point in points])


def crfmnes(function: Counted, start: Array, budget: int, seed: int) -> None:
    """Run CR-FM-NES with as many samples as its authors use."""
    population = 4 + int(3 * np.log(len(start)))
    module = require_peer("crfmnes")
    strategy = module.CRFMNES(
        len(start),
        lambda x: function(x[:, 0]),
        start[:, None],
        SIGMA,
        population + population % 2,
        seed=seed,
        # there are no constraints, and looking for them takes most of its time
        use_constraint_violation=False,
    )
    strategy.optimize(budget)


def pypop(function: Counted, start: Array, budget: int, seed: int, name: str) -> None:
    """Run a strategy of pypop7 with its defaults."""
    strategy = import_pypop(name)
    box = np.full(len(start), 5.0)  # it only says where starts come from if none is given
    problem = {
        "fitness_function": function,
        "ndim_problem": len(start),
        "lower_boundary": -box,
        "upper_boundary": box,
    }
    options = {
        "max_function_evaluations": budget,
        "mean": start,
        "sigma": SIGMA,
        "seed_rng": seed,
        "verbose": 0,
    }
    strategy(problem, {**options, "is_restart": False}).optimize()


def vkd(function: Counted, start: Array, budget: int, seed: int) -> None:
    """Run CMA-ES with a covariance of low rank plus a diagonal, by the sampler for it in pycma."""
    cma = require_peer("cma")
    sampler = require_peer("cma.restricted_gaussian_sampler").GaussVkDSampler
    options = sampler.extend_cma_options(
        {"verbose": -9, "verb_log": 0, "seed": seed + 1, "maxfevals": budget}
    )
    cma.CMAEvolutionStrategy(start, SIGMA, options).optimize(function)


def import_pypop(name: str) -> Any:
    """Import a strategy of pypop7 without what it does not need here: it would install a hundred
    packages.

    In its package a strategy that is not used here is compiled with numba; a module that compiles
    nothing takes its place where it is missing.
    """
    module = types.ModuleType("numba")
    module.jit = module.njit = lambda *_args, **_options: lambda function: function  # type: ignore[attr-defined]
    missing = importlib.util.find_spec("numba") is None and "numba" not in sys.modules
    if missing:
        sys.modules["numba"] = module
    try:
        return getattr(importlib.import_module(f"pypop7.optimizers.es.{name.lower()}"), name)
    except ImportError as error:
        raise UserError(
            f"this needs pypop7: pip install --no-deps pypop7==0.0.82 ({error})"
        ) from error
    finally:
        if missing:
            del sys.modules["numba"]


SEARCHES: Mapping[str, Callable[[Counted, Array, int, int], None]] = {
    "eigenstep-auto": partial(eigenstep, method="auto"),
    "separable": partial(eigenstep, method="separable"),
    "CR-FM-NES": crfmnes,
    "LM-CMA": partial(pypop, name="LMCMA"),
    "VkD-CMA": vkd,
}


RANKED_SEARCHES: Mapping[str, Callable[[Counted, Array, int, int], None]] = {
    "lowrank": partial(eigenstep, method="lowrank"),
    **{name: search for name, search in SEARCHES.items() if name != "eigenstep-auto"},
}
"""Searches that see the order of values alone."""


def solve_large(search: str, name: str, d: int, seed: int) -> list[float]:
    """Return the evaluations until each part of the first value; infinite where it was
    not reached.
    """
    return _solve(SEARCHES[search], FUNCTIONS[name](d, seed), BUDGETS[d] * d, seed)


def solve_ranked(search: str, name: str, seed: int) -> list[float]:
    """Return the same for searches that see the order of values alone."""
    problem = RANKED[name](RANKED_SIZE, seed)
    return _solve(RANKED_SEARCHES[search], problem, RANKED_BUDGET * RANKED_SIZE, seed)


def _solve(
    search: Callable[[Counted, Array, int, int], None], problem: Problem, budget: int, seed: int
) -> list[float]:
    function, start = problem
    first = function(start)
    counted = Counted(function, [part * first for part in PARTS], budget)
    with until_over():
        search(counted, start, budget, seed)
    return counted.hits
