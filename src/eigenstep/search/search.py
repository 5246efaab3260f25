"""The search itself: ask for points, tell their values, look whether to stop."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.numpy_twin import Array
from . import saved
from .choice import Choice
from .descent import Descent
from .domain import (
    Domain,
    Form,
    Point,
    check_options,
    check_population,
    check_start,
    read_sigma,
    read_vector,
    to_numpy,
)
from .history import Asked, History
from .runs import Progress, Schedule, Start, Tally, find_schedule, known_reason
from .sampling import Reevaluation, default_population, even, sanitize
from .spectral import Begin, Distribution

LONGEST_INJECTION = (
    2.0  # Other points count as if at most this many times as far away as samples usually are
)
FAILED_RESTARTS = 3  # Restarts elsewhere as long as no evaluation has given a finite value


class Search:
    """Minimize a function of which only values are known, by asking for points and telling their
    values.

    >>> search = Search([1.0, 2.0, 3.0], 0.5, seed=0, target=1e-10)
    >>> while not search.stop():
    ...     points = search.ask()
    ...     search.tell(points, [float((p**2).sum()) for p in points])
    >>> search.stop()
    'target'
    """

    def __init__(
        self,
        x0: Point | Callable[[np.random.Generator], Point],
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
                (``eigenstep.search.runs.Schedule``). Few where no value is finite.
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
        numbers: Any = {
            "tolfun": (tolfun, 0.0),
            "tolx": (tolx, 0.0),
            "max_seconds": (max_seconds, 0.0),
        }
        sizes = {"max_evals": max_evals, "max_iter": max_iter, "max_restarts": max_restarts}
        check_options(sizes=sizes, numbers={**numbers, "target": (target, -np.inf)})
        check_population(population)
        self._rng = np.random.default_rng(seed)
        self._x0 = x0 if callable(x0) else None
        first = x0(self._rng) if callable(x0) else x0
        self._form = Form(first)
        start = read_vector(first, "x0")
        d = len(start)
        sigma, scale = read_sigma(sigma0, d)
        self._domain = Domain.build(scale, bounds, integers, sigma, self._form, categories)  # type: ignore[arg-type]
        if not self._domain.contains(start):
            raise ValueError("x0 must be within the bounds")
        check_start(start, sigma * scale, tolx, self._form)
        self._start, self._sigma0 = start, sigma
        self.max_evals, self._max_iter = 10_000 * d if max_evals is None else max_evals, max_iter
        self._max_seconds, self._max_restarts, self.target = max_seconds, max_restarts, target
        self._tolfun, self._tolx = tolfun, tolx
        self._present = Start(even(default_population(d)) if population is None else population)
        self._tally, self._used = Tally(tolfun), 0
        told: Any = {
            "exact": self._form.exact,
            "noisy": noisy,
            "max_evals": self.max_evals,
            "tolfun": tolfun,
        }
        self._choice = Choice.make(method, self._domain, **told)
        self.decisions = list(self._choice.reasons)
        self._restarts = find_schedule(restarts)
        self.noise = Reevaluation(most=64 if self._choice.again else 1) if noisy else None
        self.evaluations = self.iterations = self.failures = self.restarts = 0
        self.best_x: Array | None = None
        self.best_fun = np.inf
        self.history = History()
        self._reason: str | None = None
        self._seconds = 0.0
        self._clock: float | None = None
        self._injected: list[Array] = []
        self._asked: Asked | None = None
        self._begin(start, self._choice.descend)

    def _begin(self, start: Array, begin: Begin | None = None) -> None:
        """Begin a run, the first or one after a restart; or the descent before it."""
        sigma = self._sigma0 * self._present.width
        self.distribution: Distribution = (begin or self._choice.begin)(
            self._domain.encode(start), sigma
        )
        self._progress = Progress(sigma, self._tolfun, self._tolx)
        self._run_start = self.evaluations
        self._asked = None

    def kinds(self) -> list[Distribution]:
        """Return an example of each kind of distribution that this search may have."""
        begins = [
            begin for begin in (self._choice.begin, self._choice.descend) if begin is not None
        ]
        return [begin(self._domain.encode(self._start), self._sigma0) for begin in begins]

    @property
    def descending(self) -> bool:
        """Whether the start for smooth functions is still under way."""
        return isinstance(self.distribution, Descent)

    @property
    def generations(self) -> int:
        """Generations of the present run, not counting the descent."""
        return len(self._progress.best)

    @property
    def run_evaluations(self) -> int:
        """Evaluations of the present run, or descent."""
        return self.evaluations - self._run_start

    @property
    def dimension(self) -> int:
        """Number of coordinates."""
        return len(self._start)

    @property
    def population(self) -> int:
        """Number of points in each generation of the present run."""
        return self._present.population

    @property
    def mean(self) -> Point:
        """Center of the distribution: the best guess if the function is noisy."""
        return self._form.make(self._domain.decode(self.distribution.mean))

    def repeat_mean(self, times: int) -> Point:
        """Return the center of the distribution several times, as rows, to have it evaluated."""
        return self._form.make(
            np.repeat(self._domain.decode(self.distribution.mean)[None], times, 0)
        )

    @property
    def sigma(self) -> float:
        """Step size: the typical distance of samples from the mean, in units of ``sigma0`` if that
        is a vector.
        """
        return float(self.distribution.sigma)

    @property
    def best(self) -> Point | None:
        """The best point so far."""
        return None if self.best_x is None else self._form.make(self.best_x)

    def inject(self, points: Point) -> None:
        """Propose a point of your own, or several as rows, which the next ``ask`` will return among
        its points.
        """
        rows = np.atleast_2d(to_numpy(points)).copy()
        self._check_points(rows)
        self._injected.extend(rows)

    def ask(self) -> Point:
        """Return the points to evaluate next, as rows; with ``noisy=True`` some or all more than
        once.
        """
        left = self.max_evals - self._reserved() - self.evaluations
        # Whoever goes on after the end may do so
        left = max(left, 1) if self._reason is None else 10**18
        plan = None if self.noise is None else self.noise.plan(self.population, left)
        population = min(getattr(self.distribution, "points", self.population), left)
        z = self.distribution.draw(self._rng, population)
        x = self._domain.decode(self.distribution.sample(z, self._stretch()))
        for row in range(min(len(self._injected), population)):
            x[-1 - row] = self._injected.pop(0)
            z[-1 - row] = np.nan  # computed by `tell`
        # As the user will give it back, rounded to his number format
        x = to_numpy(self._form.make(x))
        self._asked = Asked(x, z, plan)
        if self._clock is None:
            self._clock = time.monotonic()
        return self._form.make(self._asked.points)

    def tell(self, points: Point, values: object) -> None:
        """Learn from points and their values.

        Args: points: what ``ask`` returned, in any order; or points of your own, at least two.
            values: one for each point. What is not a finite number counts as a failure: worse than
            all others.
        """
        x, told = self._read(points, values)
        asked = self._asked
        if len(x) < 2 and (asked is None or not np.array_equal(x, asked.points)):
            raise ValueError(
                f"tell needs one value for each of at least two points, got {len(told)} for "
                f"{len(x)}"
            )
        self._count(told)
        if asked is not None and asked.plan is not None and np.array_equal(x, asked.points):
            assert self.noise is not None
            x, told = asked.x, self.noise.average(asked.plan, told)
        told = sanitize(told)
        self._keep_best(x, told)
        if len(x) > 1 or self.descending:
            self._learn(x, told)
        self.iterations += 1
        self._asked = None
        if not self.descending:
            self._progress.add(told)
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
        if (
            self._reason is None
            and self._max_seconds is not None
            and self.seconds >= self._max_seconds
        ):
            self._reason = "max_seconds"
        return self._reason

    def end(self, reason: str = "callback") -> None:
        """Stop the search for a reason of your own."""
        self._reason = known_reason(reason)

    @property
    def seconds(self) -> float:
        """Time since the first ``ask``, without the time between saving and loading the state."""
        return self._seconds + (0.0 if self._clock is None else time.monotonic() - self._clock)

    def _stretch(self) -> Array | None:
        return (
            self._domain.stretch(self.distribution.deviations(), self.population)
            if self._domain.whole
            else None
        )

    def _reserved(self) -> int:
        # For the answer, which has to be evaluated anew
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

    def _count(self, told: Array) -> None:
        self.evaluations += len(told)
        self.failures += int(len(told) - np.isfinite(told).sum())

    def _keep_best(self, x: Array, told: Array) -> None:
        least = int(told.argmin())
        if told[least] < self.best_fun:
            self.best_fun, self.best_x = float(told[least]), x[least].copy()

    def _learn(self, x: Array, told: Array) -> None:
        stretch = self._stretch()
        self.distribution = self.distribution.update(self._whitened(x, stretch), told, stretch)
        if self._domain.bounded:
            self.distribution = self.distribution.reflected(
                *self._domain.fold(self.distribution.mean)
            )

    def _whitened(self, x: Array, stretch: Array | None) -> Array:
        """Return the ``z`` of points: those they were made of, or, for other points, shortened
        ones.
        """
        found = np.full(x.shape, np.nan) if self._asked is None else self._asked.sources(x)
        own = np.isnan(found).any(-1)
        if own.any():
            whitened = self.distribution.whiten(self._domain.encode(x[own]), stretch)
            length = np.sqrt((whitened * whitened).sum(-1, keepdims=True))
            longest = LONGEST_INJECTION * self.dimension**0.5
            found[own] = whitened * np.minimum(1.0, longest / np.maximum(length, 1e-300))
            chosen = np.array(list(self._domain.categories), dtype=np.int64)
            found[np.ix_(own, chosen)] = whitened[:, chosen]
        return found

    def _record(self, values: Array) -> None:
        history = self.history
        if history.due:
            axes = np.sort(self.distribution.axes())
            history.add(
                nfev=self.evaluations,
                fun=float(values.min()),
                best=self.best_fun,
                median=float(np.sort(values)[(len(values) - 1) // 2]),
                sigma=self.sigma,
                ratio=float(axes[-1] / axes[0]),
                axes=axes,
                mean=self._domain.decode(self.distribution.mean),
                deviations=self.distribution.deviations() * self._domain.scale,
                population=len(values),
                run=self.restarts,
            )
        history.seen += 1

    def _look(self) -> None:
        """Set the reason to stop, or restart, if it is time to."""
        if self.target is not None and self.best_fun <= self.target:
            self._reason = "target"
        elif self.evaluations >= self.max_evals - self._reserved():
            self._reason = "max_evals"
        elif self._max_iter is not None and self.iterations >= self._max_iter:
            self._reason = "max_iter"
        else:
            self._look_at_run()

    def _look_at_run(self) -> None:
        used, descent = self.run_evaluations, self.distribution
        if isinstance(descent, Descent):
            if descent.over is None:
                return
            reason: str | None = "tolfun"
            self._end_descent(descent, used)
            if not self._tally.runs:
                return
        else:
            reason = self._progress.reason(self.distribution, self.population, self._domain.scale)
            limit = self._present.max_evals
            if reason is None and (limit is None or used < limit):
                return
            self._tally.runs, self._used = self._tally.runs + used, used
            self._tally.best = min(self._tally.best, *self._progress.best)
        most = self._max_restarts
        if (
            reason == "failed" and self.best is None
        ):  # again at the same point it would be no better, elsewhere it may
            few = FAILED_RESTARTS if self._x0 is not None or self._domain.boxed else 0
            most = few if most is None else min(most, few)
        if self._restarts is None or (most is not None and self.restarts >= most):
            self._reason = reason or "max_evals"
        elif self._tally.descend:
            self.restarts += 1
            self._begin(self._new_start(), self._choice.descend)
        else:
            self._follow(self._restarts(self._present, self._used, self._rng), reason)

    def _follow(self, following: Start | None, reason: str | None) -> None:
        """Begin the run that the schedule wants, or end."""
        if following is None:
            self._reason = reason or "max_evals"
            return
        if not isinstance(following, Start):
            raise TypeError(f"restarts must return a Start or None, got {type(following).__name__}")
        self._present = following
        self.restarts += 1
        self._begin(self._new_start())

    def _end_descent(self, descent: Descent, used: int) -> None:
        """Take note of a descent; after the first one begin the search, if that has found a minimum
        where it began.
        """
        found = descent.over == "converged"
        self._tally.descents += used
        self._tally.found = min(self._tally.found, descent.value if found else np.inf)
        where = (
            f"found a minimum, {descent.value:.6g}," if found else f"gave up at {descent.value:.6g}"
        )
        self.decisions.append(f"the descent {where} after {used} evaluations")
        if not self._tally.runs:
            self._begin(self._domain.decode(descent.start if found else descent.mean))

    def _new_start(self) -> Array:
        if self._x0 is not None:
            start = read_vector(self._x0(self._rng), "x0(generator)")
            self._check_points(start[None])
            return start
        return self._domain.random(self._rng) if self._domain.boxed else self._start

    def _check_points(self, rows: Array) -> None:
        if rows.ndim != 2 or rows.shape[1] != self.dimension:
            raise ValueError(
                f"points must have {self.dimension} coordinates each, got shape {rows.shape}"
            )
        if not np.isfinite(rows).all():
            raise ValueError("points must be finite")
        if self._domain.bounded and not self._domain.contains(rows):
            raise ValueError("points must be within the bounds")

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes during a search, as plain arrays and numbers."""
        return saved.save(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another search, started with the same arguments, was when its ``state_dict``
        was taken.
        """
        saved.load(self, state)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle with the time spent so far in place of the running clock."""
        return {**self.__dict__, "_seconds": self.seconds, "_clock": None}
