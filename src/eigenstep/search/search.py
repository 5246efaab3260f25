"""The search itself: ask for points, tell their values, look whether to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.numpy_twin import Array
from .domain import Domain
from .evaluation import Point, to_numpy
from .history import History
from .inputs import Form, check_options, read_sigma, read_vector
from .nes import PaperNES
from .noise import Reevaluation
from .ranking import sanitize
from .rates import default_population
from .restarts import Restarts, Start, even
from .spectral import SpectralGaussian
from .stopping import REASONS, Progress

METHODS = ("spectral", "separable", "nes")
SCHEDULES = ("ipop", "bipop")
LONGEST_INJECTION = 2.0
"""Points that were not sampled count as if they were at most this many times as far away as samples usually are."""


class Search:
    """Minimize a function of which only values are known, by asking for points and telling their values.

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
        method: str = "spectral",
        population: int | None = None,
        bounds: object = None,
        integers: object = None,
        restarts: str | None = None,
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
            x0: where to start, a vector; points have its type (numpy or torch, with device and dtype). Or a function
                of a numpy generator that returns a start, for each restart a new one.
            sigma0: how far from ``x0`` to look at first, the standard deviation; one number, or one for each
                coordinate. A third of the distance to where the minimum might be is a good choice.
            method: "spectral" learns all correlations, with d^2 numbers. "separable" learns the scale of each
                coordinate with a few times d numbers: for thousands of coordinates. "nes" is the paper's strategy.
            population: points in each generation; by default ``4 + 3 log d``, rounded up to an even number, and twice
                as many for "nes". Larger ones search more globally.
            bounds: ``(lower, upper)``, numbers or vectors or ``None``, or one such pair for each coordinate.
            integers: indices of coordinates that must be integers.
            restarts: what to do at a local minimum: stop (``None``); start again with twice the population ("ipop"); or
                do so alternately with small, narrow runs ("bipop"). New starts are random in the bounds if all
                coordinates have some; else they are ``x0``.
            noisy: the function gives other values each time: evaluate again, as often as it takes.
            seed: the same seed gives the same search.
            target: stop at this value.
            max_evals: stop after so many evaluations; 10,000 times the dimension by default.
            max_iter: stop after so many generations.
            max_seconds: stop after this time.
            max_restarts: stop after so many restarts; any number by default.
            tolfun: a run ends where values differ by less than this.
            tolx: a run ends where all standard deviations are smaller than this.
        """
        check_options(
            choices={"method": (method, METHODS), "restarts": (restarts, (None, *SCHEDULES))},
            sizes={
                "population": population,
                "max_evals": max_evals,
                "max_iter": max_iter,
                "max_restarts": max_restarts,
            },
            numbers={
                "tolfun": (tolfun, 0.0),
                "tolx": (tolx, 0.0),
                "max_seconds": (max_seconds, 0.0),
                "target": (target, -np.inf),
            },
        )
        if population is not None and population < 4:
            raise ValueError(f"population must be at least 4, got {population}")
        self._rng = np.random.default_rng(seed)
        self._x0 = x0 if callable(x0) else None
        first = x0(self._rng) if callable(x0) else x0
        self._form = Form.of(first)
        start = read_vector(first, "x0")
        d = len(start)
        sigma, scale = read_sigma(sigma0, d)
        self._domain = Domain.build(scale, bounds, integers, sigma)  # type: ignore[arg-type]
        if not self._domain.contains(start):
            raise ValueError("x0 must be within the bounds")
        self._start, self._sigma0, self._method = start, sigma, method
        self.max_evals, self._max_iter = 10_000 * d if max_evals is None else max_evals, max_iter
        self._max_seconds, self._max_restarts, self.target = max_seconds, max_restarts, target
        self._tolfun, self._tolx = tolfun, tolx
        default = even(default_population(d)) if method != "nes" else 2 * default_population(d)
        self._present = Start(default if population is None else population)
        self._restarts = None if restarts is None else Restarts(restarts, self._present.population)
        self.noise = Reevaluation() if noisy else None

        self.evaluations = self.iterations = self.failures = self.restarts = 0
        self.best_x: Array | None = None
        self.best_fun = np.inf
        self.history = History()
        self._reason: str | None = None
        self._seconds = 0.0
        self._clock: float | None = None
        self._injected: list[Array] = []
        self._asked: tuple[Array, Array, NDArray[np.int64] | None] | None = None
        self._begin(start)

    def _begin(self, start: Array) -> None:
        """Begin a run, the first or one after a restart."""
        sigma = self._sigma0 * self._present.width
        mean = self._domain.encode(start)
        self.distribution: SpectralGaussian | PaperNES = (
            PaperNES.start(mean, sigma)
            if self._method == "nes"
            else SpectralGaussian.start(mean, sigma, separable=self._method == "separable")
        )
        self._progress = Progress(sigma, self._tolfun, self._tolx)
        self._run_start = self.evaluations
        self._asked = None

    # What can be looked at.

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
        return self._form.make(np.repeat(self._domain.decode(self.distribution.mean)[None], times, 0))

    @property
    def sigma(self) -> float:
        """Step size: the typical distance of samples from the mean, in units of ``sigma0`` if that is a vector."""
        return float(self.distribution.sigma)

    @property
    def best(self) -> Point | None:
        """The best point so far."""
        return None if self.best_x is None else self._form.make(self.best_x)

    # Ask, tell, stop.

    def inject(self, points: Point) -> None:
        """Propose points of your own, which the next :meth:`ask` will return among its points.

        Args:
            points: one point, or several as rows.
        """
        rows = np.atleast_2d(to_numpy(points))
        self._check_points(rows)
        self._injected.extend(rows)

    def ask(self) -> Point:
        """Return the points to evaluate next, as rows; with ``noisy=True`` some or all more than once."""
        distribution = self.distribution
        z = distribution.draw(self._rng, self.population)
        x = self._domain.decode(distribution.sample(z, self._stretch()))
        for row in range(min(len(self._injected), self.population)):
            x[-1 - row] = self._injected.pop(0)
            z[-1 - row] = np.nan  # computed by `tell`
        x = to_numpy(self._form.make(x))  # as the user will give it back, rounded to his number format
        plan = None if self.noise is None else self.noise.plan(self.population)
        self._asked = (x, z, plan)
        if self._clock is None:
            self._clock = time.monotonic()
        return self._form.make(x if plan is None else x[plan])

    def tell(self, points: Point, values: object) -> None:
        """Learn from points and their values.

        Args:
            points: what :meth:`ask` returned, in any order; or points of your own, at least two.
            values: one for each point. What is not a finite number counts as a failure: worse than all others.
        """
        x = np.atleast_2d(to_numpy(points))
        told = to_numpy(values).reshape(-1)
        self._check_points(x)
        if len(told) != len(x) or len(x) < 2:
            raise ValueError(f"tell needs one value for each of at least two points, got {len(told)} for {len(x)}")
        self.evaluations += len(x)
        self.failures += int(len(told) - np.isfinite(told).sum())
        if self._asked is not None and self._asked[2] is not None and np.array_equal(x, self._asked[0][self._asked[2]]):
            assert self.noise is not None
            x, told = self._asked[0], self.noise.average(self._asked[2], told)
        told = sanitize(told)
        stretch = self._stretch()
        z = self._whitened(x, stretch)
        updated = self.distribution.update(z, told, stretch)
        if self._domain.bounded:
            mean, flipped = self._domain.fold(updated.mean)
            updated = updated.reflected(mean, flipped)
        self.distribution = updated
        self.iterations += 1
        self._asked = None
        least = int(told.argmin())
        if told[least] < self.best_fun:
            self.best_fun, self.best_x = float(told[least]), x[least].copy()
        self._progress.add(told)
        self._record(told)
        self._look()

    def stop(self) -> str | None:
        """Return why the search is over, one of ``eigenstep.search.REASONS``, or ``None`` while it goes on."""
        if self._reason is None and self._max_seconds is not None and self.seconds >= self._max_seconds:
            self._reason = "max_seconds"
        return self._reason

    def end(self, reason: str = "callback") -> None:
        """Stop the search for a reason of your own."""
        if reason not in REASONS:
            raise ValueError(f"reason must be one of {', '.join(REASONS)}, got {reason!r}")
        self._reason = reason

    @property
    def seconds(self) -> float:
        """Time since the first :meth:`ask`, without the time between saving and loading the state."""
        return self._seconds + (0.0 if self._clock is None else time.monotonic() - self._clock)

    def _stretch(self) -> Array | None:
        if not self._domain.whole:
            return None
        return self._domain.stretch(self.distribution.deviations(), self.population)

    def _whitened(self, x: Array, stretch: Array | None) -> Array:
        """Return the ``z`` of points: those they were made of, or, for other points, shortened ones."""
        if self._asked is not None:
            asked, z, _ = self._asked
            if np.array_equal(x, asked) and not np.isnan(z).any():
                return z
            known = {row.tobytes(): source for row, source in zip(asked, z, strict=True)}
        else:
            known = {}
        missing = np.full(self.dimension, np.nan)
        found = np.array([known.get(row.tobytes(), missing) for row in x])
        own = np.isnan(found).any(-1)
        if own.any():
            whitened = self.distribution.whiten(self._domain.encode(x[own]), stretch)
            length = np.sqrt((whitened * whitened).sum(-1, keepdims=True))
            found[own] = whitened * np.minimum(
                1.0, LONGEST_INJECTION * self.dimension**0.5 / np.maximum(length, 1e-300)
            )
        return found

    def _record(self, values: Array) -> None:
        history = self.history
        if history.due:
            axes = np.sort(self.distribution.axes())
            history.add(
                nfev=self.evaluations,
                fun=self._progress.best[-1],
                best=self.best_fun,
                median=self._progress.median[-1],
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
            return
        if self.evaluations >= self.max_evals:
            self._reason = "max_evals"
            return
        if self._max_iter is not None and self.iterations >= self._max_iter:
            self._reason = "max_iter"
            return
        reason = self._progress.reason(self.distribution, self.population, self._domain.scale)
        used = self.evaluations - self._run_start
        limited = self._present.max_evals is not None and used >= self._present.max_evals
        if reason is None and not limited:
            return
        if self._restarts is None or (self._max_restarts is not None and self.restarts >= self._max_restarts):
            self._reason = reason or "max_evals"
            return
        self._present = self._restarts.next(self._present, used, self._rng)
        self.restarts += 1
        self._begin(self._new_start())

    def _new_start(self) -> Array:
        if self._x0 is not None:
            start = read_vector(self._x0(self._rng), "x0(generator)")
            self._check_points(start[None])
            return start
        return self._domain.random(self._rng) if self._domain.boxed else self._start

    def _check_points(self, rows: Array) -> None:
        if rows.ndim != 2 or rows.shape[1] != self.dimension:
            raise ValueError(f"points must have {self.dimension} coordinates each, got shape {rows.shape}")
        if not np.isfinite(rows).all():
            raise ValueError("points must be finite")
        if self._domain.bounded and not self._domain.contains(rows):
            raise ValueError("points must be within the bounds")

    # Saving and loading.

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes during the search, as arrays, numbers, strings and dicts."""
        asked = None if self._asked is None else list(self._asked)
        return {
            "distribution": {entry.name: getattr(self.distribution, entry.name) for entry in fields(self.distribution)},
            "rng": self._rng.bit_generator.state,
            "present": asdict(self._present),
            "restarts": None if self._restarts is None else asdict(self._restarts),
            "progress": asdict(self._progress),
            "noise": None if self.noise is None else asdict(self.noise),
            "history": self.history.as_dict(),
            "asked": asked,
            "injected": list(self._injected),
            "counts": {name: getattr(self, name) for name in COUNTS},
            "best_x": self.best_x,
            "reason": self._reason,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another search, started with the same arguments, was when its ``state_dict`` was taken."""
        loaded = state["distribution"]
        same = set(loaded) == {entry.name for entry in fields(self.distribution)}
        if not same or np.shape(loaded["mean"]) != (self.dimension,):
            raise ValueError(
                "state_dict is of a search with another method or dimension: start with the same arguments"
            )
        if (state["restarts"] is None) != (self._restarts is None) or (state["noise"] is None) != (self.noise is None):
            raise ValueError("state_dict is of a search with other restarts or noise: start with the same arguments")
        self.distribution = replace(self.distribution, **loaded)
        self._rng.bit_generator.state = state["rng"]
        self._present = Start(**state["present"])
        self._restarts = None if state["restarts"] is None else Restarts(**state["restarts"])
        self._progress = Progress(
            **{**state["progress"], **{n: list(state["progress"][n]) for n in ("best", "median")}}
        )
        self.noise = None if state["noise"] is None else Reevaluation(**state["noise"])
        self.history = History.from_dict(state["history"])
        self._asked = None if state["asked"] is None else tuple(state["asked"])
        self._injected = list(state["injected"])
        for name in COUNTS:
            setattr(self, name, state["counts"][name])
        self.best_x, self._reason = state["best_x"], state["reason"]
        self._seconds, self._clock = state["seconds"], None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle with the time spent so far in place of the running clock."""
        return {**self.__dict__, "_seconds": self.seconds, "_clock": None}


COUNTS = ("evaluations", "iterations", "failures", "restarts", "best_fun", "_run_start")
