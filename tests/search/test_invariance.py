"""Runs do not depend on the scale of values, on coordinates, or on where the origin is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from eigenstep.search import METHODS, Search
from eigenstep.search.gaussian import SpectralGaussian
from eigenstep_lab.baselines.paper_nes import PaperNES

from .problems import Array, Recorded, advance, rosenbrock, rotation


def run(
    method: str, function: Callable[[Array], Array], x0: Array, sigma: float = 0.5
) -> list[Array]:
    search = Search(x0, sigma, method=method, seed=7)
    seen = Recorded(function)
    advance(search, seen, 60)
    return seen.points


@pytest.mark.parametrize("method", ["spectral", "separable", "lowrank", "cautious", PaperNES])
@pytest.mark.parametrize(
    "transform",
    [np.log1p, lambda f: 1e200 * f, lambda f: -np.exp(-1e-3 * f), lambda f: f**3 - 1e6],
    ids=["log", "huge", "bounded", "cubed"],
)
def test_order_preserving_transforms_change_nothing(
    method: str, transform: Callable[[Array], Array]
) -> None:
    x0 = np.zeros(4)
    for a, b in zip(
        run(method, rosenbrock, x0),
        run(method, lambda x: transform(rosenbrock(x)), x0),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("method", [*METHODS, PaperNES])
def test_translations_and_scales_move_the_run(method: str) -> None:
    shift = np.array([10.0, -3.0, 2.0, 0.25])
    plain = run(method, rosenbrock, np.zeros(4))
    moved = run(method, lambda x: rosenbrock((x - shift) / 1024), shift, 512.0)
    for a, b in zip(plain, moved, strict=True):
        np.testing.assert_allclose((b - shift) / 1024, a, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", [*METHODS, PaperNES])
def test_sample_and_whiten_are_inverse(method: str) -> None:
    search = Search(np.ones(5), 0.5, method=method, seed=1)
    advance(search, lambda x: rosenbrock(x @ rotation(5)), 30)
    state, z = search.distribution, np.random.default_rng(0).standard_normal((4, 5))
    for stretch in (None, np.array([1.0, 2.0, 1.0, 3.0, 1.0])):
        np.testing.assert_allclose(state.whiten(state.sample(z, stretch), stretch), z, rtol=1e-8)


@pytest.mark.parametrize("kind", [SpectralGaussian, PaperNES])
def test_rotations_turn_the_run(kind: type[SpectralGaussian] | type[PaperNES]) -> None:
    R, d = rotation(5), 5
    plain = kind.start(np.full(d, 0.3), 0.5)
    turned = replace(kind.start(R @ plain.mean, 0.5), basis=R)
    rng = np.random.default_rng(0)
    for _ in range(60):
        z = plain.draw(rng, 10)
        a, b = plain.sample(z), turned.sample(z)
        np.testing.assert_allclose(b, a @ R.T, rtol=1e-6, atol=1e-9)
        plain = plain.update(z, rosenbrock(a))  # type: ignore[arg-type]
        turned = turned.update(z, rosenbrock(b @ R))  # type: ignore[arg-type]
    assert rosenbrock(plain.mean) < rosenbrock(np.full(d, 0.3))


def test_the_same_seed_gives_the_same_run_and_another_seed_another_one() -> None:
    def first(seed: int) -> Array:
        return Search(np.zeros(3), 1.0, seed=seed).ask()

    np.testing.assert_array_equal(first(1), first(1))
    assert not np.array_equal(first(1), first(2))
