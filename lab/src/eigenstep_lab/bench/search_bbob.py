"""BBOB, the benchmark of the COCO platform: 24 functions, in several instances and dimensions, and
many targets each.

Figures of merit are the empirical distribution (ECDF) of the evaluations until a target is reached,
over all functions, instances and targets, and the area under it, on a logarithmic axis from 1 to
``BUDGET`` evaluations per dimension.
"""

from __future__ import annotations

import importlib.util
import math
import os
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..console import UserError, require_peer
from .search_peers import PEERS, Array, Counted, Run

BUDGET = 1000
"""Evaluations per dimension."""
TARGETS = [10 ** (2 - 0.2 * k) for k in range(51)]
"""Distances from the least value: from 100 to 1e-8."""
FUNCTIONS = tuple(range(1, 25))
BUDGETS = (10, 20, 50, 100, 200, 500, 1000)
"""Evaluations per dimension at which shares of targets are compared."""
SHORT = {"surrogate": 100}
"""Smaller budgets per dimension, of searches that are slow; they do not depend on it up to there.
"""

PORTFOLIOS = {"best 2009": "best2009-bbob", "best 2009-16": "best09-16-bbob"}
"""COCO's portfolios: for each function and target the algorithm that was best in these years."""
PORTFOLIO_DIMENSIONS = (2, 3, 5, 10, 20, 40)

Hits = list[list[float]]
"""For each instance and target, the evaluations until it was reached."""


def run_instance(peer: str, function: int, d: int, instance: int) -> list[float]:
    """Return the hits of one search on one instance of a function."""
    suite = require_peer("cocoex").Suite("bbob", f"instances: {instance}", f"dimensions: {d}")
    problem = suite.get_problem_by_function_dimension_instance(function, d, instance)
    least = least_value(problem)
    budget = SHORT.get(peer, BUDGET) * d
    counted = Counted(problem, [least + target for target in TARGETS], budget)
    seed = 100 * function + instance
    PEERS[peer](counted, Run(lambda rng: rng.uniform(-4, 4, d), 2.0, budget, "ipop", seed))
    problem.free()
    return counted.hits


def least_value(problem: Any) -> float:
    """Return the least value of a BBOB problem, which the platform tells through a file in the
    working directory.
    """
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            problem._best_parameter("print")
            best: Array = np.loadtxt("._bbob_problem_best_parameter.txt")
        finally:
            os.chdir(before)
    return float(problem(best))


def portfolio(name: str, d: int) -> dict[int, Hits]:
    """Return what the best of many algorithms needed for each function and target, from the files
    of ``cocopp``.
    """
    spec = importlib.util.find_spec("cocopp")
    if spec is None or spec.origin is None:
        raise UserError("the reference lines need the package cocopp: pip install './lab[peers]'")
    archive = PORTFOLIOS[name]
    found: dict[int, Hits] = {}
    with tarfile.open(Path(spec.origin).parent / "refalgs" / f"{archive}.tar.gz") as files:
        for function in FUNCTIONS:
            member = files.extractfile(f"{archive}/bbob-bestalg_f{function:02}_d{d:02}.dat")
            assert member is not None
            lines = [
                line.split()
                for line in member.read().decode().splitlines()
                if not line.startswith("%")
            ]
            reached = [(float(target), float(evaluations)) for evaluations, target, *_ in lines]
            # Files round targets; between two of them there is a factor of 1.6.
            hits = [
                next((count for value, count in reached if value <= 1.001 * t), math.inf)
                for t in TARGETS
            ]
            found[function] = [hits]
    return found


def area(hits: Sequence[Sequence[float]], d: int) -> float:
    """Return the area under the ECDF, between 0 and 1."""
    span = math.log(BUDGET)
    with np.errstate(divide="ignore"):
        left = (math.log(BUDGET * d) - np.log(np.asarray(hits))) / span
    return float(np.clip(left, 0, 1).mean())


def ecdf(hits: Sequence[Sequence[float]], d: int, at: Array) -> Array:
    """Return the share of targets reached within ``at`` evaluations per dimension."""
    ordered = np.sort(np.asarray(hits).ravel())
    return np.searchsorted(ordered, at * d, side="right") / len(ordered)


def summarize(
    found: Mapping[int, Mapping[str, Mapping[Any, Hits]]], instances: str
) -> dict[str, Any]:
    """Return areas and curves by dimension and search, and the area on each function.

    Args:
        found: hits by dimension, search and function.
        instances: which ones, for the reader.
    """
    at = np.logspace(0, math.log10(BUDGET), 61)

    def entry(functions: Mapping[Any, Hits], d: int, most: int) -> dict[str, Any]:
        rows = [row for hits in functions.values() for row in hits]
        return {
            "area": area(rows, d) if most == BUDGET else None,
            "functions": {str(f): round(area(hits, d), 4) for f, hits in functions.items()},
            "curve": [round(float(y), 4) for y in ecdf(rows, d, at[at <= most])],
            "budgets": {str(b): float(ecdf(rows, d, np.array(b))) for b in BUDGETS if b <= most},
            "instances": instances,
        }

    known = [d for d in found if d in PORTFOLIO_DIMENSIONS]
    return {
        "evaluations_per_dimension": [round(float(a), 3) for a in at],
        "dimensions": {
            str(d): {
                peer: entry(functions, d, SHORT.get(peer, BUDGET))
                for peer, functions in peers.items()
            }
            for d, peers in found.items()
        },
        "portfolios": {
            str(d): {name: entry(portfolio(name, d), d, BUDGET) for name in PORTFOLIOS}
            for d in known
        },
    }
