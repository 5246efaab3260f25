"""Minimize a function in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.arguments import check_function
from ..core.progress import bar
from .evaluation import Evaluator, Point
from .history import History
from .search import Search
from .stopping import REASONS


@dataclass(frozen=True)
class Result:
    """What came out.

    Attributes:
        x: the best point found; with ``noisy=True`` the center of the distribution.
        fun: its value; with ``noisy=True`` the mean of several evaluations there.
        nfev: evaluations.
        nit: generations.
        reason: name of the reason to stop, a key of ``eigenstep.search.REASONS``.
        message: the reason as a sentence.
        success: whether the search has converged or, if there is one, reached the target.
        restarts: how often it started again.
        failures: evaluations that raised, timed out or did not give a finite number.
        first_failure: what the first one that raised said.
        history: what happened; ``history.plot("search.png")`` draws it.
    """

    x: Point
    fun: float
    nfev: int
    nit: int
    reason: str
    message: str
    success: bool
    restarts: int
    failures: int
    first_failure: str | None
    history: History = field(repr=False)


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
) -> Result:
    """Minimize a function of which only values are known.

    Args:
        fun: takes a vector like ``x0`` and returns a number. It may raise, or return NaN or an infinity: such points
            count as worse than all others.
        x0: where to start; see :class:`Search`.
        sigma0: how far from ``x0`` to look at first; see :class:`Search`.
        batched: ``fun`` takes all points of a generation as the rows of a matrix and returns a vector of values.
        executor: evaluate in parallel, on any ``concurrent.futures.Executor`` or a Dask client. A function that returns
            an executor also works; it is called again if the executor breaks.
        timeout: with an executor, seconds that one generation may take; evaluations not done by then have failed.
        callback: called with the search after each generation; the search stops if it returns ``True``.
        progress: show a progress bar; needs the package ``rich``.
        **options: all other arguments of :class:`Search`: ``method``, ``population``, ``bounds``, ``integers``,
            ``restarts``, ``noisy``, ``seed``, ``target``, ``max_evals`` and so on.
    """
    check_function(fun, "fun")
    search = Search(x0, sigma0, **options)
    return run(search, fun, batched=batched, executor=executor, timeout=timeout, callback=callback, progress=progress)


def run(
    search: Search,
    fun: Callable[[Any], object],
    *,
    batched: bool = False,
    executor: Any = None,
    timeout: float | None = None,
    callback: Callable[[Search], object] | None = None,
    progress: bool = False,
) -> Result:
    """Take a search to its end, also one that was saved on the way; arguments as for :func:`minimize`."""
    check_function(fun, "fun")
    if callback is not None:
        check_function(callback, "callback")
    evaluate = Evaluator(fun, batched=batched, executor=executor, timeout=timeout)
    with bar(search.max_evals, progress) as show:
        while search.stop() is None:
            points = search.ask()
            search.tell(points, evaluate(points))
            show(search.evaluations, f"value {search.best_fun:.6g}, σ {search.sigma:.1e}")
            if callback is not None and callback(search) is True:
                search.end("callback")
    return _result(search, evaluate)


def _result(search: Search, evaluate: Evaluator) -> Result:
    x, value, nfev = search.best, search.best_fun, search.evaluations
    if search.noise is not None or x is None:
        x = search.mean
    if search.noise is not None:
        again = max(2, int(search.noise.repeats))
        finite = evaluate(search.repeat_mean(again))
        value, nfev = float(np.mean(finite)), nfev + again
    reason = search.stop()
    assert reason is not None
    meaning = REASONS[reason]
    success = meaning.success and (search.target is None or search.best_fun <= search.target or reason == "callback")
    return Result(
        x=x,
        fun=value,
        nfev=nfev,
        nit=search.iterations,
        reason=reason,
        message=meaning.message,
        success=success,
        restarts=search.restarts,
        failures=search.failures,
        first_failure=evaluate.first_failure,
        history=search.history,
    )
