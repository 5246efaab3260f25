"""Random options, functions and orders of calls: what can be said of every search, whatever happens
to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from eigenstep.search import METHODS, SCHEDULES, Search, minimize
from eigenstep.search.space import to_numpy

from .problems import Array, ellipsoid

RELAXED = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
NUMBERS = st.floats(-1e6, 1e6).map(lambda x: round(x, 6))


class Hostile:
    """A function that does one of many nasty things at each call, the same for the same seed."""

    KINDS = (
        *("normal", "nan", "inf", "raise", "tie", "huge", "tiny", "noise", "spoil"),
        *("integer", "tensor", "bigint"),
    )

    def __init__(self, kinds: list[str], seed: int) -> None:
        self.kinds, self.rng, self.calls = kinds, np.random.default_rng(seed), 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        x = np.asarray(x, dtype=np.float64) if not isinstance(x, np.ndarray) else x
        kind = self.kinds[self.rng.integers(len(self.kinds))]
        value = float(ellipsoid(x, 100.0))
        if kind == "raise":
            raise ZeroDivisionError("sometimes")
        if kind == "spoil":
            x *= 0
        return {
            "nan": math.nan,
            "inf": float(self.rng.choice([math.inf, -math.inf])),
            "tie": float(self.rng.integers(2)),
            "huge": float(self.rng.choice([1.7e308, -1.7e308])),
            "tiny": 5e-324 * float(self.rng.integers(9)),
            "noise": float(self.rng.standard_normal()),
            "integer": int(self.rng.integers(-5, 5)),
            "tensor": torch.tensor(value, dtype=torch.float16),
            "bigint": -(10**400),
        }.get(kind, value)

    def rows(self, x: Array) -> list[float]:
        return [float(v) if abs(v) <= 1.7e308 else math.inf for v in (self(row) for row in x)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, Any, dict[str, Any]]:
    """Draw a start, a step size and options, nearly always possible ones."""
    d = draw(st.integers(1, 6))
    x0 = np.array(draw(st.lists(NUMBERS, min_size=d, max_size=d)))
    sizes = st.floats(1e-3, 1e3)
    sigma0 = draw(st.one_of(sizes, st.lists(sizes, min_size=d, max_size=d).map(np.array)))
    options: dict[str, Any] = {
        "method": draw(st.sampled_from(list(METHODS))),
        "restarts": draw(st.sampled_from([None, *SCHEDULES])),
        "noisy": draw(st.booleans()),
        "population": draw(st.one_of(st.none(), st.integers(4, 40))),
        "max_evals": draw(st.integers(1, 400)),
        "max_iter": draw(st.one_of(st.none(), st.integers(1, 40))),
        "target": draw(st.one_of(st.none(), st.floats(-10, 10))),
        "tolx": draw(st.sampled_from([0.0, 1e-11, 1e-2])),
        "seed": draw(st.integers(0, 1000)),
    }
    width = draw(st.lists(st.floats(1e-2, 1e4), min_size=d, max_size=d).map(np.array))
    options["bounds"] = draw(
        st.sampled_from(
            [None, (x0 - width, x0 + width), (None, x0 + width), (x0, None), (x0 - width, x0)]
        )
    )
    if draw(st.booleans()):
        x0 = np.round(x0)
        options["integers"] = draw(st.lists(st.integers(0, d - 1), max_size=d, unique=True))
    if draw(st.booleans()):
        x0 = torch.tensor(x0, dtype=draw(st.sampled_from([torch.float64, torch.float32])))
    return x0, sigma0, options


KINDS = st.lists(st.sampled_from(Hostile.KINDS), min_size=1, max_size=5)


def check_sentence(error: Exception, *words: str) -> None:
    assert any(word in str(error) for word in words), error


def start(make: Callable[[], Any]) -> Any:
    """Run what may refuse its arguments, by a clear error alone."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        check_sentence(error, "must", "sigma0 is", "leave no room")
        assume(False)


