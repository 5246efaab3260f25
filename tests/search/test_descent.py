"""The start for smooth functions: its formulas, where it gives up, what it hands over, and that it
can be saved.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eigenstep.search import Search, minimize
from eigenstep.search.descent import (
    BLOCKS,
    LEAST_CURVATURE,
    MEMORY,
    SOFTENING,
    SWEEPS,
    Descent,
    LimitedDescent,
)
from eigenstep.search.stopping import Tally

from .problems import Array, advance, ellipsoid, rastrigin, rosenbrock, rotation, sphere


def step(state: Descent, fun) -> int:  # type: ignore[no-untyped-def]
    """Tell a descent the values of the points that it asks for; return how many there were."""
    points = state.ask(np.random.default_rng(0), 10**9)
    state.tell(points, np.arange(len(points)), np.array([float(fun(x)) for x in points]))
    return len(points)


def descend(fun, x0: Array, sigma: float = 1.0, kind=Descent, **options) -> tuple[Descent, int]:  # type: ignore[no-untyped-def]
    state, count = kind.begin(x0, sigma, **options), 0
    while not state.over:
        count += step(state, fun)
    return state, count


@pytest.mark.parametrize("curvature", [0.3, 1.0, 7.0, -2.0])
def test_the_factor_has_the_inverse_hessian_of_bfgs(curvature: float) -> None:
    """Against the textbook's update of the matrix itself, after the self-scaling and Powell's
    damping.
    """
    rng, d = np.random.default_rng(0), 5
    L, s, slope = rng.standard_normal((d, d)), rng.standard_normal(d), rng.standard_normal(d)
    y = rng.standard_normal(d)
    y += (curvature - y @ s / (s @ s)) * s
    state = replace(Descent.begin(np.zeros(d), 1.0), factor=L, scaled=True, moves=1)
    state._learn(s, slope, y)
    factor, turned = state.factor, state.slope
    H, move = L @ L.T, L @ s
    change, gradient = (np.linalg.solve(L.T, v) for v in (y, slope))
    old = np.linalg.solve(H, move)
    if curvature < LEAST_CURVATURE:
        share = (1 - LEAST_CURVATURE) * (move @ old) / (move @ old - move @ change)
        change = share * change + (1 - share) * old
    H = H * max(1.0, (move @ old / (move @ change)) ** (2 * SOFTENING))
    r = 1 / (move @ change)
    left = np.eye(d) - r * np.outer(move, change)
    np.testing.assert_allclose(
        factor @ factor.T, left @ H @ left.T + r * np.outer(move, move), rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(turned, factor.T @ gradient, rtol=1e-9, atol=1e-12)


def test_slopes_are_gradients_in_the_coordinates_of_the_factor() -> None:
    R = rotation(4)
    state = Descent.begin(np.array([1.0, -2.0, 0.5, 3.0]), 0.5)
    for _ in range(2):
        x = state.ask(np.random.default_rng(0), 10**9)[::-1]
        state.tell(x, np.arange(len(x))[::-1], ellipsoid(x @ R.T, 100.0))
    gradient = R.T @ (2 * 100 ** (np.arange(4) / 3) * (R @ state.mean))
    np.testing.assert_allclose(state.slope, 0.5 * gradient, rtol=1e-5)


@pytest.mark.parametrize("d", [1, 2, 10, 30])
def test_smooth_functions_are_solved(d: int) -> None:
    R = rotation(d)
    state, count = descend(lambda x: ellipsoid(R @ x, 1e6), np.full(d, 2.0), tolfun=1e-11)
    assert state.over == "converged"
    assert ellipsoid(R @ state.mean, 1e6) < 1e-9
    assert count < 80 * (d + 2)
    state, count = descend(rosenbrock, np.linspace(-1, 0.5, d + 1), tolfun=1e-11)
    # This function has a second, local minimum
    assert state.value < 1e-8 or np.abs(state.mean - 1).max() > 1
    assert count < 200 * (d + 2)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: float(np.floor(10 * sphere(x))),  # steps: no slope anywhere
        lambda x: float(sphere(x) + np.sin(1e9 * x).sum()),  # noise
        lambda x: float(np.abs(np.sin(1e3 * x)).sum() + sphere(x)),  # waves
        lambda x: float(sphere(x)) if x[0] > 0.99999 else np.inf,  # failures
    ],
    ids=["steps", "noise", "waves", "failures"],
)
def test_it_gives_up_soon_where_nothing_is_smooth(fun) -> None:  # type: ignore[no-untyped-def]
    state, count = descend(fun, np.ones(10))
    assert state.over == "rough"
    assert count < 30 * 10


@pytest.mark.parametrize("d", [5, 20])
def test_where_the_first_move_is_no_parabolas_it_mostly_gives_up_after_one_slope(d: int) -> None:
    def ripples(x: Array) -> float:
        return float(sphere(x) + 5 * (1 - np.cos(20 * np.pi * x)).sum())

    counts = []
    for seed in range(9):
        state, count = descend(ripples, np.random.default_rng(seed).uniform(-4, 4, d))
        counts.append(count if state.over == "rough" else np.inf)
    assert np.median(counts) <= d + 8
    # But a first step that is ten thousand times too long is no reason.
    state, count = descend(sphere, np.ones(d), 1e4)
    assert state.over == "converged"
    assert state.value < 1e-6
    assert count < 30 * d


def test_in_many_dimensions_the_first_moves_are_in_blocks() -> None:
    d = 40
    state, fun = LimitedDescent.begin(np.ones(d), 0.5), lambda x: float((x[: d - 2] ** 2).sum())
    for number in range(BLOCKS):
        first, last = state.span
        assert (first, last) == (number * d // BLOCKS, (number + 1) * d // BLOCKS)
        before = state.mean
        while state.swept == number:
            step(state, fun)
        moved = np.flatnonzero(state.mean != before)
        # The last one is flat
        np.testing.assert_array_equal(moved, range(first, last) if number < BLOCKS - 1 else [])
        np.testing.assert_allclose(state.mean[first:last], 0 if len(moved) else 1, atol=1e-5)
    state, count = descend(
        lambda x: ellipsoid(rotation(d) @ x, 100.0), np.ones(d), kind=LimitedDescent, tolfun=1e-9
    )
    assert state.over == "converged"
    assert state.swept == SWEEPS * BLOCKS  # type: ignore[attr-defined]
    assert count < 80 * d


def test_without_a_minimum_it_stops_far_away() -> None:
    state, count = descend(lambda x: float(x.sum()), np.zeros(3))
    assert state.over == "far"
    assert count < 100


def test_values_of_other_points_end_it() -> None:
    for rows in ([-1, -1], [0, 0], [0, -1], []):
        state = Descent.begin(np.ones(3), 1.0)
        state.tell(np.full((len(rows), 3), 0.5), np.array(rows, dtype=int), np.zeros(len(rows)))
        assert state.over == "rough"


def test_scales_do_not_matter() -> None:
    """Of space exactly, and of values as far as rounding allows."""
    plain, count = descend(rosenbrock, np.zeros(4), 0.5)
    wide, again = descend(lambda x: rosenbrock(x / 1024), np.zeros(4), 512.0)
    assert again == count
    np.testing.assert_array_equal(wide.mean, 1024 * plain.mean)
    large, again = descend(lambda x: 2.0**30 * rosenbrock(x), np.zeros(4), 0.5)
    assert abs(again - count) < 0.2 * count
    np.testing.assert_allclose(large.mean, plain.mean, atol=1e-5)


def test_minimize_says_what_it_did() -> None:
    smooth = minimize(rosenbrock, np.zeros(5), 0.5, seed=0, target=1e-9)
    order = minimize(rosenbrock, np.zeros(5), 0.5, seed=0, target=1e-9, method="spectral")
    assert smooth.success
    assert smooth.nfev < order.nfev / 2
    choice = "the method 'spectral', because there are 5 coordinates"
    assert smooth.decisions == ("a descent, in case values are smooth", choice)
    assert order.decisions == ()
    found = minimize(rastrigin, np.full(4, 3.3), 1.0, seed=0, max_evals=2000)
    assert found.decisions[2].startswith("the descent found a minimum, 35.8")
    for options, why in (
        ({"noisy": True}, "noisy"),
        ({"integers": [0]}, "integers"),
        ({"max_evals": 5}, "too few"),
    ):
        assert (
            why
            in minimize(sphere, np.ones(4), 0.5, seed=0, **{"max_evals": 100, **options}).decisions[
                0
            ]
        )


def test_after_a_minimum_the_search_begins_anew_and_else_where_the_descent_came_to() -> None:
    def cut(x: Array) -> Array:
        return np.where(sphere(x) > 20, sphere(x), np.inf)

    for fun, moved in ((rastrigin, False), (cut, True)):
        search = Search(np.full(4, 3.3), 1.0, method="auto", seed=0, bounds=(-6, 6))
        while search.descending:
            advance(search, fun)
        assert np.allclose(search.mean, 3.3) != moved
        assert search.sigma == 1.0


def test_descents_from_elsewhere_go_on_as_long_as_they_find_lower_minima() -> None:
    tally = Tally(0.01, descents=50, runs=400, lowest=1.0, best=1.0)
    assert tally.descend
    for other in ({"best": 0.9}, {"descents": 400}, {"lowest": np.inf}):
        assert not replace(tally, **other).descend
    centers = np.random.default_rng(0).uniform(-4, 4, (20, 3))

    def peaks(x: Array) -> float:
        return float(1 - (np.linspace(0.2, 1, 20) * np.exp(-((x - centers) ** 2).sum(-1))).max())

    result = minimize(
        peaks, centers[10] + 0.5, 0.5, seed=0, bounds=(-5, 5), restarts="ipop", max_evals=5000
    )
    assert sum("the descent" in decision for decision in result.decisions) > 2
    assert result.restarts > 2


def two_loops(state: LimitedDescent) -> Array:
    """The inverse Hessian of L-BFGS as a matrix, by the textbook's update of it."""
    d = len(state.slope)
    s, y = state.pairs[-1]
    H = (s @ y) / (y @ y) * np.eye(d)
    for s, y in state.pairs:
        r = 1 / (s @ y)
        left = np.eye(d) - r * np.outer(s, y)
        H = left @ H @ left.T + r * np.outer(s, s)
    return -H @ state.slope


