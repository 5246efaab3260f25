"""The Gaussian for noisy values: its learning rate follows signal and noise, and it needs no second
evaluations.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from eigenstep.search import minimize
from eigenstep.search.cautious import LEAST_RATE, CautiousGaussian, next_rate
from eigenstep.search.gaussian import SpectralGaussian

from .problems import Recorded, ellipsoid, rotation, sphere

D = 5


def run(fun, generations: int, rng: np.random.Generator) -> CautiousGaussian:  # type: ignore[no-untyped-def]
    state = CautiousGaussian.start(np.full(D, 2.0), 0.5)
    for _ in range(generations):
        z = state.draw(rng, 8)
        state = state.update(z, np.array([float(fun(x)) for x in state.sample(z)]))
    return state


def test_half_a_rate_is_half_a_step() -> None:
    """Of the mean, of the logarithm of sigma and, to first order, of the covariance."""
    rng = np.random.default_rng(1)
    whole = SpectralGaussian.start(np.ones(D), 0.5)
    half = replace(CautiousGaussian.start(np.ones(D), 0.5), rate=0.5)
    z = whole.draw(rng, 8)
    values = ellipsoid(whole.sample(z), 100.0)
    a, b = whole.update(z, values), half.update(z, values)
    # The mean itself is rounded
    np.testing.assert_allclose(b.mean - 1, (a.mean - 1) / 2, rtol=1e-12, atol=1e-15)
    assert np.abs(b.log_eigs).max() == pytest.approx(np.abs(a.log_eigs).max() / 2, rel=0.2)


def test_the_rate_follows_signal_and_noise() -> None:
    # By hand: energy 2, squared trend 1, so noise 1 and signal 1 - 2/19, per noise 17/19, wanted
    # 1.4 * 0.2.
    ratio = (17 / 19) / (1.4 * 0.2)
    assert ratio > 2  # the change is cut at one
    assert next_rate(0.2, 1.0, 2.0) == pytest.approx(0.2 * math.exp(0.02))
    ratio = (0.2 - 2 / 19) / 1.8 / (1.4 * 0.2)
    assert next_rate(0.2, 0.2, 2.0) == pytest.approx(0.2 * math.exp(0.02 * (ratio - 1)))
    assert next_rate(0.2, 0.0, 2.0) == pytest.approx(0.2 * math.exp(-0.02))
    assert next_rate(1.0, 5.0, 5.1) == 1.0
    assert next_rate(LEAST_RATE, 0.0, 1.0) == LEAST_RATE
    assert next_rate(0.5, 0.0, 0.0) == pytest.approx(0.5 * math.exp(-0.05))  # nothing moved


def test_noise_lowers_the_rate_and_a_clear_way_does_not() -> None:
    rng = np.random.default_rng(0)
    assert run(lambda x: rng.standard_normal(), 400, np.random.default_rng(1)).rate < 0.1
    assert run(lambda x: x.sum(), 60, np.random.default_rng(1)).rate > 0.5


def test_it_comes_nearer_than_repeated_evaluations() -> None:
    R, ends = rotation(8), {}
    for method in ("cautious", "spectral"):
        found = []
        for seed in range(3):
            rng = np.random.default_rng(seed)
            result = minimize(
                lambda x, rng=rng: ellipsoid(R @ x, 100.0) + 3 * rng.standard_normal(),
                np.full(8, 2.0),
                1.0,
                method=method,
                noisy=True,
                seed=seed,
                max_evals=6000,
            )
            assert result.nfev <= 6000
            found.append(float(ellipsoid(R @ result.x, 100.0)))
        ends[method] = np.median(found)
    assert ends["cautious"] < 0.5 * ends["spectral"]


def test_nothing_is_evaluated_twice_but_the_answer() -> None:
    fun = Recorded(lambda x: sphere(x) + 0.1 * np.sin(1e6 * fun.calls))
    result = minimize(fun, np.ones(4), 0.5, method="cautious", noisy=True, seed=0, max_evals=402)
    assert fun.calls == result.nfev == 402
    assert len(np.unique(fun.points, axis=0)) == 401  # the center, twice
