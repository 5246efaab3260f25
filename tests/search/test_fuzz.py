"""Whatever values come, the state stays finite, the basis orthogonal and the
eigenvalues positive.
"""

from __future__ import annotations

import numpy as np
import pytest

from eigenstep.search import Search
from eigenstep_lab.baselines.paper_nes import PaperNES

from .problems import Array, advance, ellipsoid


def hostile(rng: np.random.Generator, x: Array) -> Array:
    """Return values of one of several nasty kinds."""
    values = rng.standard_normal(len(x))
    share = rng.uniform(size=len(x))
    kinds = [
        np.full(len(x), rng.choice([0.0, np.inf, -np.inf, np.nan, 1e308])),
        np.round(values),
        values * 1e308,
        np.where(share < 0.5, np.nan, values),
        np.where(share < 0.9, rng.choice([np.inf, -np.inf], len(x)), values),
        values * 5e-324,
        x[:, 0],  # without a minimum
        -(x**2).sum(-1).clip(max=1e300),  # away from everything
        ellipsoid(np.clip(x, -1e100, 1e100)),
    ]
    return kinds[rng.integers(len(kinds))]


def check(search: Search) -> None:
    state = search.distribution
    for array in (state.mean, state.sigma, state.log_eigs, state.axes(), state.deviations()):
        assert np.isfinite(array).all()
    assert (state.axes() > 0).all()
    if getattr(state, "basis", None) is not None:
        d = len(state.mean)
        assert np.abs(state.basis.T @ state.basis - np.eye(d)).max() < 1e-10


@pytest.mark.parametrize(
    ("method", "d", "tells"),
    [
        ("spectral", 3, 2000),
        ("spectral", 45, 500),
        (PaperNES, 4, 1000),
        ("separable", 5, 1000),
        ("lowrank", 6, 1000),
    ],
)
def test_thousands_of_hostile_tells(method: str, d: int, tells: int) -> None:
    rng = np.random.default_rng(d)
    search = Search(np.zeros(d), 1.0, method=method, seed=0)
    for index in range(tells):
        with np.errstate(over="ignore"):
            x = search.ask()
            assert np.isfinite(x).all()
            # Phases of one kind do more harm than a mixture.
            phase = np.random.default_rng(index // 50) if index % 2 else rng
            search.tell(x, hostile(phase, x))
        check(search)


@pytest.mark.parametrize("method", ["spectral", PaperNES, "separable", "lowrank"])
def test_a_search_recovers_from_hostile_values(method: str) -> None:
    rng = np.random.default_rng(0)
    search = Search(np.full(4, 2.0), 1.0, method=method, seed=0, max_evals=10**6, tolfun=0, tolx=0)
    for _ in range(30):
        values = rng.standard_normal(search.population)
        values[rng.uniform(size=len(values)) < 0.5] = np.nan
        search.tell(search.ask(), values)
    advance(search, lambda x: ellipsoid(x, 10.0), 800)
    assert ellipsoid(search.mean, 10.0) < 1e-8
