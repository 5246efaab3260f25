"""A sampler for Optuna: ``create_study(sampler=SpectralSampler(seed=0))``."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eigenstep.core.numpy_twin import Array
from eigenstep.core.progress import require
from eigenstep.search.search import Search

optuna = require("optuna", "optuna")
BaseSampler: Any = optuna.samplers.BaseSampler
Float = optuna.distributions.FloatDistribution
Int = optuna.distributions.IntDistribution
Categorical = optuna.distributions.CategoricalDistribution
WIDTH = 1 / 6  # First standard deviation of a parameter, relative to its range


class SpectralSampler(BaseSampler):  # type: ignore[misc]
    """Search over all parameters together; categories alone are sampled at random.

    The search lives in the sampler, so all trials must be run from one process, with as many
    threads (``n_jobs``) or remote workers as you like. Trials that fail or are pruned count as
    worse than all others.
    """

    def __init__(self, *, seed: int | None = None, startup: int = 1, **options: Any) -> None:
        """Choose the options of the search.

        Args:
            seed: the same seed gives the same trials, if they are run one after the other.
            startup: trials at random at the beginning; the search starts at the best of them, or of
                all that the study has. If there is only one, it starts in the middle of the space.
            **options: arguments of ``eigenstep.search.Search``, such as ``population`` or
                ``method``.
        """
        self._seed = seed
        self._startup = max(1, startup)
        self._options = {"max_evals": 10**9, **options}
        self._independent = optuna.samplers.RandomSampler(seed=seed)
        self._spaces = optuna.search_space.IntersectionSearchSpace()
        self._axes: dict[str, Axis] = {}
        self._search: Search | None = None
        self._queue: list[Array] = []
        self._running: dict[int, Array] = {}
        self._done: list[tuple[Array, float]] = []
        self._lock = threading.Lock()

    def reseed_rng(self) -> None:
        """Do nothing to the search, which all threads share."""
        self._independent.reseed_rng()

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        """Return what all trials have in common, if there are numbers among them."""
        common = {name: d for name, d in self._spaces.calculate(study).items() if not d.single()}
        return common if any(isinstance(d, (Float, Int)) for d in common.values()) else {}

    def sample_relative(
        self, study: Any, trial: Any, search_space: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the next point of the search, as parameters."""
        complete = study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])
        if not search_space or len(complete) < self._startup:
            return {}
        with self._lock:
            if {name: axis.distribution for name, axis in self._axes.items()} != dict(search_space):
                self._restart(study, complete, search_space)
            assert self._search is not None
            if not self._queue:
                # More trials at once than the population has points: ask for more, from the same
                # distribution.
                self._queue = list(self._search.ask())
            point = self._queue.pop(0)
            self._running[trial.number] = point
            return {
                name: axis.decode(u)
                for (name, axis), u in zip(self._axes.items(), point, strict=True)
            }

    def sample_independent(
        self, study: Any, trial: Any, param_name: str, param_distribution: Any
    ) -> Any:
        """Return a random value for what the search does not know."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: Any, trial: Any, state: Any, values: Sequence[float] | None
    ) -> None:
        """Give the search the value of a trial, once a whole population is there."""
        with self._lock:
            point = self._running.pop(trial.number, None)
            if point is None or self._search is None:
                return
            sign = -1.0 if study.direction == optuna.study.StudyDirection.MAXIMIZE else 1.0
            complete = state == optuna.trial.TrialState.COMPLETE and values is not None
            self._done.append(
                (point, sign * values[0] if complete and values is not None else math.nan)
            )
            if len(self._done) >= self._search.population:
                points, told = zip(*self._done, strict=True)
                self._search.tell(np.array(points), told)
                self._done, self._queue = [], []

    def _restart(
        self, study: Any, complete: Sequence[Any], search_space: Mapping[str, Any]
    ) -> None:
        """Search in another space, from the best trial so far or from the middle."""
        self._axes = {name: Axis(distribution) for name, distribution in search_space.items()}
        sign = -1.0 if study.direction == optuna.study.StudyDirection.MAXIMIZE else 1.0
        known = [trial for trial in complete if all(name in trial.params for name in self._axes)]
        best = min(known, key=lambda trial: sign * trial.value).params if len(known) > 1 else None
        axes = self._axes.values()
        start = [
            axis.middle if best is None else axis.encode(best[name])
            for name, axis in self._axes.items()
        ]
        self._search = Search(
            np.array(start),
            np.array([WIDTH * (axis.upper - axis.lower) for axis in axes]),
            bounds=[(axis.lower, axis.upper) for axis in axes],
            integers=np.array([axis.whole for axis in axes]),
            categories={number: axis.values for number, axis in enumerate(axes) if axis.values},
            seed=self._seed,
            **self._options,
        )
        self._queue = []
        self._running = {}
        self._done = []


class Axis:
    """One parameter as a coordinate: numbered steps and categories, logarithms."""

    def __init__(self, distribution: Any) -> None:
        """Read an optuna distribution."""
        self.distribution = distribution
        self.values = len(distribution.choices) if isinstance(distribution, Categorical) else 0
        if self.values:
            self.whole = True
            self.lower = 0.0
            self.upper = self.values - 1.0
            return
        low, high, step = distribution.low, distribution.high, distribution.step
        self.whole = step is not None and not distribution.log
        if distribution.log:
            margin = 0.5 if isinstance(distribution, Int) else 0.0
            self.lower = math.log(low - margin)
            self.upper = math.log(high + margin)
        elif self.whole:
            self.lower = 0.0
            self.upper = float(round((high - low) / step))
        else:
            self.lower, self.upper = float(low), float(high)

    @property
    def middle(self) -> float:
        """The coordinate in the middle, rounded down if it has to be an integer."""
        middle = (self.lower + self.upper) / 2
        return float(math.floor(middle)) if self.whole else middle

    def encode(self, value: Any) -> float:
        """Return the coordinate of a parameter's value."""
        if self.values:
            return float(self.distribution.to_internal_repr(value))
        if self.distribution.log:
            return min(max(math.log(value), self.lower), self.upper)
        return (
            float(round((value - self.distribution.low) / self.distribution.step))
            if self.whole
            else float(value)
        )

    def decode(self, u: float) -> Any:
        """Return the parameter's value at a coordinate."""
        d = self.distribution
        if self.values:
            return d.choices[int(u)]
        value = math.exp(u) if d.log else d.low + u * d.step if self.whole else float(u)
        value = min(max(value, d.low), d.high)
        return round(value) if isinstance(d, Int) else float(value)
