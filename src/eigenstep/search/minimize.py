"""Minimize a function in one call: evaluate populations one by one, at once, or on workers, until
the search is over.

Evaluations that fail cost evaluations, never the search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.checks import check_function, check_number
from ..core.numpy_twin import Array
from ..core.progress import bar
from ..core.result import Result
from .sampling import mean
from .search import Search
from .space import Point, copy_point, to_number, to_numpy
from .stopping import REASONS


@dataclass(frozen=True, kw_only=True)
class SearchResult(Result):
    """What came out of a search without gradients.

    ``reason`` is a key of ``eigenstep.search.REASONS``; ``history`` is a
    ``eigenstep.search.History``; ``success`` says whether the search has converged or, if there is
    one, reached the target, at a point with a finite value.

    Attributes: x: the best point found; with ``noisy=True`` the center of the distribution. fun:
        its value, ``inf`` if no evaluation gave a finite one; with ``noisy=True`` the mean of
        several there. restarts: how often it started again. failures: evaluations that raised,
        timed out or did not give a finite number. first_failure: what the first one that raised
        said. decisions: how it searched, and why, in sentences.
    """

    x: Point
    fun: float
    restarts: int
    failures: int
    first_failure: str | None
    decisions: tuple[str, ...] = ()


def minimize(
    fun: Callable[[Any], object],
    x0: Point | Callable[[np.random.Generator], Point],
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

    Args: fun: takes a vector like ``x0``, a copy that it may change, and returns a number. It may
        raise, or return NaN or an infinity: such points are worse than all others. If all of the
        first generation raise, so does this. x0: where to start; see ``Search``. sigma0: how far
        from ``x0`` to look at first; see ``Search``. batched: ``fun`` takes all points of a
        generation as the rows of a matrix and returns a vector of values. executor: evaluate in
        parallel, on any ``concurrent.futures.Executor`` or a Dask client. Better a function that
        returns a new executor, which the search closes: it is called again if the executor breaks,
        or if evaluations run on after the ``timeout``, whose processes are then ended. timeout:
        with an executor, seconds that one generation may take; evaluations not done by then have
        failed. callback: called with the search after each generation; the search stops if it
        returns ``True``. progress: show a progress bar; needs the package ``rich``. **options: all
        other arguments of ``Search``: ``method``, ``bounds``, ``restarts``, ``seed`` and so on.

    Returns: The best point and how it was found. After Ctrl-C the best point so far, with the
        reason "interrupted".
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
    """Take a search to its end, also one that was saved on the way; arguments as for
    ``minimize``.
    """
    check_function(fun, "fun")
    if callback is not None:
        check_function(callback, "callback")
    evaluate = _Evaluator(fun, batched, executor, timeout)
    points: Any = ()
    try:
        with bar(search.max_evals, progress) as show:
            while search.stop() is None:
                points = search.ask()
                values = evaluate(points)
                first = search.best is None and search.restarts == 0 and not search.descending
                if first and not np.isfinite(values).any():
                    evaluate.explain_failure(
                        search.run_evaluations + len(values), search.generations
                    )
                search.tell(points, values)
                show(search.evaluations, f"value {search.best_fun:.6g}, σ {search.sigma:.1e}")
                if callback is not None and callback(search) is True:
                    search.end("callback")
        return _result(search, evaluate)
    except KeyboardInterrupt:
        search.see(points[: len(evaluate.values)], evaluate.values)
        if search.best is None:
            raise
        search.end("interrupted")
        return _result(search, evaluate)
    finally:
        evaluate.close()


def _result(search: Search, evaluate: _Evaluator) -> SearchResult:
    reason = search.stop()
    assert reason is not None
    x, value, nfev, failures = search.best, search.best_fun, search.evaluations, search.failures
    x = search.mean if x is None else x
    again = 0 if search.noise is None else min(search.noise.final, search.max_evals - nfev)
    if again > 0 and reason != "interrupted":
        # The best of many noisy values is a lucky one; what counts is the center, evaluated anew.
        values = evaluate(search.repeat_mean(again))
        finite = values[np.isfinite(values)]
        nfev, failures = nfev + len(values), failures + len(values) - len(finite)
        if len(finite):
            x, value = search.mean, float(mean(finite))
    found = search.target is None or search.best_fun <= search.target or reason == "callback"
    success = REASONS[reason].success and found and bool(np.isfinite(value))
    counts: Any = {
        "nfev": nfev,
        "nit": search.iterations,
        "restarts": search.restarts,
        "failures": failures,
    }
    ending: Any = {
        **vars(REASONS[reason]),
        "success": success,
        "first_failure": evaluate.first_failure,
    }
    ending["decisions"] = tuple(search.decisions)
    return SearchResult(x=x, fun=value, **counts, **ending, history=search.history)


class _Evaluator:
    """Calls the user's function with copies of points, and keeps what went wrong.

    ``first_error`` is the first exception, ``values`` what the first points gave of a population
    that was interrupted.
    """

    def __init__(
        self, fun: Callable[[Point], object], batched: bool, executor: Any, timeout: float | None
    ) -> None:
        """Choose how to evaluate."""
        if batched and executor is not None:
            raise ValueError(
                "batched evaluates all points in one call, so it cannot be combined with an "
                "executor"
            )
        if timeout is not None and executor is None:
            raise ValueError("timeout needs an executor: without one, nothing could interrupt fun")
        if timeout is not None:
            check_number(timeout, "timeout", 0.0)
        self.first_error: BaseException | None = None
        self._fun, self._batched, self._timeout = fun, batched, timeout
        self._factory = executor if callable(executor) and not hasattr(executor, "submit") else None
        self._executor = (
            None if executor is None or self._factory is not None else _prepare(executor)
        )
        self.values: list[float] = []

    @property
    def first_failure(self) -> str | None:
        """What the first exception said."""
        return (
            None
            if self.first_error is None
            else f"{type(self.first_error).__name__}: {self.first_error}"
        )

    def __call__(self, points: Sequence[Point]) -> Array:
        """Return the values of points (rows); NaN stands for a failure."""
        self.values = []
        if self._batched:
            values = self._call_batched(points)
        elif self._executor is None and self._factory is None:
            values = self._collect(lambda point: self._fun(copy_point(point)), points)
        else:
            values = self._call_on_workers(points)
        self.values = []
        return values

    def explain_failure(self, count: int, generation: int) -> None:
        """Raise because nothing could be evaluated so far, if it was for an exception that will
        come again.

        A generation, counted from 0, whose workers died of a single point may be followed by a
        better one.
        """
        lost = isinstance(self.first_error, BrokenExecutor) and self._factory is not None
        if self.first_error is not None and generation == int(lost):
            self.first_error.add_note(
                f"fun failed at all {count} points of the first "
                f"{'two generations' if lost else 'generation'}, so "
                "there is nothing to learn from; this was the first failure. If only some points "
                "cannot be evaluated, "
                "start elsewhere or with a smaller sigma0, or return NaN for them"
            )
            raise self.first_error

    def close(self) -> None:
        """Give up the executor, without waiting, if it was made here; its processes, which may
        hang, are ended.
        """
        if self._factory is not None and self._executor is not None:
            processes = list((getattr(self._executor, "_processes", None) or {}).values())
            self._executor.shutdown(wait=False, cancel_futures=True)
            for process in processes:  # threads cannot be ended
                process.kill()
            self._executor = None

    def _collect(self, evaluate: Callable[[Any], object], arguments: Sequence[Any]) -> Array:
        for argument in arguments:
            value: object = math.nan
            try:
                value = evaluate(argument)
            except (Exception, futures.CancelledError) as error:
                self._note(error)
            self.values.append(to_number(value))
        return np.array(self.values)

    def _call_batched(self, points: Any) -> Array:
        try:
            values = self._fun(copy_point(points))
        except Exception as error:
            self._note(error)
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

    def _call_on_workers(self, points: Sequence[Point]) -> Array:
        submitted = [self._submit(point) for point in points]
        deadline = None if self._timeout is None else time.monotonic() + self._timeout

        def wait(future: Future[object] | None) -> object:
            if future is None:  # could not be submitted, which is on record
                return math.nan
            return future.result(
                None if deadline is None else max(0.0, deadline - time.monotonic())
            )

        try:
            return self._collect(wait, submitted)
        finally:
            # A running evaluation cannot be canceled: it hangs, or the search was interrupted.
            canceled = [future is None or future.done() or future.cancel() for future in submitted]
            if not all(canceled):
                self.close()

    def _submit(self, point: Point) -> Future[object] | None:
        for _ in range(2):  # the second time on a new executor
            if self._executor is None:
                assert self._factory is not None
                self._executor = _prepare(self._factory())
            try:
                return self._executor.submit(self._fun, copy_point(point))
            except BrokenExecutor as error:
                self._note(error)
                self.close()
        return None

    def _note(self, error: BaseException) -> None:
        if self.first_error is None:
            self.first_error = error


def _prepare(executor: Any) -> Any:
    if not hasattr(executor, "submit"):
        raise TypeError(
            f"executor must have a method submit, or return such an object; got {executor!r}"
        )
    # A Dask client takes equal calls for one unless told otherwise; its executor does what others
    # do.
    return executor.get_executor(pure=False) if hasattr(executor, "get_executor") else executor
