"""Restart schedules: how large the population, and how wide the start, of the next run is."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from ..core.arguments import check_number, check_size, choose
from .inputs import check_population
from .methods import even


@dataclass(frozen=True)
class Start:
    """How a run begins.

    Attributes:
        population: its samples in each generation.
        width: its first step size, as a fraction of sigma0.
        max_evals: after how many evaluations it must end, if that is limited.
        large: whether it belongs to the runs with growing populations.
    """

    population: int
    width: float = 1.0
    max_evals: int | None = None
    large: bool = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_population(self.population)
        check_number(self.width, "width", 1e-100)
        if self.max_evals is not None:
            check_size(self.max_evals, "max_evals")


Schedule = Callable[[Start, int, np.random.Generator], "Start | None"]
"""``schedule(ended, evals, rng)``: how the run that is over began, and the evaluations it used; returns how the next
one begins, or ``None`` to stop."""


@dataclass
class Restarts:
    """The schedules that have names, and what all runs so far have used."""

    # whether to make small, narrow runs in between, as long as they have used fewer evaluations than the large ones
    # (Hansen, 2009). Without them, the population doubles at every restart (Auger and Hansen, 2005)
    bipop: bool = False
    first: int = 0  # population of the first run, once that is over
    doublings: int = 0  # how often the population has doubled
    large_evals: int = 0  # evaluations of the runs with growing populations
    small_evals: int = 0  # evaluations of the others
    last_large: int = 0  # evaluations of the last run with a growing population

    def __call__(self, ended: Start, evals: int, rng: np.random.Generator) -> Start:
        """Return the next start; see ``Schedule``."""
        self.first = self.first or ended.population
        if ended.large:
            self.large_evals += evals
            self.last_large = evals
        else:
            self.small_evals += evals
        # The first two runs are large ones: there is nothing yet for the others to be smaller than.
        if self.bipop and self.doublings > 0 and self.small_evals < self.large_evals:
            ratio = 2**self.doublings / 2
            population = int(self.first * ratio ** (rng.uniform() ** 2))
            return Start(even(population), 10 ** (-2 * rng.uniform()), max(1, self.last_large // 2), large=False)
        self.doublings += 1
        return Start(self.first * 2**self.doublings)


SCHEDULES: Mapping[str, Schedule] = {"ipop": Restarts(), "bipop": Restarts(bipop=True)}


def find_schedule(restarts: str | Schedule | None) -> Schedule | None:
    """Return a schedule by its name, or of the user's own; a copy, because it remembers what it has seen."""
    return None if restarts is None else deepcopy(choose(restarts, SCHEDULES, "restarts"))
