"""Many searches side by side."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eigenstep.search import minimize
from eigenstep_lab.extras import minimize_batch
from search.problems import ellipsoid, sphere
from search.test_mistakes import spoiled
from search.test_random_use import KINDS, Hostile


def test_many_runs_are_like_single_ones():
    """They draw other random numbers, so what can be compared is how many evaluations they need."""

    def fun(x):
        return ellipsoid(x, 100.0)

    starts = np.random.default_rng(0).standard_normal((20, 5))
    many = minimize_batch(fun, starts, 1.0, seed=0, target=1e-8)
    assert many.success.all()
    assert many.x.shape == (20, 5)
    np.testing.assert_allclose(fun(many.x), many.fun)
    options = {"target": 1e-8, "batched": True, "method": "spectral"}
    single = [minimize(fun, x0, 1.0, seed=i, **options).nfev for i, x0 in enumerate(starts)]
    assert np.median(many.nfev) == pytest.approx(np.median(single), rel=0.1)


def test_one_of_many_is_exactly_a_single_run():
    """With the same random numbers: a batch of one."""
    many = minimize_batch(sphere, np.ones((1, 4)), 0.5, seed=3, target=1e-6)
    one = minimize(sphere, np.ones(4), 0.5, seed=3, target=1e-6, batched=True, method="spectral")
    np.testing.assert_array_equal(many.x[0], one.x)
    assert many.nfev[0] == one.nfev


def test_finished_runs_stay_as_they_are_and_each_may_have_its_own_function():
    centers = torch.tensor([[0.0] * 3, [50.0] * 3, [-9.0] * 3], dtype=torch.float64)

    def fun(x):
        assert x.shape[:1] == (3,)
        return (x - centers[:, None]).square().sum(-1)

    many = minimize_batch(fun, torch.zeros(3, 3, dtype=torch.float64), 0.1, seed=0)
    assert many.success.all()
    assert isinstance(many.x, torch.Tensor)
    torch.testing.assert_close(many.x, centers, atol=1e-8, rtol=0)
    assert many.nfev[0] < many.nfev[1]


def test_bad_batches_of_runs():
    with pytest.raises(ValueError, match="of shape"):
        minimize_batch(sphere, np.ones(3), 0.5)
    with pytest.raises(ValueError, match="values of shape"):
        minimize_batch(lambda x: x, np.ones((2, 3)), 0.5)
    with pytest.raises(ValueError, match="sigma0"):
        minimize_batch(sphere, np.ones((2, 2)), 1e-30)


def test_runs_without_any_value_are_no_success():
    assert (
        minimize_batch(
            lambda x: np.full(x.shape[:2], np.nan), np.ones((2, 3)), 0.5, tolx=0.4
        ).success.sum()
        == 0
    )


@pytest.mark.parametrize("max_evals", [*range(1, 12), 29, 61])
def test_the_budget_is_kept(max_evals):
    assert minimize_batch(sphere, np.ones((2, 3)), 0.5, max_evals=max_evals).nfev.max() == max_evals


def test_a_batch_of_searches_hands_out_copies():
    result = minimize_batch(spoiled, np.ones((3, 2)), 0.5, seed=0, target=1e-8)
    np.testing.assert_array_equal(sphere(result.x), result.fun)


@settings(deadline=None, max_examples=60)
@given(KINDS, st.integers(1, 4), st.integers(1, 4), st.integers(1, 300), st.integers(0, 1000))
def test_batches_of_searches(kinds, runs, d, max_evals, seed):
    fun = Hostile([kind for kind in kinds if kind != "raise"] or ["nan"], seed)

    def values(x):
        return np.array([fun.rows(run) for run in x])

    with np.errstate(over="ignore"):
        result = minimize_batch(
            values, np.ones((runs, d)), 0.5, seed=seed, max_evals=max_evals, tolx=1e-3
        )
    assert (result.nfev <= max_evals).all()
    assert np.isfinite(result.fun[result.success]).all()
    assert not np.isnan(result.fun).any()
    assert np.isfinite(result.x).all()