@RELAXED
@given(problems(), KINDS, st.integers(0, 10**6))
def test_whatever_a_function_does(
    problem: tuple[Any, Any, dict[str, Any]], kinds: list[str], seed: int
) -> None:
    x0, sigma0, options = problem
    start(lambda: Search(x0, sigma0, **options))
    fun = Hostile(kinds, seed)
    try:
        with np.errstate(over="ignore"):
            result = minimize(fun, x0, sigma0, **options)
    except ZeroDivisionError as error:
        check_sentence(error, "sometimes")
        check_sentence(Exception(*error.__notes__), "first generation")
        return
    assert result.nfev == fun.calls <= options["max_evals"]
    assert result.failures <= result.nfev
    assert not result.success or math.isfinite(result.fun)
    assert not math.isnan(result.fun)
    x = np.asarray(result.x, dtype=np.float64)
    assert np.isfinite(x).all()
    domain = Search(x0, sigma0, **options)._space
    assert domain.contains(x)
    assert (x[domain.integer] == np.round(x[domain.integer])).all()
    if options["target"] is not None and result.success:
        assert result.reason == "target"


@RELAXED
@given(problems(), KINDS, st.data())
def test_calls_in_any_order(
    problem: tuple[Any, Any, dict[str, Any]], kinds: list[str], data: st.DataObject
) -> None:
    x0, sigma0, options = problem
    search = start(lambda: Search(x0, sigma0, **options))
    fun = Hostile([kind for kind in kinds if kind != "raise"] or ["nan"], 0)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    player = Player(search, fun, rng)
    actions = st.sampled_from(ACTIONS + 2 * ["tell_all"])
    for action in data.draw(st.lists(actions, min_size=1, max_size=25)):
        before = search.evaluations, search.iterations, search.failures
        with np.errstate(over="ignore"):
            try:
                getattr(player, action)()
            except (ValueError, TypeError) as error:
                check_sentence(error, "must", "needs")
                assert (search.evaluations, search.iterations, search.failures) == before
        state = search.distribution
        for array in (state.mean, state.sigma, state.axes(), state.deviations()):
            assert np.isfinite(array).all()
        assert (state.axes() > 0).all()
        assert search.best is None or search._space.contains(
            np.asarray(search.best, dtype=np.float64)
        )
        assert (search.best is None) == math.isinf(search.best_fun)


class Player:
    """Calls of a search in some order, right and wrong ones."""

    def __init__(self, search: Search, fun: Hostile, rng: np.random.Generator) -> None:
        self.search, self.fun, self.rng = search, fun, rng
        self.points = search.ask()

    def tell(self, points: Any) -> None:
        self.search.tell(points, self.fun.rows(to_numpy(points).copy()))
        self.points = self.search.ask()

    def tell_all(self) -> None:
        self.tell(self.points)

    def tell_shuffled(self) -> None:
        self.tell(self.points[self.rng.permutation(len(self.points))])

    def tell_some(self) -> None:
        self.tell(self.points[: self.rng.integers(1, len(self.points) + 1)])

    def tell_own(self) -> None:
        shape = self.rng.integers(1, 9), self.search.dimension
        self.tell(self.rng.standard_normal(shape) * 10.0 ** self.rng.choice([-99, -9, 0, 9, 99]))

    def tell_wrong_values(self) -> None:
        n = len(self.points)
        wrong = [np.zeros(n + 1), np.zeros((n, 2)), "values", np.full(n, 1j), None, [], [{}]]
        self.search.tell(self.points, wrong[self.rng.integers(len(wrong))])
        raise AssertionError("nonsense was accepted")

    def tell_wrong_points(self) -> None:
        n, d = len(self.points), self.search.dimension
        nan = np.full((n, d), np.nan)
        wrong = [np.zeros((n, d + 1)), nan, np.zeros((2, 2, d)), "points", None, []]
        self.search.tell(wrong[self.rng.integers(len(wrong))], np.zeros(n))
        raise AssertionError("nonsense was accepted")

    def inject(self) -> None:
        d = self.search.dimension
        points = self.points[0], self.rng.standard_normal(d), np.zeros(d + 1)
        self.search.inject(points[self.rng.integers(3)])

    def ask(self) -> None:
        self.points = self.search.ask()

    def save_and_load(self) -> None:
        self.search.load_state_dict(self.search.state_dict())


ACTIONS = [name for name in vars(Player) if not name.startswith("_") and name != "tell"]
