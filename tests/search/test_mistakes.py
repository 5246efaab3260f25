"""What users do wrong, and what their functions do to them: typos, Ctrl-C, points changed in place,
odd values.
"""

from __future__ import annotations

import math
import os
import re
import time
import tracemalloc
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import active_children, get_context
from typing import Any

import numpy as np
import pytest
import torch

from eigenstep.search import Search, SearchResult, minimize
from eigenstep.search.gaussian import assign
from eigenstep.search.sampling import Reevaluation
from eigenstep.search.search import FAILED_RESTARTS
from eigenstep_lab.baselines.paper_nes import PaperNES

from .problems import Array, Recorded, sphere

# A function that cannot be evaluated at all.


@pytest.mark.parametrize(
    "options", [{}, {"restarts": "bipop"}, {"batched": True}, {"noisy": True}, {"max_evals": 3}]
)
def test_a_function_that_always_raises_is_called_for_one_generation_only(
    options: dict[str, Any],
) -> None:
    typo = Recorded(sphere, KeyError("forgotten"))
    with pytest.raises(KeyError, match="forgotten") as caught:
        minimize(typo, np.ones(3), 0.5, **options)
    assert re.match(
        r"fun failed at all \d+ points of the first generation", caught.value.__notes__[0]
    )
    assert typo.calls <= 10


def always_hangs(x: Array) -> float:
    time.sleep(600)
    return 0.0


def test_a_pool_on_which_nothing_can_be_evaluated_is_reported_and_ended() -> None:
    with pytest.raises(TimeoutError) as caught:
        minimize(always_hangs, np.ones(2), 0.5, executor=processes, timeout=0.5)
    assert "first generation" in caught.value.__notes__[0]
    assert none_left()


def test_functions_that_fail_later_or_in_part_are_searched_around() -> None:
    error = ArithmeticError("now and then")
    fails_later = Recorded(sphere, error, lambda call: call % 9 == 0 or 40 < call < 60)
    result = minimize(fails_later, np.ones(3), 0.5, seed=0, max_evals=300)
    assert result.fun < 1e-3
    assert result.first_failure == "ArithmeticError: now and then"


def test_functions_without_any_value_end_as_failed_and_without_success() -> None:
    """Also where the distribution has become too narrow in the meantime, or the
    callback says stop.
    """
    for options in ({}, {"tolx": 0.4}, {"callback": lambda search: search.iterations == 2}):
        result = minimize(lambda x: math.nan, np.ones(3), 0.5, seed=0, **options)  # type: ignore[arg-type]
        assert not result.success
        assert result.fun == math.inf
        assert result.failures == result.nfev


