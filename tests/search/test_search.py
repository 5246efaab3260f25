"""Ask and tell: types, injected points, saving and loading, restarts, and bad input."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from eigenstep.search import REASONS, Search, minimize, run
from eigenstep.search.stopping import Restarts, Start
from eigenstep_lab.baselines.paper_nes import PaperNES, usual_population

from .problems import Array, ellipsoid, rastrigin, rosenbrock, sphere

METHODS = ("spectral", "separable", "lowrank", PaperNES)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("d", [1, 2, 7])
def test_every_method_minimizes(method: object, d: int) -> None:
    population = usual_population(d) if method is PaperNES else None
    options = {"method": method, "population": population, "target": 1e-12, "max_evals": 50_000}
    result = minimize(sphere, np.full(d, 1.5), 0.7, seed=1, **options)
    assert result.success, result.message
    assert result.fun <= 1e-12
    assert result.fun == sphere(result.x)
    history = result.history
    # Long histories have every second generation, or fewer
    unrecorded = (history.stride - 1) * max(history.population)
    assert result.nfev - unrecorded <= history.nfev[-1] <= result.nfev


def test_a_rotated_ellipsoid_is_learned() -> None:
    from .problems import rotation

    R = rotation(8)
    search = Search(np.ones(8), 1.0, seed=0, target=1e-10)
    result = run(search, lambda x: ellipsoid(x @ R.T, 1e6), batched=True)
    assert result.success
    assert result.nfev < 6000
    basis = search.distribution.basis
    assert basis is not None
    axes = np.argsort(-search.distribution.axes())
    aligned = np.abs(np.einsum("id,di->i", R, basis[:, axes]))
    assert aligned.min() > 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_in_torch_out(dtype: torch.dtype) -> None:
    def fun(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == dtype
        return x.square().sum(-1)

    one = minimize(fun, torch.ones(3, dtype=dtype), 0.5, seed=0, target=1e-6)
    many = minimize(fun, torch.ones(3, dtype=dtype), 0.5, seed=0, target=1e-6, batched=True)
    assert isinstance(one.x, torch.Tensor)
    assert one.x.dtype == dtype
    assert torch.equal(one.x, many.x)
    assert one.nfev == many.nfev
    assert one.success


def test_float32_points_are_recognized_when_they_come_back() -> None:
    search = Search(torch.ones(3), 0.5, seed=0)
    x = search.ask().double().numpy()
    for order in (np.arange(len(x)), np.roll(np.arange(len(x)), 2)):
        np.testing.assert_array_equal(search.asked.rows(x[order]), order)


@pytest.mark.parametrize("method", ["spectral", "auto"])
def test_order_of_points_does_not_matter(method: str) -> None:
    a, b = (Search(np.zeros(4), 0.5, method=method, seed=3) for _ in range(2))
    for _ in range(40):
        x = a.ask()
        a.tell(x, rosenbrock(x))
        y = b.ask()[::-1]
        b.tell(y, rosenbrock(y))
    assert a.descending == (method == "auto")
    np.testing.assert_allclose(a.mean, b.mean, rtol=1e-9)


def test_injected_points_are_asked_for_and_attract_the_search() -> None:
    best = np.full(5, 3.0)
    search = Search(np.zeros(5), 0.5, seed=0)
    plain = Search(np.zeros(5), 0.5, seed=0)
    search.inject(best)
    x = search.ask()
    assert (x == best).all(-1).any()
    search.tell(x, sphere(x - best))
    y = plain.ask()
    plain.tell(y, sphere(y - best))
    assert search.best_fun == 0
    assert sphere(search.mean - best) < 0.8 * sphere(plain.mean - best)
    # A point at six times the distance of samples must not make the distribution jump there.
    assert np.abs(search.mean).max() < 2.5
    assert not (search.ask() == best).all(-1).any()


def test_more_injected_points_than_fit_wait_for_the_next_generation() -> None:
    search = Search(np.zeros(2), 0.5, seed=0)
    points = np.arange(16.0).reshape(8, 2)
    search.inject(points)
    first = search.ask()
    assert len(first) == search.population == 6
    search.tell(first, sphere(first))
    second = search.ask()
    assert {tuple(p) for p in points} <= {tuple(p) for p in [*first, *second]}


def test_ipop_doubles_and_bipop_alternates() -> None:
    rng = np.random.default_rng(0)
    ipop, start, sizes = Restarts(), Start(8), []
    for _ in range(4):
        start = ipop(start, 100, rng)
        sizes.append(start.population)
    assert sizes == [16, 32, 64, 128]
    bipop, start, made = Restarts(bipop=True), Start(8), []
    for _ in range(12):
        start = bipop(start, 1000 if start.large else 300, rng)
        made.append(start)
    assert made[0].large
    large, small = [s for s in made if s.large], [s for s in made if not s.large]
    assert [s.population for s in large] == [8 * 2 ** (i + 1) for i in range(len(large))]
    assert small
    for s in small:
        assert 8 <= s.population <= 128
        assert 0.01 <= s.width <= 1
        assert s.max_evals == 500
        assert s.population % 2 == 0
    assert bipop.small_evals <= bipop.large_evals + 300


@pytest.mark.parametrize("restarts", ["ipop", "bipop"])
def test_restarts_find_the_global_minimum(restarts: str) -> None:
    """Rastrigin's function has 11^d minima in this box; from one start, the small population ends
    in a wrong one.
    """
    options = {"bounds": (-5, 5), "target": 1e-8, "max_evals": 60_000, "batched": True}
    alone, again = (
        minimize(rastrigin, np.full(4, 3.3), 1.0, seed=0, restarts=how, **options)
        for how in (None, restarts)
    )
    assert not alone.success
    assert again.success
    assert again.restarts > 0
    assert sorted(set(again.history.run)) == list(range(again.restarts + 1))


def test_starts_may_come_from_a_function() -> None:
    starts = []

    def start(rng: np.random.Generator) -> Array:
        starts.append(rng.uniform(-4, 4, 3))
        return starts[-1]

    result = minimize(rastrigin, start, 0.3, seed=0, restarts="ipop", max_restarts=2, batched=True)
    assert len(starts) == 3
    assert result.restarts == 2


def test_tell_takes_points_of_ones_own() -> None:
    search = Search(np.full(3, 2.0), 1.0, seed=0)
    rng = np.random.default_rng(0)
    for _ in range(300):
        x = search.mean + search.sigma * rng.standard_normal((9, 3))
        search.tell(x, sphere(x))
    assert sphere(search.mean) < 1e-6


@pytest.mark.parametrize(
    ("points", "values", "text"),
    [
        (np.zeros((6, 2)), np.zeros(6), "3 coordinates"),
        (np.zeros((6, 3)), np.zeros(5), "one value for each"),
        (np.zeros((1, 3)), np.zeros(1), "at least two points"),
        (np.full((6, 3), np.nan), np.zeros(6), "finite"),
        (np.full((6, 3), 9.0), np.zeros(6), "within the bounds"),
    ],
)
def test_bad_tells_change_nothing(points: Array, values: Array, text: str) -> None:
    search = Search(np.zeros(3), 1.0, seed=0, bounds=(-5, 5))
    search.ask()
    before = pickle.dumps(search.state_dict()["run"])
    with pytest.raises(ValueError, match=text):
        search.tell(points, values)
    assert search.evaluations == search.iterations == 0
    assert pickle.dumps(search.state_dict()["run"]) == before
    with pytest.raises(ValueError, match="3 coordinates"):
        search.inject(np.zeros(2))


def test_end_needs_a_known_reason() -> None:
    search = Search(np.zeros(3), 1.0)
    with pytest.raises(ValueError, match="reason must be one of target"):
        search.end("boredom")
    search.end()
    assert search.stop() == "callback"
    assert all(reason.message for reason in REASONS.values())
