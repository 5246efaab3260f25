"""Runs of a search: when one is over, and how large the population, and how wide the start, of the
next one is.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from ..core.checks import check_number, check_size, choose
from ..core.numpy_twin import Array
from ..core.result import Ending
from .domain import check_population
from .sampling import even
from .spectral import Distribution

ENDINGS = (
    Ending("target", "the target value is reached", success=True),
    Ending(
        "tolfun", "values differ by less than tolfun, in the population and over time", success=True
    ),
    Ending("tolx", "the standard deviations are all below tolx", success=True),
    Ending(
        "no_effect",
        "the distribution is so narrow that rounding swallows its samples",
        success=True,
    ),
    Ending("flat", "values have been equal for many generations"),
    Ending("stagnation", "values have stopped getting better"),
    Ending("condition", "the axes of the distribution differ by more than a factor 1e7"),
    Ending(
        "diverged",
        "the distribution grew ten thousandfold: sigma0 is much too small, or there is no minimum",
    ),
    Ending("failed", "no evaluation has given a finite value"),
    Ending("max_evals", "the allowed evaluations are used up"),
    Ending("max_iter", "the allowed generations are used up"),
    Ending("max_seconds", "the allowed time is over"),
    Ending("interrupted", "interrupted from the keyboard"),
    Ending("callback", "the callback asked to stop", success=True),
)
# What Search.stop() returns is a key
REASONS: Mapping[str, Ending] = {ending.reason: ending for ending in ENDINGS}

MAX_CONDITION = 1e14
MAX_GROWTH = 1e4
CHECK_INTERVAL = 10  # Generations between two looks at what takes time to compute


def known_reason(reason: str) -> str:
    """Return a reason, or say which ones there are."""
    if reason not in REASONS:
        raise ValueError(f"reason must be one of {', '.join(REASONS)}, got {reason!r}")
    return reason


@dataclass
class Progress:
    """What one run (from one start to its end) remembers to see that it is over."""

    start_axis: float  # longest axis at the start
    tolfun: float  # see ``eigenstep.search.Search``
    tolx: float  # see ``eigenstep.search.Search``
    best: list[float] = field(default_factory=list)  # least value of each generation
    median: list[float] = field(default_factory=list)  # median value of each generation
    spread: float = math.inf  # range of the last generation's values
    flat: int = 0  # how many generations in a row had equal values

    def add(self, values: Array) -> None:
        """Take note of one generation's values, failures being ``inf``."""
        ordered = np.sort(values)
        count = len(ordered)
        low, high = float(ordered[0]), float(ordered[-1])
        self.best.append(low)
        self.median.append(float(ordered[(count - 1) // 2]))
        self.spread = high - low if math.isfinite(high) else math.inf
        # A quarter of the values equal to the best is enough: so many samples are on one plateau.
        self.flat = (
            self.flat + 1
            if low == ordered[min(math.ceil(count / 4), count - 1)] and math.isfinite(low)
            else 0
        )

    def reason(self, distribution: Distribution, population: int, scale: Array) -> str | None:
        """Return the name of the reason to end this run, if there is one."""
        d, generations = len(scale), len(self.best)
        if generations % CHECK_INTERVAL:
            return None
        window = 10 + math.ceil(30 * d / population)
        if math.isinf(
            min(self.best)
        ):  # as long as there is no value at all, nothing else can be said
            return "failed" if generations >= window else None
        axes = distribution.axes()
        longest, shortest = float(axes.max()), float(axes.min())
        if generations >= window:
            recent = self.best[-window:]
            if all(math.isinf(value) for value in recent):
                return "failed"
            if self.flat >= window:
                return "flat"
            # Values that hardly differ mean convergence only where the distribution has become
            # narrower.
            narrower, change = longest < self.start_axis, max(recent) - min(recent)
            if narrower and change < self.tolfun and self.spread < self.tolfun:
                return "tolfun"
            if narrower and change < 0.1 * self.tolfun and self.flat == 0:
                return "tolfun"
        deviations = distribution.deviations() * scale
        if deviations.max() < self.tolx:
            return "tolx"
        center = distribution.mean * scale
        if (center + 0.2 * deviations == center).any():
            return "no_effect"
        if longest > shortest * MAX_CONDITION**0.5:
            return "condition"
        if longest > MAX_GROWTH * self.start_axis:
            return "diverged"
        slowness = 1 / getattr(distribution, "rate", 1.0)  # of searches that take parts of steps
        patience = int(
            min(max(slowness * (100 + 100 * d**1.5 / population), 0.2 * generations), 20000)
        )
        if (
            generations > patience
            and _no_better(self.best[-patience:])
            and _no_better(self.median[-patience:])
        ):
            return "stagnation"
        return None


def _no_better(values: list[float]) -> bool:
    """Whether the last third of the values is no better than the first third."""
    part = max(1, int(0.3 * len(values)))
    return float(np.median(values[-part:])) >= float(np.median(values[:part]))


@dataclass(frozen=True)
class Start:
    """How a run begins."""

    population: int  # its samples in each generation
    width: float = 1.0  # its first step size, as a fraction of sigma0
    max_evals: int | None = None  # after how many evaluations it must end, if that is limited
    large: bool = True  # whether it belongs to the runs with growing populations

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_population(self.population)
        check_number(self.width, "width", 1e-100)
        if self.max_evals is not None:
            check_size(self.max_evals, "max_evals")


Schedule = Callable[[Start, int, np.random.Generator], "Start | None"]
"""``schedule(ended, evals, rng)``: how a run began and what it used; returns how the next begins,
``None`` to stop.
"""


@dataclass
class Restarts:
    """Populations double (Auger and Hansen, 2005), with small runs in between (Hansen, 2009); what
    all have used.
    """

    bipop: bool = (
        False  # whether to make small, narrow runs while they have used less than the large ones
    )
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
            return Start(
                even(population),
                10 ** (-2 * rng.uniform()),
                max(1, self.last_large // 2),
                large=False,
            )
        self.doublings += 1
        return Start(self.first * 2**self.doublings)


@dataclass
class Tally:
    """What descents and runs of the distribution have used and found, which tells what
    to do next.
    """

    tolfun: float  # values that differ by less are equal
    descents: int = 0  # evaluations of all descents
    runs: int = 0  # evaluations of all runs
    found: float = math.inf  # least value that descents ended at
    best: float = math.inf  # least value of runs

    @property
    def descend(self) -> bool:
        """Whether to descend from elsewhere: as long as it finds lower minima, and has used less
        than runs have.
        """
        return (
            math.isfinite(self.found)
            and self.descents < self.runs
            and self.found <= self.best + self.tolfun
        )


SCHEDULES: Mapping[str, Schedule] = {"ipop": Restarts(), "bipop": Restarts(bipop=True)}


def find_schedule(restarts: str | Schedule | None) -> Schedule | None:
    """Return a schedule by its name, or of the user's own; a copy, because it remembers what it has
    seen.
    """
    return None if restarts is None else deepcopy(choose(restarts, SCHEDULES, "restarts"))
