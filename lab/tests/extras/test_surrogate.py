"""The quadratic model: what it learns, and when it is used."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from eigenstep.search import Search, minimize
from eigenstep_lab.extras.surrogate import Modeled, least_squares, rank_correlation
from search.problems import ellipsoid, rotation, sphere

D = 4


def taught(fun, generations, d=D, seed=0):  # type: ignore[no-untyped-def]
    state, rng = Modeled.start(np.full(d, 2.0), 0.5), np.random.default_rng(seed)
    for _ in range(generations):
        z = state.draw(rng, 10)
        state = state.update(z, np.array([fun(x) for x in state.sample(z)]))
    return state


def quadratic(x):
    return ellipsoid(rotation(D) @ x, 1e4)


def test_of_a_parabola_it_learns_slope_and_hessian():
    state = taught(quadratic, 6)
    H = 2 * rotation(D).T @ np.diag(1e4 ** (np.arange(D) / (D - 1))) @ rotation(D)
    gaussian = state.gaussian
    assert gaussian.basis is not None
    L = gaussian.sigma * gaussian.basis * np.exp(gaussian.log_eigs / 2)
    wanted, slope = L.T @ H @ L, L.T @ (H @ gaussian.mean)
    scale = slope @ state.slope / (slope @ slope)  # values are fitted in units of their range
    np.testing.assert_allclose(
        state.hessian, scale * wanted, atol=1e-4 * np.abs(state.hessian).max()
    )
    np.testing.assert_allclose(state.slope, scale * slope, atol=1e-4 * np.abs(state.slope).max())
    assert state.agreement > 0.8
    least = state._minimum()
    assert least @ least <= D
    around = np.random.default_rng(0).standard_normal((1000, D))
    around *= D**0.5 / np.sqrt((around * around).sum(-1, keepdims=True))
    assert state.predict(least[None]) < 0.9 * state.predict(around).min()


def test_the_model_grows_with_the_points():
    diagonal, full = taught(quadratic, 1), taught(quadratic, 3)
    assert (diagonal.filled, full.filled) == (10, 30)
    assert np.count_nonzero(np.diag(diagonal.hessian)) == np.count_nonzero(diagonal.hessian) == D
    assert np.count_nonzero(full.hessian) == D * D
    linear, nothing = taught(sphere, 1, d=8), taught(sphere, 1, d=12)
    assert linear.slope.all()
    assert not linear.hessian.any()
    assert not nothing.slope.any()
    # A full one would have too many coefficients
    assert np.count_nonzero(taught(sphere, 200, d=30).hessian) == 30


def test_its_own_minimum_comes_last_and_not_from_too_far():
    state = taught(lambda x: float(x.sum()), 4)  # a plane, whose minimum is nowhere
    assert state.trusted
    z = state.draw(np.random.default_rng(3), 10)
    plain = state.gaussian.draw(np.random.default_rng(3), 10)
    np.testing.assert_array_equal(z[:-1], plain[:-1])
    assert np.linalg.norm(z[-1]) <= D**0.5 * (1 + 1e-12)
    assert state.predict(z)[-1] == state.predict(z).min()


def test_where_it_cannot_predict_the_search_is_the_same_without_it():
    order = np.random.default_rng(5)
    state, plain, rng = (
        Modeled.start(np.ones(D), 0.5),
        Modeled.start(np.ones(D), 0.5).gaussian,
        np.random.default_rng(1),
    )
    used = 0
    for _ in range(40):
        z, values = state.draw(rng, 8), order.standard_normal(8)
        used += state.trusted
        state, plain = state.update(z, values), plain.update(z, values)
        np.testing.assert_array_equal(state.mean, plain.mean)
    assert used <= 2


@pytest.mark.parametrize(
    "values",
    [np.zeros(8), np.full(8, np.inf), np.linspace(0, 1.7e308, 8), -np.linspace(0, 1e308, 8)],
)
def test_plateaus_failures_and_huge_values_do_no_damage(values):
    state, rng = Modeled.start(np.ones(D), 0.5), np.random.default_rng(0)
    for _ in range(12):
        state = state.update(state.draw(rng, 8), values)
        assert np.isfinite(state.draw(rng, 8)).all()
    assert state.filled == (0 if np.isinf(values).any() else 30)


def test_units_of_values_do_not_matter():
    for a, b in zip(points(lambda f: f), points(lambda f: 2.0**30 * f), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(points(lambda f: f), points(lambda f: f + 100), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def points(transform):  # type: ignore[no-untyped-def]
    search, seen = Search(np.ones(D), 0.5, method=Modeled, seed=0), []
    for _ in range(12):
        seen.append(search.ask())
        search.tell(seen[-1], [transform(quadratic(x)) for x in seen[-1]])
    return seen


def test_rank_correlation():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 30))
    b = a + b
    stats = pytest.importorskip("scipy.stats")
    assert rank_correlation(a, b) == pytest.approx(stats.kendalltau(a, b).statistic)
    assert rank_correlation(a, -a) == -1
    assert rank_correlation(a, np.zeros(30)) == 0
    assert rank_correlation(a[:3], np.array([np.inf, np.inf, np.inf])) == 0


def test_least_squares():
    rng = np.random.default_rng(0)
    features = rng.standard_normal((20, 3)) * [1, 1e8, 1e-8]
    wanted = features @ [1.0, 1e-8, 1e8]
    np.testing.assert_allclose(least_squares(features, wanted), [1.0, 1e-8, 1e8], rtol=1e-6)
    assert least_squares(np.zeros((5, 2)), np.ones(5)) is None
    assert least_squares(features, np.full(20, np.nan)) is None


def test_where_rounding_disturbs_slopes_it_saves_most_evaluations():
    d, R = 8, rotation(8)

    def rough(x):
        return ellipsoid(R @ x, 1e4) * (1 + 1e-5 * float(np.sin(1e9 * sphere(x))))

    model, plain = (
        minimize(rough, np.full(d, 2.0), 1.0, method=method, seed=0, target=1e-3)
        for method in (Modeled, "spectral")
    )
    assert model.success
    assert plain.success
    assert model.nfev < 0.7 * plain.nfev


def test_in_single_precision_it_saves_evaluations():
    R = torch.from_numpy(rotation(8)).float()

    def fun(x):
        return ((100 ** (torch.arange(8, dtype=x.dtype) / 7)) * (R @ x) ** 2).sum()

    start, counts = torch.full((8,), 2.0, dtype=torch.float32), []
    for method in (Modeled, "spectral"):
        results = [
            minimize(fun, start, 1.0, method=method, seed=seed, target=1e-4) for seed in range(3)
        ]
        assert all(result.success for result in results)
        counts.append(np.median([result.nfev for result in results]))
    assert counts[0] < 0.7 * counts[1]


@pytest.mark.parametrize("after", [0, 5, 40])
def test_a_saved_search_goes_on_bit_for_bit(after):
    def fun(x):
        return quadratic(x) if x[0] < 1.2 else np.nan

    search, other = (
        Search(np.ones(D), 0.5, method=Modeled, bounds=(-3, 3), restarts="bipop", seed=seed)
        for seed in (0, 1)
    )
    for _ in range(after):
        asked = search.ask()
        search.tell(asked, [fun(x) for x in asked])
    other.load_state_dict(pickle.loads(pickle.dumps(search.state_dict())))
    for _ in range(10):
        a, b = search.ask(), other.ask()
        np.testing.assert_array_equal(a, b)
        search.tell(a, [fun(x) for x in a])
        other.tell(b, [fun(x) for x in b])
