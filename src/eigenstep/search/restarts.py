"""Restart schedules: how large the population, and how wide the start, of the next run is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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


@dataclass
class Restarts:
    """What all runs so far have used.

    Attributes:
        schedule: "ipop" doubles the population at every restart (Auger and Hansen, 2005). "bipop" also makes small,
            narrow runs in between, as long as they have used fewer evaluations than the large ones (Hansen, 2009).
        first: population of the first run.
        doublings: how often the population has doubled.
        large_evals: evaluations of the runs with growing populations.
        small_evals: evaluations of the others.
        last_large: evaluations of the last run with a growing population.
    """

    schedule: str
    first: int
    doublings: int = 0
    large_evals: int = 0
    small_evals: int = 0
    last_large: int = 0

    def next(self, ended: Start, evals: int, rng: np.random.Generator) -> Start:
        """Return the next start.

        Args:
            ended: how the run that is over began.
            evals: how many evaluations it used.
            rng: source of randomness.
        """
        if ended.large:
            self.large_evals += evals
            self.last_large = evals
        else:
            self.small_evals += evals
        # The first two runs are large ones: there is nothing yet for the others to be smaller than.
        if self.schedule == "bipop" and self.doublings > 0 and self.small_evals < self.large_evals:
            ratio = 2**self.doublings / 2
            population = int(self.first * ratio ** (rng.uniform() ** 2))
            return Start(even(population), 10 ** (-2 * rng.uniform()), max(1, self.last_large // 2), large=False)
        self.doublings += 1
        return Start(self.first * 2**self.doublings)


def even(population: int) -> int:
    """Round up to an even number, so that samples come in pairs."""
    return population + population % 2
