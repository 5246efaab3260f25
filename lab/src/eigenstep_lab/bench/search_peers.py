"""The searches to compare, each as its own package runs it, and a function that keeps count.

All see the same functions, one point at a time, from starts and with step sizes of the same kind,
and the same budget.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from eigenstep.search import Search

from ..console import require_peer

Array = NDArray[np.float64]
Starts = Callable[[np.random.Generator], Array]


class Over(Exception):
    """The budget is used up, or the last target reached."""


class Counted:
    """A function that records after how many evaluations each target was reached.

    Attributes:
        evaluations: so far.
        hits: evaluations until each target; infinite where it was not reached.
    """

    def __init__(
        self, function: Callable[[Array], float], targets: Sequence[float], budget: int
    ) -> None:
        """Count evaluations of a function.

        Args:
            function: takes one point.
            targets: falling values.
            budget: evaluations allowed.
        """
        self._function, self._targets, self._budget = function, targets, budget
        self.evaluations, self._next = 0, 0
        self.hits = [math.inf] * len(targets)

    def __call__(self, x: Array) -> float:
        """Evaluate, or end the search."""
        if self.evaluations >= self._budget or self._next == len(self._targets):
            raise Over
        value = self._function(x)
        self.evaluations += 1
        while self._next < len(self._targets) and value <= self._targets[self._next]:
            self.hits[self._next] = self.evaluations
            self._next += 1
        return value


TOLX = 1e-11
"""Where the distribution is narrower than this, a run is over: the default of eigenstep and of
pycma.
"""


@dataclass(frozen=True)
class Run:
    """How to search.

    Attributes:
        starts: Returns where to start, again with each restart.
        sigma0: How far from there to look at first.
        budget: Evaluations allowed.
        restarts: What to do at a local minimum: stop, "ipop" or "bipop".
        seed: Of all random numbers.
        tolx: Where steps are so small, a run is over.
    """

    starts: Starts
    sigma0: float
    budget: int
    restarts: str | None
    seed: int
    tolx: float = TOLX


Peer = Callable[[Counted, Run], None]
"""Searches until one of both gives up."""


@contextlib.contextmanager
def until_over() -> Iterator[None]:
    """End a search where its budget does, without warnings."""
    with contextlib.suppress(Over), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def eigenstep(function: Counted, run: Run, method: str = "spectral") -> None:
    """Run a method of eigenstep: by default the one that sees only the order of values."""
    search = Search(
        run.starts,
        run.sigma0,
        method=method,
        seed=run.seed,
        restarts=run.restarts,
        max_evals=run.budget,
        tolx=run.tolx,
    )
    with contextlib.suppress(Over):
        while not search.stop():
            points = search.ask()
            search.tell(points, [function(point) for point in points])


def pycma(function: Counted, run: Run) -> None:
    """Run ``cma.fmin2`` with its own restarts."""
    cma = require_peer("cma")
    rng = np.random.default_rng(run.seed)
    options = {
        "verbose": -9,
        "seed": run.seed + 1,
        "maxfevals": run.budget,
        "ftarget": -math.inf,
        "tolx": run.tolx,
    }
    restarts = {"restarts": 9 if run.restarts else 0, "bipop": run.restarts == "bipop"}
    with until_over():
        cma.fmin2(function, lambda: run.starts(rng), run.sigma0, options, **restarts)


def cmaes(function: Counted, run: Run) -> None:
    """Run ``cmaes.CMA``, restarted as its documentation does: with twice the population whenever it
    wants to stop.

    When it stops cannot be changed, so ``tolx`` means nothing to it.
    """
    module = require_peer("cmaes")
    rng = np.random.default_rng(run.seed)
    population = None
    with until_over():
        while True:
            start = run.starts(rng)
            seed = int(rng.integers(2**31))
            strategy = module.CMA(start, run.sigma0, seed=seed, population_size=population)
            while not strategy.should_stop():
                points = [strategy.ask() for _ in range(strategy.population_size)]
                strategy.tell([(point, function(point)) for point in points])
            if run.restarts is None:
                return
            population = 2 * strategy.population_size


def surrogate(function: Counted, run: Run) -> None:
    """Run ``cma.fmin_lq_surr2``, CMA-ES with a quadratic model, again and again: it has no restarts
    of its own.
    """
    cma = require_peer("cma")
    rng = np.random.default_rng(run.seed)
    options = {"verbose": -9, "seed": run.seed + 1, "maxfevals": run.budget, "tolx": run.tolx}
    with until_over():
        while True:
            cma.fmin_lq_surr2(function, run.starts(rng), run.sigma0, options)
            if run.restarts is None:
                return


PEERS: Mapping[str, Peer] = {
    "eigenstep": eigenstep,
    "eigenstep-auto": partial(eigenstep, method="auto"),
    "pycma": pycma,
    "cmaes": cmaes,
    "surrogate": surrogate,
}
"""The searches by name; ours first, then what ``minimize`` does by default."""
