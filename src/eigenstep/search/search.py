"""The search itself: ask for points, tell their values, look whether to stop.

A search is a sequence of phases, which ask and tell, too: runs of a distribution, from a start to
its end, and before some of them a descent. Phases work in coordinates without bounds.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.numpy_twin import Array
from .arguments import (
    check_options,
    check_population,
    check_start,
    read_sigma,
    read_space,
    read_vector,
)
from .choice import choose_method
from .descent import Descent
from .distribution import Distribution
from .record import Asked, History, Progress, entries, restore, save
from .sampling import Reevaluation, default_population, even
from .space import Form, Integers, Mask, Point, Rng, Space, sanitize, to_numpy
from .stopping import Limits, Schedule, Start, Tally, find_schedule, known_reason, why_over

LONGEST_INJECTION = 2.0  # Injected points count as at most this many times as far as samples
FAILED_RESTARTS = 3  # Restarts elsewhere as long as no evaluation has given a finite value


@dataclass
class Run:
    """One run of a distribution, from its start to its end."""

    space: Space = field(metadata={"constant": True})
    start: Start
    distribution: Distribution
    z: Array | None = None  # what the points that it has asked for are made of
    progress: Progress = field(default_factory=Progress)

    @property
    def _stretch(self) -> Array | None:
        if not self.space.whole:
            return None
        return self.space.stretch(self.distribution.deviations(), self.start.population)

    def ask(self, rng: Rng, most: int) -> Array:
        """Return a generation of points, as rows, but not more than ``most``."""
        self.z = self.distribution.draw(rng, min(self.start.population, most))
        return self.distribution.sample(self.z, self._stretch)

    def tell(self, u: Array, rows: Integers, values: Array) -> None:
        """Learn from points ``u``: their places among those that were asked for, -1 for others, and
        values.
        """
        if len(values) > 1:
            stretch = self._stretch
            z = np.empty(u.shape) if self.z is None else self.z[rows]
            others = rows < 0
            if others.any():
                z[others] = self._shortened(self.distribution.whiten(u[others], stretch))
            self.distribution = self.distribution.update(z, values, stretch)
        self.progress.add(values)

    def _shortened(self, z: Array) -> Array:
        """Return points of the user's own, but none much longer than samples; categories stay."""
        lengths = np.sqrt((z * z).sum(-1, keepdims=True))
        longest = LONGEST_INJECTION * z.shape[-1] ** 0.5
        shortened = z * np.minimum(1.0, longest / np.maximum(lengths, 1e-300))
        categories = list(self.space.categories)
        shortened[:, categories] = z[:, categories]
        return shortened

    def reflect(self, mean: Array, flipped: Mask) -> None:
        """Become the mirror image with another mean and some coordinates ``flipped``."""
        self.distribution = self.distribution.reflected(mean, flipped)


