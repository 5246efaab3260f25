"""Minimize a function in one call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.arguments import check_function
from ..core.extras import bar
from ..core.result import Result
from .evaluation import Evaluator
from .inputs import Point
from .noise import mean
from .search import Search
from .stopping import REASONS


@dataclass(frozen=True, kw_only=True)
class SearchResult(Result):
    """What came out of a search without gradients.

    ``reason`` is a key of ``eigenstep.search.REASONS``; ``history`` is a ``eigenstep.search.History``, which
    ``history.plot("search.png")`` draws; ``success`` says whether the search has converged or, if there is one, reached
    the target, at a point with a finite value.

    Attributes:
        x: the best point found; with ``noisy=True`` the center of the distribution.
        fun: its value, ``inf`` if no evaluation gave a finite one; with ``noisy=True`` the mean of several there.
        restarts: how often it started again.
        failures: evaluations that raised, timed out or did not give a finite number.
        first_failure: what the first one that raised said.
    """

    x: Point
    fun: float
    restarts: int
    failures: int
    first_failure: str | None


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

    Args:
        fun: takes a vector like ``x0``, a copy that it may change, and returns a number. It may raise, or return NaN or
            an infinity: such points count as worse than all others. But if it raises at every point of the first
            generation, so does this.
        x0: where to start; see ``Search``.
        sigma0: how far from ``x0`` to look at first; see ``Search``.
        batched: ``fun`` takes all points of a generation as the rows of a matrix and returns a vector of values.
        executor: evaluate in parallel, on any ``concurrent.futures.Executor`` or a Dask client. Better a function that
            returns a new executor: it is called again if the executor breaks, or if evaluations run on after the
            ``timeout``, whose processes are then ended. The search closes what such a function has returned.
        timeout: with an executor, seconds that one generation may take; evaluations not done by then have failed.
        callback: called with the search after each generation; the search stops if it returns ``True``.
        progress: show a progress bar; needs the package ``rich``.
        **options: all other arguments of ``Search``: ``method``, ``population``, ``bounds``, ``integers``,
            ``restarts``, ``noisy``, ``seed``, ``target``, ``max_evals`` and so on.

    Returns:
        The best point and how it was found. After Ctrl-C the best point so far, with the reason "interrupted".
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
) -> SearchResult:
    """Take a search to its end, also one that was saved on the way; arguments as for ``minimize``."""
    check_function(fun, "fun")
    if callback is not None:
        check_function(callback, "callback")
    evaluate = Evaluator(fun, batched=batched, executor=executor, timeout=timeout)
    points: Any = ()
    try:
        with bar(search.max_evals, progress) as show:
            while search.stop() is None:
                points = search.ask()
                values = evaluate(points)
                if search.best is None and not np.isfinite(values).any():
                    evaluate.explain_failure(search.evaluations + len(values), search.iterations)
                search.tell(points, values)
                show(search.evaluations, f"value {search.best_fun:.6g}, σ {search.sigma:.1e}")
                if callback is not None and callback(search) is True:
                    search.end("callback")
        return _result(search, evaluate)
    except KeyboardInterrupt:
        finished = evaluate.finished
        search.see(points[: len(finished)], finished)
        if search.best is None:
            raise
        search.end("interrupted")
        return _result(search, evaluate)
    finally:
        evaluate.close()


def _result(search: Search, evaluate: Evaluator) -> SearchResult:
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
    meaning = REASONS[reason]
    found = search.target is None or search.best_fun <= search.target or reason == "callback"
    counts: Any = {"nfev": nfev, "nit": search.iterations, "restarts": search.restarts, "failures": failures}
    success = meaning.success and found and bool(np.isfinite(value))
    ending: Any = {"reason": reason, "message": meaning.message, "success": success}
    first = evaluate.first_failure
    return SearchResult(x=x, fun=value, **counts, **ending, first_failure=first, history=search.history)
