"""Categories without order: chances, the margin, saving, and functions of numbers, integers and
categories.
"""

from __future__ import annotations

import numpy as np
import pytest

from eigenstep.search import Search, minimize
from eigenstep.search.gaussian import SpectralGaussian
from eigenstep.search.mixed import Mixed

from .problems import Array, Recorded, advance, sphere

COUNTS = {1: 3, 4: 5}
OPTIONS = {
    "categories": COUNTS,
    "integers": [2],
    "bounds": [(-3, 3), (None, None), (-6, 6), (-3, 3), (None, None)],
}


def fun(x: Array) -> float:
    return float((x[0] - 1) ** 2 + (x[3] + 0.5) ** 2 + (x[2] - 4) ** 2 + (x[1] != 2) + (x[4] != 1))


def mixed() -> Mixed:
    return Mixed.start(np.zeros(5), 1.0, SpectralGaussian.start, COUNTS)


def test_samples_have_the_chances() -> None:
    state = mixed()
    np.testing.assert_allclose(state.chances, [[1 / 3] * 3 + [0, 0], [0.2] * 5])
    rng = np.random.default_rng(0)
    x = state.sample(state.draw(rng, 30))
    for column, count in COUNTS.items():  # evenly spread: each value as often as its chance says
        np.testing.assert_array_equal(np.bincount(x[:, column].astype(int)), [30 // count] * count)
    np.testing.assert_array_equal(state.sample(state.whiten(x))[:, [1, 4]], x[:, [1, 4]])
    np.testing.assert_allclose(state.sample(state.whiten(x)), x, atol=1e-12)


def test_chances_follow_the_weights_and_stay_above_the_margin() -> None:
    state, rng = mixed(), np.random.default_rng(0)
    for _ in range(300):
        z = state.draw(rng, 12)
        x = state.sample(z)
        before = state.chances
        state = state.update(z, 1.0 * (x[:, 1] != 2) + 0.5 * (x[:, 4] != 0))
        np.testing.assert_allclose(state.chances.sum(-1), 1)
        assert ((state.chances > 0) == (before > 0)).all()
    assert state.mean[[1, 4]].tolist() == [2, 0]
    least = (1 - 0.9**0.5) / np.array([2, 4])
    np.testing.assert_allclose(state.chances[0, :2], least[0], rtol=1e-9)
    np.testing.assert_allclose(state.chances[1, 1:], least[1], rtol=1e-9)
    # All likely values at once have the chance 0.9, so that one sample in ten tries something else.
    np.testing.assert_allclose(state.chances.max(-1).prod(), 0.9, rtol=1e-9)


def test_equal_values_teach_nothing() -> None:
    state = mixed()
    z = state.draw(np.random.default_rng(0), 12)
    np.testing.assert_allclose(state.update(z, np.zeros(12)).chances, state.chances, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_numbers_integers_and_categories(seed: int) -> None:
    seen = Recorded(fun)
    result = minimize(seen, np.zeros(5), 1.0, seed=seed, target=1e-8, max_evals=4000, **OPTIONS)
    assert result.success
    assert result.x[[1, 2, 4]].tolist() == [2, 4, 1]
    assert "categories" in result.decisions[0]
    x = np.array(seen.points)
    assert set(x[:, 1]) == {0, 1, 2}
    assert set(x[:, 4]) == {0, 1, 2, 3, 4}


def test_injected_points_keep_their_categories() -> None:
    search = Search(np.zeros(5), 0.1, seed=0, **OPTIONS)
    point = np.array([3.0, 1, 6, -3, 4])
    search.inject(point)
    advance(search, lambda x: np.where((x == point).all(-1), 0.0, 1 + sphere(x)))
    assert search.best_fun == 0
    assert search.distribution.chances[1, 4] > 0.2  # type: ignore[attr-defined]
