"""The Gaussian of linear memory: compared with dense matrices, with separable scales, saved, and in
many dimensions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from eigenstep.search import Search, lowrank, minimize
from eigenstep.search.lowrank import (
    ABSORB,
    CROWD,
    SCALE_SPEED,
    SUCCESS_MEMORY,
    LowRankGaussian,
    wanted_success,
)
from eigenstep.search.sampling import rates

from .problems import Array, advance, ellipsoid, rosenbrock, rotation, sphere


def correlations(state: LowRankGaussian) -> Array:
    """``I + V^T Diag(exp v - 1) V``."""
    return (
        np.eye(len(state.mean))
        + state.directions.T @ np.diag(np.expm1(state.log_eigs)) @ state.directions
    )


def root(matrix: Array) -> Array:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(values)) @ vectors.T


def learned(d: int = 7, generations: int = 30, seed: int = 0) -> LowRankGaussian:
    """Some Gaussian that has learned."""
    state, rng, R = LowRankGaussian.start(np.ones(d), 0.5), np.random.default_rng(seed), rotation(d)
    for _ in range(generations):
        z = state.draw(rng, 10)
        state = state.update(z, ellipsoid(state.sample(z) @ R.T))
    return state


@pytest.mark.parametrize("rank", [0, 1, 3, 6])
def test_the_update_is_that_of_dense_matrices(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowrank, "RANK", rank)
    d, population = 7, 10
    state, rng, c = learned(d), np.random.default_rng(5), 1 / d
    order_weights = np.log((population + 1) / 2) - np.log(np.arange(1, population + 1))
    order_weights[order_weights > 0] /= order_weights[order_weights > 0].sum()
    order_weights[order_weights < 0] /= -order_weights[order_weights < 0].sum() * (
        1 + CROWD * population / d
    )
    known = rates(d, population, separable=True)
    many, one = min(0.5, SCALE_SPEED * known.rank_many), min(0.5, SCALE_SPEED * known.rank_one)
    for _ in range(5):
        z = state.draw(rng, population)
        K, D = correlations(state), np.exp(state.log_scales)
        values = rosenbrock(state.sample(z))
        new = state.update(z, values)

        weights = order_weights[values.argsort().argsort()]
        y = z @ root(K)
        step = weights @ y
        k = np.diag(K)
        unit = state.sigma * np.sqrt(D)
        np.testing.assert_allclose(state.sample(z), state.mean + unit * y, rtol=1e-10)
        np.testing.assert_allclose(new.mean, state.mean + unit * step, rtol=1e-9)
        memory = math.sqrt(c)
        p = (1 - memory) * state.path + math.sqrt(memory * (2 - memory) / (weights**2).sum()) * step

        factors = 1 + many * (weights @ (y**2 / k - 1) + ABSORB * np.log(k)) + one * (p**2 / k - 1)
        scales = D * np.maximum(factors, 0.1)
        center = np.exp(np.log(scales).mean())
        np.testing.assert_allclose(np.exp(new.log_scales), scales / center, rtol=1e-9)

        assert state.last is not None
        pairs = [float(np.sign(old - now)) for old in state.last for now in values]
        gain = (sum(pairs) - wanted_success(population) * sum(map(abs, pairs))) / len(pairs)
        success = (1 - SUCCESS_MEMORY) * state.success + SUCCESS_MEMORY * gain
        assert new.success == pytest.approx(success, rel=1e-9)
        assert float(new.sigma) == pytest.approx(
            float(state.sigma) * math.exp(success) * math.sqrt(center), rel=1e-9
        )

        ratio = np.diag(np.sqrt(D / np.exp(new.log_scales)))
        path = np.outer(ratio @ p, ratio @ p)
        A = (1 - c) * (np.eye(d) + ratio @ (K - np.eye(d)) @ ratio) + c * path
        eigs, vectors = np.linalg.eigh(A)
        differ = np.argsort(-np.abs(np.log(eigs / (1 - c))))
        eigs[differ[rank:]] = eigs[differ[rank:]].mean()
        want = (vectors * (eigs / eigs[differ[-1]])) @ vectors.T
        np.testing.assert_allclose(correlations(new), want, rtol=1e-7, atol=1e-9)
        state = new


def test_directions_stay_orthonormal_and_deviations_are_those_of_the_covariance() -> None:
    state = learned()
    V = state.directions
    np.testing.assert_allclose(V @ V.T, np.eye(len(V)), atol=1e-12)
    D = np.diag(np.exp(state.log_scales / 2))
    variances = float(state.sigma) ** 2 * np.diag(D @ correlations(state) @ D)
    np.testing.assert_allclose(state.deviations(), np.sqrt(variances), rtol=1e-10)


def test_on_a_plateau_nothing_is_learned_and_the_step_size_stays() -> None:
    state = replace(learned(), success=0.0)
    z = state.draw(np.random.default_rng(0), 10)
    state = replace(state, last=np.full(10, 3.0))
    after = state.update(z, np.full(10, 3.0))
    np.testing.assert_allclose(after.mean, state.mean, rtol=1e-12)
    assert after.success == 0.0
    assert (
        np.abs(after.path)
        <= np.abs(np.exp((state.log_scales - after.log_scales) / 2) * state.path) + 1e-9
    ).all()
    failed = state.update(z, np.full(10, np.inf))  # all have failed: worse than what was there
    assert failed.sigma < after.sigma
    assert np.isfinite(failed.last).all()


def turned(x: Array, signs: Array, order: Array) -> Array:
    """A rotation without a matrix: signs, then the real parts of a Fourier transform, which is
    orthogonal.
    """
    z = np.fft.fft((signs * x)[..., order], axis=-1, norm="ortho")
    return z.real + z.imag


def evaluations(method: str, fun: object, d: int, part: float, budget: int) -> float:
    start = np.random.default_rng(0).uniform(-1, 1, d)
    target = part * float(fun(start))  # type: ignore[operator]
    result = minimize(
        fun, start, 0.5, method=method, seed=0, target=target, max_evals=budget, batched=True
    )  # type: ignore[arg-type]
    return result.nfev if result.success else math.inf


@pytest.mark.parametrize("turn", [True, False])
def test_in_many_dimensions_it_needs_fewer_evaluations_than_scales_alone(turn: bool) -> None:
    d, rng = 500, np.random.default_rng(1)
    signs, order = rng.choice([-1.0, 1.0], d), rng.permutation(d)

    def fun(x: Array) -> Array:
        return ellipsoid(turned(x, signs, order) if turn else x, 1e6)

    x = rng.standard_normal((3, d))
    np.testing.assert_allclose(sphere(turned(x, signs, order)), sphere(x), rtol=1e-10)
    ours = evaluations("lowrank", fun, d, 0.03, 20 * d)
    assert ours < 0.6 * evaluations("separable", fun, d, 0.03, 20 * d)


@pytest.mark.parametrize("d", [1000, 30_000])
def test_memory_is_linear(d: int) -> None:
    search = Search(np.ones(d), 0.5, method="lowrank", seed=0)
    for _ in range(30 if d == 1000 else 3):
        advance(search, sphere)
        state = vars(search.distribution)
        assert sum(np.size(value) for value in state.values() if value is not None) <= 40 * d
    assert search.history.fun[-1] < search.history.fun[0]


def test_minimize_chooses_it_where_slopes_say_nothing() -> None:
    """Values in steps have no slopes: the descent sees that after a tenth of one, and the search
    goes on.
    """
    d = 500
    fun = lambda x: float(np.round(1e4 * np.log(sphere(x))))  # noqa: E731
    result = minimize(fun, np.ones(d), 0.5, seed=0, max_evals=6000)
    assert any(
        "'lowrank', because there are 500 coordinates" in decision for decision in result.decisions
    )
    (end,) = (decision for decision in result.decisions if decision.startswith("the descent"))
    assert "gave up" in end
    assert int(end.split()[-2]) <= d // 10 + 1
    assert sphere(result.x) < 0.2 * d
    plain = minimize(fun, np.ones(d), 0.5, seed=0, max_evals=6000, method="separable")
    assert sphere(result.x) < sphere(plain.x)
