"""What searches cost beside the function itself: CPU time per evaluation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from eigenstep.search import Search

from ..console import require_peer
from ..extras.surrogate import Modeled
from .search_peers import Array


def measure_overhead(d: int) -> dict[str, float]:
    """Time generations of all searches on an ellipsoid, whose own time is not counted."""
    generations = max(3, min(200, 2000 // d))
    steppers = {name: make(d) for name, make in STEPPERS.items() if d <= LARGEST.get(name, d)}
    for step in steppers.values():
        for _ in range(generations):  # the first ones set up things
            next(step)
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for _ in range(5):
        for name, step in steppers.items():
            spent, count = np.sum([next(step) for _ in range(generations)], axis=0)
            times[name].append(1e6 * spent / count)
    return {name: statistics.median(found) for name, found in times.items()}


def _ellipsoid(x: Array) -> Array:
    d = x.shape[-1]
    return (10 ** (6 * np.arange(d) / (d - 1)) * x * x).sum(-1)


def _step_eigenstep(d: int, method: Any = "spectral") -> Iterator[tuple[float, int]]:
    search = Search(np.ones(d), 1.0, method=method, seed=0, max_evals=10**9, tolfun=0, tolx=0)
    while True:
        start = time.process_time()
        points = search.ask()
        asked = time.process_time()
        values = _ellipsoid(points)
        evaluated = time.process_time()
        search.tell(points, values)
        search.stop()
        yield time.process_time() - evaluated + asked - start, len(points)


def _step_pycma(d: int) -> Iterator[tuple[float, int]]:
    options = {"verbose": -9, "verb_log": 0, "seed": 1, "tolfun": 0, "tolx": 0, "tolfunhist": 0}
    strategy = require_peer("cma").CMAEvolutionStrategy(np.ones(d), 1.0, options)
    while True:
        start = time.process_time()
        points = strategy.ask()
        asked = time.process_time()
        values = _ellipsoid(np.array(points)).tolist()
        evaluated = time.process_time()
        strategy.tell(points, values)
        strategy.stop()
        yield time.process_time() - evaluated + asked - start, len(points)


def _step_cmaes(d: int) -> Iterator[tuple[float, int]]:
    strategy = require_peer("cmaes").CMA(np.ones(d), 1.0, seed=1)
    while True:
        start = time.process_time()
        points = [strategy.ask() for _ in range(strategy.population_size)]
        asked = time.process_time()
        values = _ellipsoid(np.array(points)).tolist()
        evaluated = time.process_time()
        strategy.tell(list(zip(points, values, strict=True)))
        strategy.should_stop()
        yield time.process_time() - evaluated + asked - start, len(points)


STEPPERS: Mapping[str, Callable[[int], Iterator[tuple[float, int]]]] = {
    "eigenstep": _step_eigenstep,
    "surrogate": partial(_step_eigenstep, method=Modeled),
    "pycma": _step_pycma,
    "cmaes": _step_cmaes,
}
LARGEST = {"surrogate": 40}
"""Dimensions above which some are not measured: a model takes too long there."""
