"""Functions that raise, return nonsense, run on workers, hang or die with their worker; noise;
history.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from eigenstep.search import Search, minimize
from eigenstep.search.sampling import Reevaluation, rank_change

from .problems import Array, Recorded, advance, ellipsoid, rosenbrock, sphere


def test_a_batch_that_fails_fails_as_a_whole() -> None:
    fun = Recorded(sphere, RuntimeError("every third"), lambda call: call % 3 == 0)
    result = minimize(fun, np.ones(3), 0.5, method="spectral", seed=0, target=1e-8, batched=True)
    assert result.success
    assert result.failures == 8 * (fun.calls // 3)


@pytest.mark.parametrize("batched", [False, True])
def test_wrong_kinds_of_values_are_mistakes_and_not_failures(batched: bool) -> None:
    with pytest.raises((TypeError, ValueError), match="fun must return"):
        minimize(lambda x: np.zeros((2, 3)), np.ones(3), 0.5, batched=batched)
    if not batched:
        with pytest.raises(TypeError, match="got dict"):
            minimize(lambda x: {}, np.ones(3), 0.5)


def test_workers_change_nothing_but_the_time() -> None:
    plain = minimize(rosenbrock, np.zeros(3), 0.5, seed=0, max_evals=300)
    with ThreadPoolExecutor(2) as pool:
        parallel = minimize(rosenbrock, np.zeros(3), 0.5, seed=0, max_evals=300, executor=pool)
    np.testing.assert_array_equal(plain.x, parallel.x)


def dies_sometimes(x: Array) -> float:
    if x[0] > 0.9:
        os._exit(1)
    return float(sphere(x))


def test_a_pool_that_breaks_is_replaced() -> None:
    made: list[Executor] = []

    def pool() -> Executor:
        made.append(ProcessPoolExecutor(1, mp_context=get_context("fork")))
        return made[-1]

    result = minimize(dies_sometimes, np.full(2, 0.6), 0.2, seed=3, max_evals=60, executor=pool)
    for executor in made:
        executor.shutdown()
    assert len(made) > 1
    assert 0 < result.failures < result.nfev
    assert result.fun < 0.5


def test_impossible_ways_to_evaluate() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="batched"):
        minimize(sphere, np.ones(2), 0.5, executor=pool, batched=True)
    with pytest.raises(ValueError, match="timeout needs an executor"):
        minimize(sphere, np.ones(2), 0.5, timeout=1.0)
    for executor in (3, lambda: 3):
        with pytest.raises(TypeError, match="must have a method submit"):
            minimize(sphere, np.ones(2), 0.5, executor=executor)
    for timeout, error in ((-1.0, ValueError), ("1", TypeError), (math.nan, ValueError)):
        with pytest.raises(error, match="timeout"):
            minimize(sphere, np.ones(2), 0.5, executor=Executor, timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fun must be a function"):
        minimize(3, np.ones(2), 0.5)  # type: ignore[arg-type]


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    minimize(sphere, np.ones(2), 0.5, seed=0, max_evals=60, progress=True)
    assert "value" in capsys.readouterr().out


# Noise.


def test_rank_change_tells_noise_from_none() -> None:
    rng = np.random.default_rng(0)
    values = np.arange(20.0)
    assert rank_change(values, values[:5] + 1e-9) < 0
    assert (
        np.mean([rank_change(rng.standard_normal(20), rng.standard_normal(5)) for _ in range(200)])
        > 0
    )


def test_values_are_averaged() -> None:
    noise = Reevaluation(repeats=3.0)
    plan = noise.plan(10, 1000)
    np.testing.assert_array_equal(np.bincount(plan), [4, 4, *[3] * 8])
    values = plan + np.where(np.arange(len(plan)) >= 30, 0.4, 0.0)
    np.testing.assert_allclose(noise.average(plan, values), [0.1, 1.1, *range(2, 10)])


def test_noise_is_averaged_away() -> None:
    """With noise as large as the values themselves near the end, averaging gets several times
    closer.
    """

    def solve(noisy: bool, seed: int) -> float:
        rng = np.random.default_rng(seed)
        search = Search(np.full(5, 3.0), 1.0, seed=seed, noisy=noisy, max_evals=6000, tolfun=0)
        while not search.stop():
            advance(search, lambda x: sphere(x) + rng.standard_normal(len(x)))
        return float(sphere(search.mean))

    plain, averaged = (
        np.median([solve(noisy, seed) for seed in range(7)]) for noisy in (False, True)
    )
    assert averaged < 0.5 * plain


def test_without_noise_little_is_evaluated_twice() -> None:
    result = minimize(sphere, np.ones(5), 0.5, seed=0, noisy=True, target=1e-8)
    plain = minimize(sphere, np.ones(5), 0.5, method="spectral", seed=0, target=1e-8)
    assert result.success
    assert result.nfev < 1.6 * plain.nfev


# History.


def test_history_knows_the_shape_of_the_function() -> None:
    history = minimize(lambda x: ellipsoid(x, 1e4), np.ones(4), 0.5, seed=0, batched=True).history
    assert history.ratio[-1] == pytest.approx(100, rel=0.7)
    assert history.axes[-1].shape == history.mean[-1].shape == (4,)
    long = minimize(
        sphere, np.ones(200), 0.5, seed=0, max_evals=100, batched=True, method="separable"
    ).history
    assert long.mean[-1].shape == (64,)
