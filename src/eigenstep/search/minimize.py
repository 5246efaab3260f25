"""Minimize a function in one call: evaluate populations one by one, at once, or on workers, until
the search is over.

Evaluations that fail cost evaluations, never the search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..core.checks import check_function, check_number
from ..core.numpy_twin import Array
from ..core.progress import bar
from ..core.result import Result
from .sampling import mean
from .search import Search
from .space import Point, Rng, copy_point, to_number, to_numpy
from .stopping import REASONS


@dataclass(frozen=True, kw_only=True)
class SearchResult(Result):
    """What came out of a search without gradients.

    ``reason`` is a key of ``eigenstep.search.REASONS``; ``history`` is a
    ``eigenstep.search.History``; ``success`` says whether the search has converged or, if there is
    one, reached the target, at a point with a finite value.

    Attributes:
        x: the best point found; with ``noisy=True`` the center of the distribution.
        fun: its value, ``inf`` if no evaluation gave a finite one; with ``noisy=True`` the mean of
            several there.
        restarts: how often it started again.
        failures: evaluations that raised, timed out or did not give a finite number.
        first_failure: what the first one that raised said.
        decisions: how it searched, and why, in sentences.
    """

    x: Point
    fun: float
    restarts: int
    failures: int
    first_failure: str | None
    decisions: tuple[str, ...] = ()


def minimize(
    fun: Callable[[Any], object],
    x0: Point | Callable[[Rng], Point],
    sigma0: float | Point,
    *,
    batched: bool = False,
    executor: Any = None,
    timeout: float | None = None,
    callback: Callable[[Search], object] | None = None,
    progress: bool = False,
    **options: Any,
) -> SearchResult:
    """Minimize a function of which only values are known.

    Args:
        fun: takes a vector like ``x0``, a copy that it may change, and returns a number. It may
            raise, or return NaN or an infinity: such points are worse than all others. If all of
            the first generation raise, so does this.
        x0: where to start; see ``Search``.
        sigma0: how far from ``x0`` to look at first; see ``Search``.
        batched: ``fun`` takes all points of a generation as the rows of a matrix and returns a
            vector of values.
        executor: evaluate in parallel, on any ``concurrent.futures.Executor`` or a Dask client. Or
            a function that returns a new executor, which the search closes: it is called again if
            the executor breaks, or if evaluations run on after the ``timeout``, whose processes are
            then ended.
        timeout: with an executor, seconds that one generation may take; evaluations not done by
            then have failed.
        callback: called with the search after each generation; the search stops if it returns
            ``True``.
        progress: show a progress bar; needs the package ``rich``.
        **options: all other arguments of ``Search``: ``method``, ``bounds``, ``restarts``, ``seed``
            and so on.

    Returns:
        The best point and how it was found. After Ctrl-C the best point so far, with the reason
        "interrupted".
    """
    search = Search(x0, sigma0, **{"method": "auto", **options})
    return run(
        search,
        fun,
        batched=batched,
        executor=executor,
        timeout=timeout,
        callback=callback,
        progress=progress,
    )


def run(
    search: Search,
    fun: Callable[[Any], object],
    *,
    batched: bool = False,
    executor: Any = None,
    timeout: float | None = None,
    callback: Callable[[Search], object] | None = None,
    progress: bool = False,
) -> SearchResult:
    """Take a search to its end, also a saved one; arguments as for ``minimize``."""
    check_function(fun, "fun")
    check_function(callback or fun, "callback")
    evaluate = _Evaluator(fun, batched, executor, timeout)
    try:
        with bar(search.max_evals, progress) as show:
            while search.stop() is None:
                points = search.ask()
                search.tell(points, evaluate.generation(points, search))
                show(search.evaluations, f"value {search.best_fun:.6g}, σ {search.sigma:.1e}")
                if callback is not None and callback(search) is True:
                    search.end("callback")
        return _result(search, evaluate)
    except KeyboardInterrupt:
        search.see(evaluate.points[: len(evaluate.values)], evaluate.values)
        if search.best is None:
            raise
        search.end("interrupted")
        return _result(search, evaluate)
    finally:
        evaluate.close()


def _result(search: Search, evaluate: _Evaluator) -> SearchResult:
    reason = search.stop() or ""
    x = search.mean if search.best is None else search.best
    fun = search.best_fun
    values = np.zeros(0)
    again = search.max_evals - search.evaluations
    if search.noise is not None and again > 0 and reason != "interrupted":
        # The best of many noisy values is a lucky one: what counts is the center, evaluated anew.
        values = evaluate(search.repeat_mean(min(search.noise.final, again)))
    finite = values[np.isfinite(values)]
    if len(finite):
        x = search.mean
        fun = float(mean(finite))
    ending = REASONS[reason]
    reached = search.target is None or search.best_fun <= search.target or reason == "callback"
    return SearchResult(
        success=ending.success and reached and math.isfinite(fun),
        reason=reason,
        message=ending.message,
        x=x,
        fun=fun,
        nit=search.iterations,
        nfev=search.evaluations + len(values),
        restarts=search.restarts,
        failures=search.failures + len(values) - len(finite),
        first_failure=evaluate.first_failure,
        decisions=tuple(search.decisions),
        history=search.history,
    )


def _check_ways(batched: bool, executor: Any, timeout: float | None) -> None:
    """Raise where ways to evaluate exclude each other."""
    if batched and executor is not None:
        raise ValueError(
            "batched evaluates all points in one call, so it cannot be combined with an executor"
        )
    if timeout is not None:
        check_number(timeout, "timeout", 0.0)
        if executor is None:
            raise ValueError("timeout needs an executor: without one, nothing could interrupt fun")


class _Evaluator:
    """Calls the user's function with copies of points, and keeps what went wrong."""

    points: Any = ()  # what is evaluated
    values: Sequence[float] = ()  # what the first points gave, until all are done
    first_error: BaseException | None = None

    def __init__(
        self, fun: Callable[[Point], object], batched: bool, executor: Any, timeout: float | None
    ) -> None:
        """Choose how to evaluate."""
        _check_ways(batched, executor, timeout)
        self._fun = fun
        self._timeout = timeout
        self._makes_executor = callable(executor) and not hasattr(executor, "submit")
        self._make = executor if self._makes_executor else lambda: executor
        self._executor: Any = None
        self._evaluate = self._call_each
        if batched:
            self._evaluate = self._call_batched
        elif executor is not None:
            self._evaluate = self._call_on_workers
            if not self._makes_executor:
                self._open()

    def __call__(self, points: Any) -> Array:
        """Return the values of points (rows); NaN stands for a failure."""
        self.points = points
        values = self._evaluate(points)
        self.values = ()
        return values

    def generation(self, points: Any, search: Search) -> Array:
        """Return the values of a generation; raise if nothing can be evaluated and nothing will be.

        A generation whose workers died of a single point may be followed by a better one.
        """
        values = self(points)
        first = search.best is None and search.restarts == 0 and not search.descending
        if first and self.first_error is not None and not np.isfinite(values).any():
            lost = isinstance(self.first_error, BrokenExecutor) and self._makes_executor
            if search.generations == int(lost):
                count = search.run_evaluations + len(values)
                self.first_error.add_note(
                    f"fun failed at all {count} points of the first "
                    f"{'two generations' if lost else 'generation'}, so there is nothing to learn "
                    "from; this was the first failure. If only some points cannot be evaluated, "
                    "start elsewhere or with a smaller sigma0, or return NaN for them"
                )
                raise self.first_error
        return values

    @property
    def first_failure(self) -> str | None:
        """What the first exception said."""
        error = self.first_error
        return None if error is None else f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Give up the executor, without waiting, if it was made here; its processes, which may
        hang, are ended.
        """
        if self._makes_executor and self._executor is not None:
            processes = getattr(self._executor, "_processes", None) or {}
            workers = list(processes.values())
            self._executor.shutdown(wait=False, cancel_futures=True)
            for worker in workers:  # threads cannot be ended
                worker.kill()
            self._executor = None

    def _collect(self, calls: Iterable[Callable[[], object]]) -> Array:
        """Return what calls return; NaN where they raise."""
        self.values = values = []
        for call in calls:
            value: object = math.nan
            try:
                value = call()
            except (Exception, futures.CancelledError) as error:
                self.first_error = self.first_error or error
            values.append(to_number(value))
        return np.array(values)

    def _call_each(self, points: Any) -> Array:
        return self._collect(partial(self._fun, copy_point(point)) for point in points)

    def _call_batched(self, points: Any) -> Array:
        try:
            values = self._fun(copy_point(points))
        except Exception as error:
            self.first_error = self.first_error or error
            return np.full(len(points), np.nan)
        try:
            array = to_numpy(values)
        except (TypeError, ValueError) as error:
            raise TypeError(f"fun must return one real number per row ({error})") from error
        if array.shape != (len(points),):
            raise ValueError(
                f"fun must return one value per row, {len(points)} in all; got shape {array.shape}"
            )
        return array

    def _call_on_workers(self, points: Any) -> Array:
        submitted = [self._submit(point) for point in points]
        deadline = math.inf if self._timeout is None else time.monotonic() + self._timeout

        def wait(future: Future[object]) -> object:
            left = max(0.0, deadline - time.monotonic())
            return future.result(None if math.isinf(left) else left)

        try:
            return self._collect(partial(wait, future) for future in submitted)
        finally:
            # A running evaluation cannot be canceled: it hangs, or the search was interrupted.
            canceled = [future.done() or future.cancel() for future in submitted]
            if not all(canceled):
                self.close()

    def _submit(self, point: Point) -> Future[object]:
        """Return what will be a value; on a broken executor try once more, on a new one."""
        future: Future[object] = Future()
        for _ in range(2):
            try:
                return self._open().submit(self._fun, copy_point(point))
            except BrokenExecutor as error:
                future = Future()
                future.set_exception(error)
                self.first_error = self.first_error or error
                self.close()
        return future

    def _open(self) -> Any:
        """Return the executor, a new one if there is none."""
        if self._executor is None:
            executor = self._make()
            if not hasattr(executor, "submit"):
                raise TypeError(
                    "executor must have a method submit, or return such an object; got "
                    f"{executor!r}"
                )
            # A Dask client takes equal calls for one; its executor does what others do.
            dask = hasattr(executor, "get_executor")
            self._executor = executor.get_executor(pure=False) if dask else executor
        return self._executor