def test_the_limited_descent_is_that_of_lbfgs() -> None:
    rng, d = np.random.default_rng(0), 30
    C = np.diag(np.linspace(1, 50, d))
    s = rng.standard_normal((MEMORY, d))
    state = LimitedDescent.begin(np.zeros(d), 1.0)
    assert state.direction.tolist() == [0.0] * d
    for k in range(MEMORY):
        state._learn(s[k], rng.standard_normal(d), C @ s[k])
    np.testing.assert_allclose(state.direction, two_loops(state), rtol=1e-9, atol=1e-12)
    pairs = state.factor
    state._learn(s[0], s[1], -s[0])
    assert state.factor is pairs


def test_in_many_dimensions_memory_is_linear() -> None:
    d = 1000
    search = Search(np.full(d, 1.0), 0.5, method="auto", seed=0, max_evals=60 * d, target=1e-6)
    state = search.descent
    assert isinstance(state, LimitedDescent)
    while not search.stop():
        points = search.ask()
        assert len(points) <= 20
        search.tell(points, ellipsoid(points, 10.0))
        assert sum(np.size(value) for value in vars(state).values() if value is not None) <= 40 * d
    assert search.stop() == "target"


@pytest.mark.parametrize("size", [1e-320, 1e-150, 1e150, 1e306])
def test_values_of_any_size_do_no_harm(size: float) -> None:
    result = minimize(
        lambda x: size * float(sphere(x - 1)), np.zeros(3), 0.5, seed=0, tolfun=0.0, max_evals=600
    )
    assert np.isfinite(result.x).all()
    assert result.fun <= 3 * size
