"""Bounds and integers: points are always allowed ones, and minima at walls and between integers are
found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eigenstep.search import Search, minimize
from eigenstep.search.arguments import read_space
from eigenstep.search.space import Space
from eigenstep_lab.baselines.paper_nes import PaperNES

from .problems import Array, ellipsoid, sphere


def domain(
    bounds: object, d: int = 3, integers: object = None, scale: Array | None = None
) -> Space:
    return read_space(np.ones(d) if scale is None else scale, bounds, integers)


@pytest.mark.parametrize(
    ("bounds", "lower", "upper"),
    [
        ((0, 1), [0, 0, 0], [1, 1, 1]),
        ((None, [1, 2, 3]), [-np.inf] * 3, [1, 2, 3]),
        ([(0, 1), (None, 2), (-1, None)], [0, -np.inf, -1], [1, 2, np.inf]),
        (None, [-np.inf] * 3, [np.inf] * 3),
    ],
)
def test_ways_to_write_bounds(bounds: object, lower: list[float], upper: list[float]) -> None:
    made = domain(bounds)
    np.testing.assert_array_equal(made.lower, lower)
    np.testing.assert_array_equal(made.upper, upper)


def test_bounds_of_scipy() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    made = domain(optimize.Bounds([0, -np.inf, 1], [2, 3, np.inf]))
    np.testing.assert_array_equal(made.lower, [0, -np.inf, 1])


def test_far_from_the_bounds_nothing_changes_and_beyond_the_walls_space_is_mirrored() -> None:
    made = domain([(0, 2), (1, None), (None, -1)], scale=np.array([1.0, 0.5, 2.0]))
    np.testing.assert_allclose(made.margin, [0.2, 0.5, 2.0])
    u = np.random.default_rng(0).uniform(-9, 9, (200, 3))
    x = made.decode(u)
    assert made.contains(x)
    inside = (u * made.scale > made.lower + made.margin) & (
        u * made.scale < made.upper - made.margin
    )
    assert inside.sum() > 100
    np.testing.assert_array_equal(x[inside], (u * made.scale)[inside])
    # Walls are at -0.2 and 2.2, at 0.5, and at 1; from wall to wall and back is a period.
    walls = np.array([2.2, 0.5, 1.0]) / made.scale
    np.testing.assert_allclose(made.decode(2 * walls - u), x, atol=1e-12)
    np.testing.assert_allclose(made.decode(u + np.array([4.8, 0, 0]))[:, 0], x[:, 0], atol=1e-12)
    folded, flipped = made.fold(np.array([2.4, 0.0, 4.0]) / made.scale)
    np.testing.assert_allclose(folded * made.scale, [2.0, 1.0, -2.0])
    np.testing.assert_array_equal(flipped, [True, True, True])
    assert not made.fold(np.array([5.0, 4.0, -3.0]))[1].any()  # two reflections undo each other


def test_the_map_is_smooth_up_to_the_bounds_and_encode_inverts_it() -> None:
    made = domain((-1, 3), d=1, scale=np.array([2.0]))
    u = np.linspace(-0.7, 1.7, 2001)[:, None]  # from wall to wall
    x = made.decode(u)
    np.testing.assert_allclose([x[0, 0], x[-1, 0]], [-1, 3], atol=1e-12)
    slope = np.diff(x[:, 0]) / np.diff(u[:, 0]) / 2
    assert slope.min() >= 0
    assert slope.max() <= 1 + 1e-9
    assert np.abs(np.diff(slope)).max() < 0.01
    np.testing.assert_allclose(made.encode(x), u, atol=1e-7)


@pytest.mark.parametrize("method", ["spectral", "separable", "lowrank", PaperNES])
def test_a_mean_beyond_a_wall_and_its_mirror_image_are_the_same_search(method: str) -> None:
    """Folding changes the coordinates of the Gaussian, not the points that it samples."""
    made = domain([(0, 2), (None, None), (None, 1)])
    distribution = Search(np.zeros(3), 0.5, method=method).distribution
    z = np.random.default_rng(0).standard_normal((6, 3))
    values = np.arange(6.0)
    outside = distribution.update(z, values)
    outside = outside.reflected(np.array([2.5, 0.3, 2.3]), np.zeros(3, dtype=bool))
    mean, flipped = made.fold(outside.mean)
    inside = outside.reflected(mean, flipped)
    signs = np.where(flipped & (method in ("separable", "lowrank")), -1.0, 1.0)
    for _ in range(3):
        same = inside.sample(signs * z), outside.sample(z)
        np.testing.assert_allclose(*map(made.decode, same), atol=1e-13)
        inside, outside = inside.update(signs * z, values), outside.update(z, values)


@pytest.mark.parametrize("method", ["auto", "spectral", "separable", "lowrank"])
@pytest.mark.parametrize(
    ("target", "bounds"),
    [
        (np.full(5, 3.0), (-1, 1)),
        (np.array([3.0, 0, -3, 0.5, 9]), (-1, 1)),
        (np.full(5, -2.0), (0, None)),
    ],
)
def test_minima_at_the_walls(method: str, target: Array, bounds: tuple[Any, Any]) -> None:
    def fun(x: Array) -> float:
        np.testing.assert_array_equal(x, np.clip(x, *bounds))
        return float(ellipsoid(x - target, 100.0))

    result = minimize(fun, np.full(5, 0.5), 0.3, bounds=bounds, method=method, seed=0)
    np.testing.assert_allclose(result.x, np.clip(target, *bounds), atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_mixed_integers_do_not_get_stuck(seed: int) -> None:
    """Correlated and badly scaled: the continuous part converges long before the integers are all
    right.
    """
    best = np.array([0.3, 5.0, -0.7, -3.0, 2.0, 0.1])

    def fun(x: Array) -> float:
        y = x - best
        return float(ellipsoid(y, 100.0) + (y.sum()) ** 2)

    result = minimize(
        fun,
        np.zeros(6),
        1.0,
        integers=[1, 3, 4],
        seed=seed,
        target=1e-10,
        restarts="ipop",
        max_evals=20000,
    )
    assert result.success
    np.testing.assert_array_equal(result.x[[1, 3, 4]], [5, -3, 2])


def test_bounded_integers_reach_their_bounds_and_not_beyond() -> None:
    seen: set[float] = set()

    def fun(x: Array) -> float:
        seen.update(x.tolist())
        return float(-x.sum())

    result = minimize(
        fun, np.zeros(3), 1.0, integers=[0, 1, 2], bounds=(-1.5, 2.5), seed=0, max_evals=400
    )
    np.testing.assert_array_equal(result.x, [2, 2, 2])
    assert seen <= {-1.0, 0.0, 1.0, 2.0}


def test_coordinates_of_different_scale() -> None:
    scale = np.array([1e-6, 1.0, 1e6])
    result = minimize(
        lambda x: float(sphere(x / scale - 1)), np.zeros(3), scale, seed=0, target=1e-12, tolx=0
    )
    assert result.success
    assert result.nfev < 600
