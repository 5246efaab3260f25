"""A saved search goes on bit for bit, by any method; damaged and foreign states are refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from eigenstep.search import Search, Start
from eigenstep_lab.baselines.paper_nes import PaperNES

from .problems import Array, Isotropic, advance, ellipsoid, rastrigin, rosenbrock, sphere


@dataclass
class Narrower:
    """Each run starts with half the width of the last one."""

    width: float = 1.0

    def __call__(self, ended: Start, evals: int, rng: np.random.Generator) -> Start:
        self.width /= 2
        return replace(ended, width=self.width)


def noisy(x: Array) -> Array:
    return rastrigin(x) + np.sin(1e6 * x).sum(-1)


def broken(x: Array) -> Array:
    return np.where(x[:, 0] > 1.5, np.nan, rosenbrock(x))


CASES: dict[str, tuple[Any, Callable[[Array], Array], dict[str, Any]]] = {
    "spectral": (np.full(4, 0.5), rastrigin, {"restarts": "bipop", "bounds": (-2, 2)}),
    "noisy": (np.full(4, 0.5), noisy, {"restarts": "bipop", "tolx": 0.03, "noisy": True}),
    "cautious": (np.ones(5), noisy, {"method": "cautious", "noisy": True, "bounds": (-3, 3)}),
    "lowrank": (np.ones(30), broken, {"method": "lowrank", "bounds": (-3, 3)}),
    "separable": (
        np.ones(3),
        rastrigin,
        {"method": "separable", "restarts": "ipop", "max_restarts": 2},
    ),
    "descent": (
        np.full(4, 1.5),
        rastrigin,
        {"method": "auto", "restarts": "bipop", "bounds": (-5, 5)},
    ),
    "limited": (np.ones(410), lambda x: ellipsoid(x, 100.0), {"method": "auto"}),
    "mixed": (
        np.zeros(5),
        lambda x: sphere(x - 1),
        {"categories": {1: 3, 4: 5}, "integers": [2], "restarts": "ipop", "max_restarts": 1},
    ),
    "own": (np.full(3, 0.5), rastrigin, {"method": Isotropic, "restarts": Narrower()}),
}


def by_state(search: Search, make: Callable[[int], Search]) -> Search:
    other = make(2)
    other.load_state_dict(pickle.loads(pickle.dumps(search.state_dict())))
    return other


def by_pickle(search: Search, make: Callable[[int], Search]) -> Search:
    return pickle.loads(pickle.dumps(search))


@pytest.mark.parametrize("save", [by_state, by_pickle])
@pytest.mark.parametrize("name", CASES)
def test_a_saved_search_goes_on_bit_for_bit(
    name: str, save: Callable[[Search, Callable[[int], Search]], Search]
) -> None:
    """Saved before ``ask``, and in every second of these generations after it."""
    x0, fun, options = CASES[name]

    def make(seed: int) -> Search:
        return Search(x0, 0.5, seed=seed, **options)

    def ask(search: Search, generation: int) -> Array:
        if generation == 201:  # more than fit into a generation
            search.inject(np.tile(x0, (50, 1)))
        return search.ask()

    search, copies, points = make(1), {}, []
    for generation in range(300):
        if generation in (0, 2, 4, 30, 100):
            copies[generation] = save(search, make)
        points.append(ask(search, generation))
        if generation in (1, 3, 7, 61, 201, 261):
            copies[generation] = save(search, make)
        search.tell(points[-1], fun(points[-1]))
    for generation, copy in copies.items():
        waiting = generation % 2 == 1
        last = 300 if generation in (0, 201, 261) else generation + 20
        for number, want in enumerate(points[generation:last], generation):
            x = want if waiting else ask(copy, number)
            np.testing.assert_array_equal(x, want)
            copy.tell(x, fun(x))
            waiting = False
    for copy in (copies[0], copies[201], copies[261]):
        assert (copy.restarts, copy.decisions) == (search.restarts, search.decisions)
        assert (copy.stop(), copy.best_fun) == (search.stop(), search.best_fun)
        for entry, want in vars(search.history).items():
            np.testing.assert_array_equal(getattr(copy.history, entry), want)
    assert search.restarts > 0 or "restarts" not in options


def test_a_search_that_ends_together_with_its_descent_can_be_saved() -> None:
    search, copy = (Search([1.3], 0.5, method="auto", seed=seed, max_evals=2) for seed in range(2))
    while not search.stop():
        advance(search, lambda x: np.floor(x[:, 0]))
    assert search.descent is not None
    assert search.descent.over == "rough"
    copy.load_state_dict(search.state_dict())
    assert copy.stop() == "max_evals"
    assert copy.best == search.best


def test_states_of_other_searches_are_refused() -> None:
    state = Search(np.zeros(3), 1.0).state_dict()
    for other in (
        Search(np.zeros(4), 1.0),
        Search(np.zeros(3), 1.0, method=PaperNES),
        Search(np.zeros(3), 1.0, noisy=True),
        Search(np.zeros(3), 1.0, restarts="ipop"),
    ):
        with pytest.raises(ValueError, match="same arguments"):
            other.load_state_dict(state)


STATE = Search(np.zeros(3), 1.0, seed=0, restarts="ipop").state_dict()


@pytest.mark.parametrize("key", STATE)
def test_damaged_states_are_refused_and_change_nothing(key: str) -> None:
    search = Search(np.zeros(3), 1.0, seed=0, restarts="ipop")
    advance(search, sphere)
    state = search.state_dict()
    search.load_state_dict(state)
    before = pickle.dumps(search)
    missing = {name: value for name, value in state.items() if name != key}
    for damaged in (missing, *({**state, key: wrong} for wrong in ("nonsense", 1j, [1, "2"]))):
        with pytest.raises((ValueError, TypeError)):
            search.load_state_dict(damaged)
        assert pickle.dumps(search) == before


@pytest.mark.parametrize(
    ("case", "path", "value"),
    [
        ("spectral", ("run", "distribution", "basis"), np.eye(2)),
        ("spectral", ("run", "distribution", "sigma"), np.array(np.nan)),
        ("spectral", ("run", "distribution", "path"), np.zeros(5)),
        ("lowrank", ("run", "distribution", "directions"), np.zeros((3, 30))),
        ("lowrank", ("run", "distribution", "last"), np.full(9, np.inf)),
        ("mixed", ("run", "distribution", "numbers", "sigma"), np.array(np.nan)),
        ("descent", ("descent", "over"), 1j),
    ],
)
def test_damaged_phases_are_refused(case: str, path: tuple[str, ...], value: object) -> None:
    x0, _, options = CASES[case]
    search = Search(x0, 0.5, seed=0, **options)
    part = state = search.state_dict()
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    before = search.distribution
    with pytest.raises(ValueError, match=f"damaged: '{path[-1]}'"):
        search.load_state_dict(state)
    assert search.distribution is before


def test_distributions_that_are_no_dataclasses_cannot_give_a_state_dict() -> None:
    class Bare:
        def __init__(self, mean: Array, sigma: float) -> None:
            self.mean = mean

    with pytest.raises(TypeError, match="pickle the search instead"):
        Search(np.ones(3), 0.5, method=Bare).state_dict()  # type: ignore[arg-type]