@pytest.mark.parametrize("restarts", ["ipop", "bipop"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_restarts_do_not_go_on_where_nothing_has_a_value(restarts: str, elsewhere: bool) -> None:
    options: dict[str, Any] = {"bounds": (-1.0, 1.0)} if elsewhere else {}
    result = minimize(lambda x: math.nan, np.zeros(3), 0.5, seed=0, restarts=restarts, **options)
    assert (result.reason, result.success, result.fun) == ("failed", False, math.inf)
    assert result.restarts in (
        range(FAILED_RESTARTS, 2 * FAILED_RESTARTS + 1) if elsewhere else [0]
    )
    assert result.failures == result.nfev < (10_000 if elsewhere else 500)


def test_a_restart_elsewhere_finds_values() -> None:
    fun = lambda x: sphere(x) if x[0] > 0.5 else math.nan  # noqa: E731
    result = minimize(
        fun, np.full(2, -0.9), 1e-3, seed=0, restarts="ipop", bounds=(-1.0, 1.0), max_evals=3000
    )
    assert result.fun < 0.26
    assert result.restarts > 0


# Interruptions.


def interrupt_at(call: int) -> Recorded:
    return Recorded(sphere, KeyboardInterrupt(), lambda number: number == call)


def test_an_interrupted_search_returns_the_best_point_so_far() -> None:
    fun = interrupt_at(61)
    result = minimize(fun, np.ones(3), 0.5, seed=0)
    assert result.reason == "interrupted"
    assert not result.success
    assert "keyboard" in result.message
    assert result.fun == sphere(np.array(fun.points[:60])).min() == sphere(result.x)
    assert result.nfev == 60


def test_points_of_the_generation_that_was_interrupted_count() -> None:
    result = minimize(interrupt_at(5), np.ones(3), 0.5, method="spectral", seed=0)
    assert result.nfev == 4
    assert result.nit == 0
    assert result.fun == sphere(result.x)
    with pytest.raises(KeyboardInterrupt):
        minimize(interrupt_at(1), np.ones(3), 0.5)


@pytest.mark.parametrize("where", ["callback", "noisy", "pool"])
def test_interruptions_elsewhere(where: str) -> None:
    def callback(search: Search) -> None:
        if where == "callback" and search.iterations == 3:
            raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool:
        result = minimize(
            interrupt_at(10**9 if where == "callback" else 50),
            np.ones(3),
            0.5,
            seed=0,
            noisy=where == "noisy",
            callback=callback,
            executor=pool if where == "pool" else None,
        )
    assert result.reason == "interrupted"
    assert math.isfinite(result.fun)
    assert result.nfev <= 50


# Points changed in place.


def spoiled(x: Any) -> Any:
    value = (x * x).sum(-1)
    x *= 0
    x -= 7
    return value


def honest(result: SearchResult) -> None:
    assert result.success
    assert float((result.x * result.x).sum()) == result.fun <= 1e-8


@pytest.mark.parametrize(
    "x0", [np.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(3)], ids=["numpy", "64", "32"]
)
@pytest.mark.parametrize("how", ["single", "batched", "pool"])
def test_functions_may_change_what_they_get(x0: Any, how: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        executor = pool if how == "pool" else None
        honest(
            minimize(
                spoiled, x0, 0.5, seed=0, target=1e-8, batched=how == "batched", executor=executor
            )
        )


def test_points_that_were_asked_for_or_looked_at_are_copies() -> None:
    for x0 in (np.ones(3), torch.ones(3, dtype=torch.float64)):
        search, plain = (Search(x0, 0.5, seed=0) for _ in range(2))
        for each in (search, plain):
            mine = np.full((1, 3), 0.5)
            each.inject(mine)
            mine[...] = 9
        for _ in range(5):
            points, same = search.ask(), plain.ask()
            np.testing.assert_array_equal(points, same)
            points *= 0
            for each in (search, plain):
                each.tell(same, (same * same).sum(-1))
            for handed in (search.mean, search.best, search.state_dict()["best_x"]):
                handed *= 0
        np.testing.assert_array_equal(search.best, plain.best)
        assert float((search.best * search.best).sum()) == search.best_fun


# Starts and values.


@pytest.mark.parametrize(
    "value", [1 + 2j, np.complex128(3), np.array(1j), torch.tensor(1j), None, "1.0", [1.0, 2.0]]
)
def test_values_that_are_no_real_numbers_are_mistakes(value: object) -> None:
    with pytest.raises(TypeError, match="fun must return a real number"):
        minimize(lambda x: value, np.ones(2), 0.5)
    with pytest.raises((TypeError, ValueError), match="fun must return one"):
        minimize(lambda x: value, np.ones(2), 0.5, batched=True)


@pytest.mark.parametrize("value", [np.full(6, 1j), torch.full((6,), 1j), [1j] * 6, ["1"] * 6])
def test_complex_values_cannot_be_told(value: object) -> None:
    search = Search(np.ones(2), 0.5, seed=0)
    x = search.ask()
    with pytest.raises(TypeError, match="numbers must be real"):
        search.tell(x, value)
    assert search.evaluations == 0


def test_tensors_with_gradients_can_be_told() -> None:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    search = Search(torch.ones(3, dtype=torch.float64), 0.5, seed=0)
    points = search.ask()
    search.tell(points, [(weight * p * p).sum() for p in points])
    assert search.iterations == 1


# Budgets.


@pytest.mark.parametrize("max_evals", [*range(1, 12), 29, 61])
@pytest.mark.parametrize(
    "options", [{}, {"noisy": True}, {"method": PaperNES}, {"restarts": "ipop"}, {"batched": True}]
)
def test_the_allowed_evaluations_are_used_and_never_exceeded(
    max_evals: int, options: dict[str, Any]
) -> None:
    fun = Recorded(sphere)
    result = minimize(fun, np.ones(3), 0.5, seed=0, max_evals=max_evals, **options)
    assert sum(x.size // 3 for x in fun.points) == result.nfev <= max_evals
    assert result.nfev == max_evals or options.get("noisy")
    assert result.reason == "max_evals"
    if not options.get("noisy"):
        assert result.fun == sphere(result.x)


@pytest.mark.parametrize("chance", [0.3, 1.0])
def test_noise_with_failures_has_a_finite_answer_within_the_budget(chance: float) -> None:
    rng = np.random.default_rng(0)

    def noisy(x: Array) -> float:
        failed = rng.uniform() < (chance if fun.calls > 380 else 0.3)
        return math.nan if failed else float(sphere(x) + 0.1 * rng.standard_normal())

    fun = Recorded(noisy)
    result = minimize(fun, np.ones(3), 0.5, seed=0, noisy=True, max_evals=400)
    assert math.isfinite(result.fun)
    assert fun.calls == result.nfev <= 400
    assert np.isfinite(result.x).all()


def test_plans_of_evaluations_fit_what_is_left() -> None:
    for left in range(1, 32):
        noise = Reevaluation(repeats=3.0)
        plan = noise.plan(10, left)
        assert len(plan) == left
        counts = np.bincount(plan)
        assert len(counts) == min(10, left)
        assert counts.max() - counts.min() <= 1
        np.testing.assert_allclose(noise.average(plan, plan.astype(float)), np.arange(len(counts)))


# Ties.


def test_ties_share_their_weights() -> None:
    rng = np.random.default_rng(0)
    for shape in ((7,), (3, 8), (2, 3, 5)):
        values = rng.integers(0, 4, shape).astype(float)
        values[..., 0] = np.inf
        table = rng.standard_normal(shape[-1])
        found = assign(values, table)[0].reshape(-1, shape[-1])
        for row, weights in zip(values.reshape(-1, shape[-1]), found, strict=True):
            ranked = table[np.argsort(np.argsort(row, kind="stable"))]
            np.testing.assert_allclose(
                weights, [ranked[row == value].mean() for value in row], atol=1e-14
            )


def test_many_ties_cost_little_memory() -> None:
    values = np.random.default_rng(0).integers(0, 50, 20_000).astype(float)
    tracemalloc.start()
    assign(values, np.linspace(1, -1, 20_000), np.linspace(2, -1, 20_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6


# Workers that hang.


def processes() -> Executor:
    return ProcessPoolExecutor(2, mp_context=get_context("fork"))


def hangs_now_and_then(x: Array) -> float:
    if x[0] > 0.8:
        time.sleep(600)
    return float(sphere(x))


def none_left() -> bool:
    """Whether all child processes are gone, soon."""
    for _ in range(100):
        if not active_children():
            return True
        time.sleep(0.05)
    return False


def test_workers_that_hang_are_replaced_and_ended() -> None:
    made: list[Executor] = []

    def pool() -> Executor:
        made.append(processes())
        return made[-1]

    result = minimize(
        hangs_now_and_then, np.full(2, 0.6), 0.2, seed=0, max_evals=48, executor=pool, timeout=0.5
    )
    assert len(made) > 1
    assert result.first_failure is not None
    assert result.first_failure.startswith("TimeoutError")
    assert result.failures < result.nfev / 2
    assert result.fun < 0.2
    assert none_left()


def dies(x: Array) -> float:
    os._exit(1)


def test_a_pool_whose_workers_always_die_ends_the_search() -> None:
    with (
        ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool,
        pytest.raises(BrokenExecutor),
    ):
        minimize(dies, np.ones(2), 0.5, executor=pool)
    with pytest.raises(BrokenExecutor) as caught:
        minimize(dies, np.ones(2), 0.5, executor=processes)
    assert "at all 12 points of the first two generations" in caught.value.__notes__[0]
    assert none_left()
