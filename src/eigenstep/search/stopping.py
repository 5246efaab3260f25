"""When a run is over, and how the next one begins: how large its population is, and how wide its
start.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from ..core.checks import check_number, check_size, choose
from ..core.numpy_twin import Array
from ..core.result import Ending
from .arguments import check_population
from .distribution import Distribution
from .record import Progress
from .sampling import even
from .space import Rng

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
# The keys are what `Search.stop()` returns.
REASONS: Mapping[str, Ending] = {ending.reason: ending for ending in ENDINGS}

MAX_CONDITION = 1e14  # Largest ratio of two eigenvalues of the covariance
MAX_GROWTH = 1e4  # Longest axis, relative to that at the start


def known_reason(reason: str) -> str:
    """Return a reason, or say which ones there are."""
    if reason not in REASONS:
        raise ValueError(f"reason must be one of {', '.join(REASONS)}, got {reason!r}")
    return reason


@dataclass(frozen=True)
class Limits:
    """What the endings of runs depend on, beside values."""

    start_axis: float  # longest axis at the start
    tolfun: float  # see `Search`
    tolx: float  # see `Search`
    population: int
    scale: Array  # size of one unit of each coordinate, shape (d,)

    @property
    def window(self) -> int:
        """How many generations of poor values end a run."""
        return 10 + math.ceil(30 * len(self.scale) / self.population)


def why_over(progress: Progress, distribution: Distribution, limits: Limits) -> str | None:
    """Return the name of the reason to end a run, if there is one."""
    long = len(progress.best) >= limits.window
    if math.isinf(min(progress.best)):  # without any value, nothing else can be said
        return "failed" if long else None
    axes = distribution.axes()
    longest = float(axes.max())
    return (
        (_poor_values(progress, longest < limits.start_axis, limits) if long else None)
        or _too_narrow(distribution, limits)
        or _too_long(longest, float(axes.min()), limits)
        or _stagnation(progress, distribution.rate, limits)
    )


def _poor_values(progress: Progress, narrower: bool, limits: Limits) -> str | None:
    recent = progress.best[-limits.window :]
    if math.isinf(min(recent)):
        return "failed"
    if progress.flat >= limits.window:
        return "flat"
    # Values that hardly differ mean convergence only where the distribution has become narrower.
    change = max(recent) - min(recent)
    converged = change < limits.tolfun and progress.spread < limits.tolfun
    converged |= change < 0.1 * limits.tolfun and progress.flat == 0
    return "tolfun" if narrower and converged else None


def _too_narrow(distribution: Distribution, limits: Limits) -> str | None:
    deviations = distribution.deviations() * limits.scale
    if deviations.max() < limits.tolx:
        return "tolx"
    center = distribution.mean * limits.scale
    return "no_effect" if (center + 0.2 * deviations == center).any() else None


def _too_long(longest: float, shortest: float, limits: Limits) -> str | None:
    if longest > shortest * MAX_CONDITION**0.5:
        return "condition"
    return "diverged" if longest > MAX_GROWTH * limits.start_axis else None


def _stagnation(progress: Progress, rate: float, limits: Limits) -> str | None:
    d = len(limits.scale)
    generations = len(progress.best)
    least = 1 / rate * (100 + 100 * d**1.5 / limits.population)
    patience = int(min(max(least, 0.2 * generations), 20000))
    poor = generations > patience and all(
        _no_better(values[-patience:]) for values in (progress.best, progress.median)
    )
    return "stagnation" if poor else None


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


Schedule = Callable[[Start, int, Rng], "Start | None"]
"""``schedule(ended, evals, rng)``: how a run began and what it used; returns how the next begins,
``None`` to stop.
"""


@dataclass
class Restarts:
    """Populations double (Auger and Hansen, 2005), perhaps with small runs in between (Hansen,
    2009).
    """

    bipop: bool = False  # whether to make small runs while they have used less than the large ones
    first: int = 0  # population of the first run, once that is over
    doublings: int = 0  # how often the population has doubled
    large_evals: int = 0  # evaluations of the runs with growing populations
    small_evals: int = 0  # evaluations of the others
    last_large: int = 0  # evaluations of the last run with a growing population

    def __call__(self, ended: Start, evals: int, rng: Rng) -> Start:
        """Return the next start; see ``Schedule``."""
        self.first = self.first or ended.population
        if ended.large:
            self.large_evals += evals
            self.last_large = evals
        else:
            self.small_evals += evals
        # The first two runs are large: nothing is there yet for others to be smaller than.
        if self.bipop and self.doublings > 0 and self.small_evals < self.large_evals:
            ratio = 2**self.doublings / 2
            population = int(self.first * ratio ** (rng.uniform() ** 2))
            width = 10 ** (-2 * rng.uniform())
            return Start(even(population), width, max(1, self.last_large // 2), large=False)
        self.doublings += 1
        return Start(self.first * 2**self.doublings)


@dataclass
class Tally:
    """What descents and runs have used and reached, which tells what to do next."""

    tolfun: float  # values that differ by less are equal
    descents: int = 0  # evaluations of all descents
    runs: int = 0  # evaluations of all runs
    last_run: int = 0  # evaluations of the last run
    lowest: float = math.inf  # least value at which descents have ended
    best: float = math.inf  # least value of runs

    @property
    def descend(self) -> bool:
        """Whether to descend from elsewhere: as long as it finds lower minima, and has used less
        than runs have.
        """
        return (
            math.isfinite(self.lowest)
            and self.descents < self.runs
            and self.lowest <= self.best + self.tolfun
        )


SCHEDULES: Mapping[str, Schedule] = {"ipop": Restarts(), "bipop": Restarts(bipop=True)}


def find_schedule(restarts: str | Schedule | None) -> Schedule | None:
    """Return a copy of a schedule, given by its name or itself: it remembers what it has seen."""
    return None if restarts is None else deepcopy(choose(restarts, SCHEDULES, "restarts"))