@dataclass(init=False, eq=False, repr=False)
class Search:
    """Minimize a function of which only values are known, by asking for points and telling their
    values.

    Its fields are what changes during a search, and what ``state_dict`` saves.

    >>> search = Search([1.0, 2.0, 3.0], 0.5, seed=0, target=1e-10)
    >>> while not search.stop():
    ...     points = search.ask()
    ...     search.tell(points, [float((p**2).sum()) for p in points])
    >>> search.stop()
    'target'
    """

    rng: Rng
    run: Run  # the present run; during a descent, the one that would begin where that has begun
    descent: Descent | None  # the present descent, if there is one
    schedule: Schedule | None  # how restarts go on
    tally: Tally
    noise: Reevaluation | None
    history: History
    asked: Asked
    injected: list[Array]  # points that wait to be asked for
    decisions: list[str]  # how it searches, and why, in sentences
    evaluations: int = 0
    iterations: int = 0
    failures: int = 0
    restarts: int = 0
    began: int = 0  # evaluations before the present run or descent
    best_x: Array | None = None
    best_fun: float = np.inf
    reason: str | None = None  # why it is over
    spent: float = 0.0  # seconds until it was saved

    def __init__(  # noqa: PLR0913
        self,
        x0: Point | Callable[[Rng], Point],
        sigma0: float | Point,
        *,
        method: str | Callable[[Array, float], Distribution] = "spectral",
        population: int | None = None,
        bounds: object = None,
        integers: object = None,
        categories: Mapping[int, int] | None = None,
        restarts: str | Schedule | None = None,
        noisy: bool = False,
        seed: int | None = None,
        target: float | None = None,
        max_evals: int | None = None,
        max_iter: int | None = None,
        max_seconds: float | None = None,
        max_restarts: int | None = None,
        tolfun: float = 1e-11,
        tolx: float = 1e-11,
    ) -> None:
        """Start a search.

        Args:
            x0: where to start, a vector; points have its type (numpy or torch, with device and
                dtype). Or a function of a numpy generator that returns a new start for each
                restart.
            sigma0: how far from ``x0`` to look at first, one standard deviation or one for each
                coordinate: a third of the distance to where the minimum might be.
            method: "spectral" sees only the order of values and learns all correlations,
                "separable" learns scales alone, "lowrank" also a few directions, "cautious" is for
                noise; "auto", the default of ``minimize``, is one of them after a descent where
                values may be smooth. Or a function ``method(mean, sigma)`` that returns a
                ``Distribution``, or a class with such a ``start``.
            population: points in each generation, more to search more globally; by default
                ``4 + 3 log d``, made even.
            bounds: ``(lower, upper)``, numbers or vectors or ``None``, or one such pair for each
                coordinate.
            integers: indices of coordinates that must be integers.
            categories: indices of coordinates that are categories without order, and how many
                values each has: these are 0, 1 and so on. At first all are equally likely, whatever
                ``x0`` says.
            restarts: what to do at a local minimum: stop (``None``); start again with twice the
                population ("ipop"); or do so alternately with small, narrow runs ("bipop"), at
                random points if all coordinates have bounds, else at ``x0``. Or a function
                (``eigenstep.search.stopping.Schedule``). Few where no value is finite.
            noisy: the function gives other values each time: evaluate again, or learn less of each
                value ("cautious").
            seed: the same seed gives the same search.
            target: stop at this value.
            max_evals: stop after so many evaluations, by default 10,000 times the dimension.
            max_iter: stop after so many generations.
            max_seconds: stop after this time.
            max_restarts: stop after so many restarts; any number by default.
            tolfun: a run ends where values differ by less than this.
            tolx: a run ends where all standard deviations are smaller than this.
        """
        check_options(
            sizes={"max_evals": max_evals, "max_iter": max_iter, "max_restarts": max_restarts},
            numbers={
                "tolfun": (tolfun, 0.0),
                "tolx": (tolx, 0.0),
                "max_seconds": (max_seconds, 0.0),
                "target": (target, -np.inf),
            },
        )
        check_population(population)
        self.rng = np.random.default_rng(seed)
        self._x0 = x0 if callable(x0) else None
        first = x0(self.rng) if callable(x0) else x0
        self._form = Form(first)
        self._start = read_vector(first, "x0")
        d = len(self._start)
        self._sigma0, scale = read_sigma(sigma0, d)
        self._space = read_space(
            scale, bounds, integers, categories, sigma=self._sigma0, form=self._form
        )
        if not self._space.contains(self._start):
            raise ValueError("x0 must be within the bounds")
        check_start(self._start, self._sigma0 * scale, tolx, self._form)
        self.target = target
        self.max_evals = 10_000 * d if max_evals is None else max_evals
        self._max_iter = max_iter
        self._max_seconds = max_seconds
        self._max_restarts = max_restarts
        self._tolfun = tolfun
        self._tolx = tolx
        self._choice = choose_method(
            method,
            self._space,
            exact=self._form.exact,
            noisy=noisy,
            max_evals=self.max_evals,
            tolfun=tolfun,
        )
        self.decisions = list(self._choice.reasons)
        self.schedule = find_schedule(restarts)
        self.noise = Reevaluation(most=64 if self._choice.again else 1) if noisy else None
        self.tally = Tally(tolfun)
        self.history = History()
        self.injected = []
        self._clock: float | None = None
        population = even(default_population(d)) if population is None else population
        self._begin(self._start, Start(population), descend=True)

    def _begin(self, x: Array, start: Start, descend: bool = False) -> None:
        """Begin a run, the first or one after a restart; or the descent before it."""
        u = self._space.encode(x)
        sigma = self._sigma0 * start.width
        self.run = Run(self._space, start, self._choice.begin(u, sigma))
        self.descent = None
        if descend and self._choice.descend is not None:
            self.descent = self._choice.descend(u, sigma)
        self.began = self.evaluations
        self.asked = Asked()

    @property
    def phase(self) -> Descent | Run:
        """What asks for points now."""
        return self.descent or self.run

    @property
    def _center(self) -> Descent | Distribution:
        return self.descent or self.run.distribution

    @property
    def distribution(self) -> Distribution:
        """The distribution of the present run."""
        return self.run.distribution

    @property
    def descending(self) -> bool:
        """Whether the start for smooth functions is still under way."""
        return self.descent is not None

    @property
    def generations(self) -> int:
        """Generations of the present run, not counting the descent."""
        return len(self.run.progress.best)

    @property
    def run_evaluations(self) -> int:
        """Evaluations of the present run, or descent."""
        return self.evaluations - self.began

    @property
    def dimension(self) -> int:
        """Number of coordinates."""
        return len(self._start)

    @property
    def population(self) -> int:
        """Number of points in each generation of the present run."""
        return self.run.start.population

    @property
    def mean(self) -> Point:
        """Center of the distribution: the best guess if the function is noisy."""
        return self._form.make(self._space.decode(self._center.mean))

    @property
    def sigma(self) -> float:
        """Step size: the typical distance of samples from the mean, in units of ``sigma0`` if that
        is a vector.
        """
        return float(self._center.sigma)

    @property
    def best(self) -> Point | None:
        """The best point so far."""
        return None if self.best_x is None else self._form.make(self.best_x)

    @property
    def seconds(self) -> float:
        """Time since the first ``ask``, without the time between saving and loading the state."""
        return self.spent + (0.0 if self._clock is None else time.monotonic() - self._clock)

    def repeat_mean(self, times: int) -> Point:
        """Return the center of the distribution several times, as rows, to have it evaluated."""
        mean = self._space.decode(self._center.mean)
        return self._form.make(np.repeat(mean[None], times, 0))

    def inject(self, points: Point) -> None:
        """Propose a point of your own, or several as rows, which the next ``ask`` will return among
        its points.
        """
        rows = np.atleast_2d(to_numpy(points)).copy()
        self._check_points(rows)
        self.injected.extend(rows)

    def ask(self) -> Point:
        """Return the points to evaluate next, as rows; with ``noisy=True`` some or all more than
        once.
        """
        left = self.max_evals - self._reserved - self.evaluations
        # After the end, whoever wants to may go on.
        left = max(left, 1) if self.reason is None else 10**18
        plan = None if self.noise is None else self.noise.plan(self.population, left)
        x = self._space.decode(self.phase.ask(self.rng, left))
        injected = self.injected[: len(x)]
        for row, point in enumerate(injected):
            x[-1 - row] = point
        self.injected = self.injected[len(injected) :]
        # As the user will give them back, rounded to his number format.
        x = to_numpy(self._form.make(x))
        self.asked = Asked(x, len(x) - len(injected), plan)
        if self._clock is None:
            self._clock = time.monotonic()
        return self._form.make(self.asked.points)

    def tell(self, points: Point, values: object) -> None:
        """Learn from points and their values.

        Args:
            points: what ``ask`` returned, in any order; or points of your own, at least two.
            values: one for each point. What is not a finite number counts as a failure: worse than
                all others.
        """
        x, told = self._read(points, values)
        in_order = self.asked.is_told(x)
        if len(x) < 2 and not in_order:
            raise ValueError(
                f"tell needs one value for each of at least two points, got {len(told)} for "
                f"{len(x)}"
            )
        self._count(told)
        if in_order and self.asked.x is not None:
            x = self.asked.x
            if self.noise is not None and self.asked.plan is not None:
                told = self.noise.average(self.asked.plan, told)
        told = sanitize(told)
        self._keep_best(x, told)
        self._learn(x, told)
        self.iterations += 1
        self.asked = Asked()
        self._record(told)
        self._look()

    def see(self, points: Point, values: object) -> None:
        """Take note of values without learning from them; arguments as for ``tell``, but any number
        of points.
        """
        if len(points):
            x, told = self._read(points, values)
            self._count(told)
            if self.noise is None:
                self._keep_best(x, sanitize(told))

    def stop(self) -> str | None:
        """Return why the search is over, one of ``eigenstep.search.REASONS``, or ``None`` while it
        goes on.
        """
        limit = self._max_seconds
        if self.reason is None and limit is not None and self.seconds >= limit:
            self.reason = "max_seconds"
        return self.reason

    def end(self, reason: str = "callback") -> None:
        """Stop the search for a reason of your own."""
        self.reason = known_reason(reason)

    @property
    def _reserved(self) -> int:
        # For the answer, which has to be evaluated anew.
        return 0 if self.noise is None else self.noise.final

    def _read(self, points: Point, values: object) -> tuple[Array, Array]:
        x = np.atleast_2d(to_numpy(points))
        told = to_numpy(values).reshape(-1)
        self._check_points(x)
        if len(told) != len(x):
            raise ValueError(
                f"tell needs one value for each of the points, got {len(told)} for {len(x)}"
            )
        return x, told

    def _check_points(self, rows: Array) -> None:
        if rows.ndim != 2 or rows.shape[1] != self.dimension:
            raise ValueError(
                f"points must have {self.dimension} coordinates each, got shape {rows.shape}"
            )
        if not np.isfinite(rows).all():
            raise ValueError("points must be finite")
        if self._space.bounded and not self._space.contains(rows):
            raise ValueError("points must be within the bounds")

    def _count(self, told: Array) -> None:
        self.evaluations += len(told)
        self.failures += int(len(told) - np.isfinite(told).sum())

    def _keep_best(self, x: Array, told: Array) -> None:
        least = int(told.argmin())
        if told[least] < self.best_fun:
            self.best_fun = float(told[least])
            self.best_x = x[least].copy()

    def _learn(self, x: Array, told: Array) -> None:
        self.phase.tell(self._space.encode(x), self.asked.rows(x), told)
        if self._space.bounded:
            self.phase.reflect(*self._space.fold(self._center.mean))

    def _record(self, values: Array) -> None:
        history = self.history
        if history.due:
            axes = np.sort(self._center.axes())
            history.add(
                nfev=self.evaluations,
                fun=float(values.min()),
                best=self.best_fun,
                median=float(np.sort(values)[(len(values) - 1) // 2]),
                sigma=self.sigma,
                ratio=float(axes[-1] / axes[0]),
                axes=axes,
                mean=self._space.decode(self._center.mean),
                deviations=self._center.deviations() * self._space.scale,
                population=len(values),
                run=self.restarts,
            )
        history.seen += 1

    def _look(self) -> None:
        """Set the reason to stop, or restart, if it is time to."""
        if self.target is not None and self.best_fun <= self.target:
            self.reason = "target"
        elif self.evaluations >= self.max_evals - self._reserved:
            self.reason = "max_evals"
        elif self._max_iter is not None and self.iterations >= self._max_iter:
            self.reason = "max_iter"
        elif self.descent is None:
            self._look_at_run()
        elif self.descent.over:
            self._end_descent(self.descent)

    def _look_at_run(self) -> None:
        """End the run if it is over, or has used up its evaluations."""
        reason = None
        start = self.run.start
        if self.run.progress.due:
            axis = self._sigma0 * start.width
            scale = self._space.scale
            limits = Limits(axis, self._tolfun, self._tolx, start.population, scale)
            reason = why_over(self.run.progress, self.distribution, limits)
        used = self.run_evaluations
        if reason is not None or (start.max_evals is not None and used >= start.max_evals):
            self.tally.last_run = used
            self.tally.runs += used
            self.tally.best = min(self.tally.best, *self.run.progress.best)
            self._restart(reason)

    def _end_descent(self, descent: Descent) -> None:
        """Take note of a descent; after the first one begin the search."""
        used = self.run_evaluations
        self.tally.descents += used
        what = f"gave up at {descent.value:.6g}"
        if descent.over == "converged":
            self.tally.lowest = min(self.tally.lowest, descent.value)
            what = f"found a minimum, {descent.value:.6g},"
        self.decisions.append(f"the descent {what} after {used} evaluations")
        if self.tally.runs:
            self._restart("tolfun")
        else:
            self._begin(self._space.decode(descent.outcome), self.run.start)

    def _restart(self, reason: str | None) -> None:
        """Begin what follows a run or a descent, or end for a reason."""
        following = None
        descend = self.tally.descend
        if self.schedule is not None and self._may_restart(reason):
            following = self.run.start
            if not descend:
                following = self.schedule(following, self.tally.last_run, self.rng)
        if following is None:
            self.reason = reason or "max_evals"
            return
        if not isinstance(following, Start):
            raise TypeError(f"restarts must return a Start or None, got {type(following).__name__}")
        self.restarts += 1
        self._begin(self._new_start(), following, descend)

    def _may_restart(self, reason: str | None) -> bool:
        most = np.inf if self._max_restarts is None else self._max_restarts
        if reason == "failed" and self.best_x is None:
            # The same point would be no better, another one may.
            elsewhere = self._x0 is not None or self._space.boxed
            most = min(most, FAILED_RESTARTS if elsewhere else 0)
        return self.restarts < most

    def _new_start(self) -> Array:
        if self._x0 is not None:
            start = read_vector(self._x0(self.rng), "x0(generator)")
            self._check_points(start[None])
            return start
        return self._space.random(self.rng) if self._space.boxed else self._start

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes during a search, as plain arrays and numbers."""
        return {**save(self), "spent": self.seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another search, started with the same arguments, was when its ``state_dict``
        was taken; or, with an error, stay as it is.
        """
        try:
            loaded = self._restored(state)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"the state is not one of a search, or is damaged ({error!r})"
            ) from error
        for name, value in loaded.items():
            setattr(self, name, value)
        self._clock = None

    def _restored(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that a state holds, each like that of a search that begins."""
        u = self._space.encode(self._start)
        likes = entries(self)
        likes["run"] = Run(self._space, Start(4), self._choice.begin(u, self._sigma0))
        likes["descent"] = None
        if state["descent"] is not None and self._choice.descend is not None:
            likes["descent"] = self._choice.descend(u, self._sigma0)
        likes["asked"] = Asked()
        likes["best_x"] = None if state["best_x"] is None else self._start
        likes["reason"] = None if state["reason"] is None else known_reason(state["reason"])
        return {name: restore(like, state[name], name) for name, like in likes.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle with the time spent so far in place of the running clock."""
        return {**self.__dict__, "spent": self.seconds, "_clock": None}
