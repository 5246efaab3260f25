"""Every reason to stop happens where it should."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from eigenstep.search import REASONS, Search, SearchResult, minimize
from eigenstep.search.record import Progress
from eigenstep.search.stopping import Limits, why_over
from eigenstep_lab.baselines.paper_nes import PaperNES

from .problems import Array, advance, ellipsoid, rastrigin, sphere


def tiny_valley(x: Array) -> float:
    """The axes of the level sets differ by a factor of 1e9."""
    return float(x[0] ** 2 + 1e18 * x[1] ** 2)


CASES: dict[str, tuple[Callable[[Array], float], dict[str, object]]] = {
    "target": (sphere, {"target": 1e-3}),
    "tolfun": (lambda x: float(sphere(x) + 1e5), {"tolx": 0.0}),
    "tolx": (lambda x: float(np.abs(x).sum()), {"tolfun": 0.0, "tolx": 1e-6}),
    "no_effect": (lambda x: float(np.abs(x - 1e8).sum()), {"tolfun": 0.0, "tolx": 0.0}),
    "flat": (lambda x: 1.0, {}),
    "condition": (tiny_valley, {"tolfun": 0.0, "tolx": 0.0}),
    "diverged": (lambda x: float(x[0]), {}),
    "failed": (lambda x: math.nan, {}),
    "max_evals": (sphere, {"max_evals": 30}),
    "max_iter": (sphere, {"max_iter": 4}),
    "max_seconds": (sphere, {"max_seconds": 0.0}),
    "callback": (sphere, {"callback": lambda search: search.iterations == 3}),
}


def solve(name: str) -> SearchResult:
    fun, options = CASES[name]
    return minimize(fun, np.full(2, 1e8 if name == "no_effect" else 1.5), 1.0, seed=0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_each_reason(name: str) -> None:
    result = solve(name)
    assert result.reason == name
    assert result.message == REASONS[name].message
    assert result.success == REASONS[name].success
    if name == "failed":
        assert result.failures == result.nfev
        assert result.fun == math.inf
        assert np.isfinite(result.x).all()
    if name == "max_iter":
        assert result.nit == 4
    if name == "max_evals":
        assert result.nfev == 30
    if name == "callback":
        assert result.nit == 3


def test_every_reason_is_tested() -> None:
    assert set(CASES) | {"stagnation", "interrupted"} == set(REASONS)


def test_stagnation() -> None:
    """A function of noise alone never gets better."""
    progress = Progress()
    limits = Limits(1.0, 0.0, 0.0, 4, np.ones(3))
    state = Search(np.zeros(3), 1.0).distribution
    for generation in range(400):
        progress.add(np.array([5.0, 6.0, 7.0, 8.0]) + (generation % 7))
        reason = why_over(progress, state, limits)
        assert reason in (None, "stagnation")
        if reason:
            break
    assert reason == "stagnation"
    assert generation > 100


def test_success_means_that_the_target_is_reached_if_there_is_one() -> None:
    result = minimize(lambda x: float(sphere(x) + 1), np.ones(3), 0.5, seed=0, target=0.5)
    assert result.reason == "tolfun"
    assert not result.success


@pytest.mark.parametrize("function", [sphere, ellipsoid, rastrigin])
def test_ordinary_functions_do_not_stop_early(function: Callable[[Array], Array]) -> None:
    """Without restarts, on functions of several kinds: a local minimum to full precision, not a
    weak excuse.
    """
    for seed in range(3):
        result = minimize(function, np.full(5, 2.2), 1.0, seed=seed, batched=True)
        assert result.reason == "tolfun"
        gradient = [
            float(function(result.x + h) - function(result.x - h)) / 2e-6 for h in 1e-6 * np.eye(5)
        ]
        assert np.abs(gradient).max() < 1e-2


def test_history_is_thinned_but_spans_the_run() -> None:
    search = Search(np.ones(4), 1.0, seed=0, max_evals=10**6, tolfun=0, tolx=0)
    advance(search, ellipsoid, 1000)
    history = search.history
    assert 100 <= len(history) < 200
    assert history.nfev[0] == search.population
    assert history.nfev[-1] > 0.98 * search.evaluations
    steps = np.diff(history.nfev)
    assert set(steps) == {history.stride * search.population}
    assert np.diff(history.best).max() <= 0


def test_small_steps_on_a_slope_are_no_convergence() -> None:
    """Values differ by less than tolfun from the beginning, but the distribution grows: the search
    has to go on.
    """
    result = minimize(
        lambda x: 1e-9 * sphere(x),
        np.ones(10),
        1e-7,
        seed=0,
        method=PaperNES,
        population=20,
        batched=True,
    )
    assert result.reason == "diverged"
    assert not result.success
