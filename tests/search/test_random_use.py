"""Random options, functions and orders of calls: what can be said of every search, whatever happens to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from eigenstep.search import METHODS, SCHEDULES, History, Search, minimize
from eigenstep.search.domain import to_numpy

from .problems import Array, ellipsoid

RELAXED = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
NUMBERS = st.floats(-1e6, 1e6).map(lambda x: round(x, 6))


class Hostile:
    """A function that does one of many nasty things at each call, the same for the same seed."""

    KINDS = ("normal", "nan", "inf", "raise", "tie", "huge", "tiny", "noise", "spoil", "integer", "tensor", "bigint")

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
        st.sampled_from([None, (x0 - width, x0 + width), (None, x0 + width), (x0, None), (x0 - width, x0)])
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
def test_whatever_a_function_does(problem: tuple[Any, Any, dict[str, Any]], kinds: list[str], seed: int) -> None:
    x0, sigma0, options = problem
    start(lambda: Search(x0, sigma0, **options))
    fun = Hostile(kinds, seed)
    try:
        with np.errstate(over="ignore"):
            result = minimize(fun, x0, sigma0, **options)
    except RuntimeError as error:
        check_sentence(error, "first generation")
        check_sentence(error.__cause__, "sometimes")  # type: ignore[arg-type]
        return
    assert result.nfev == fun.calls <= options["max_evals"]
    assert result.failures <= result.nfev
    assert not result.success or math.isfinite(result.fun)
    assert not math.isnan(result.fun)
    x = np.asarray(result.x, dtype=np.float64)
    assert np.isfinite(x).all()
    domain = Search(x0, sigma0, **options)._domain
    assert domain.contains(x)
    assert (x[domain.integer] == np.round(x[domain.integer])).all()
    if options["target"] is not None and result.success:
        assert result.reason == "target"


@RELAXED
@given(problems(), KINDS, st.data())
def test_calls_in_any_order(problem: tuple[Any, Any, dict[str, Any]], kinds: list[str], data: st.DataObject) -> None:
    x0, sigma0, options = problem
    search = start(lambda: Search(x0, sigma0, **options))
    fun = Hostile([kind for kind in kinds if kind != "raise"] or ["nan"], 0)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    points = search.ask()
    for action in data.draw(st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=25)):
        before = search.evaluations, search.iterations, search.failures
        with np.errstate(over="ignore"):
            try:
                points = action(search, points, fun, rng)
            except (ValueError, TypeError) as error:
                check_sentence(error, "must", "needs")
                unchanged = (search.evaluations, search.iterations, search.failures) == before
                assert unchanged
        state = search.distribution
        for array in (state.mean, state.sigma, state.axes(), state.deviations()):
            assert np.isfinite(array).all()
        assert (state.axes() > 0).all()
        assert search.best is None or search._domain.contains(np.asarray(search.best, dtype=np.float64))
        assert (search.best is None) == math.isinf(search.best_fun)


def ask(search: Search, points: Any, fun: Hostile, rng: np.random.Generator) -> Any:
    return search.ask()


def tell(search: Search, points: Any, fun: Hostile, rng: np.random.Generator) -> Any:
    search.tell(points, fun.rows(to_numpy(points).copy()))
    return search.ask()


def tell_shuffled(search: Search, points: Any, fun: Hostile, rng: np.random.Generator) -> Any:
    return tell(search, points[rng.permutation(len(points))], fun, rng)


def tell_some(search: Search, points: Any, fun: Hostile, rng: np.random.Generator) -> Any:
    return tell(search, points[: rng.integers(1, len(points) + 1)], fun, rng)


def tell_own(search: Search, points: Any, fun: Hostile, rng: np.random.Generator) -> Any:
    return tell(
        search, rng.standard_normal((rng.integers(1, 9), search.dimension)) * 10.0 ** rng.integers(-9, 9), fun, rng
    )


def tell_wrong_values(search: Search, points: Any, fun: Hostile, rng: np.random.Generator) -> Any:
    wrong = [np.zeros(len(points) + 1), np.zeros((len(points), 2)), "values", np.full(len(points), 1j), None, [], [{}]]
    search.tell(points, wrong[rng.integers(len(wrong))])
    raise AssertionError("nonsense was accepted")


def tell_wrong_points(search: Search, points: Any, fun: Hostile, rng: np.random.Generator) -> Any:
    d, values = search.dimension, np.zeros(len(points))
    wrong = [np.zeros((len(points), d + 1)), np.full((len(points), d), np.nan), np.zeros((2, 2, d)), "points", None, []]
    search.tell(wrong[rng.integers(len(wrong))], values)
    raise AssertionError("nonsense was accepted")


def inject(search: Search, points: Any, fun: Hostile, rng: np.random.Generator) -> Any:
    search.inject([points[0], rng.standard_normal(search.dimension), np.zeros(search.dimension + 1)][rng.integers(3)])
    return points


def save_and_load(search: Search, points: Any, fun: Hostile, rng: np.random.Generator) -> Any:
    search.load_state_dict(search.state_dict())
    return points


ACTIONS = [
    ask,
    tell,
    tell,
    tell,
    tell_shuffled,
    tell_some,
    tell_own,
    tell_wrong_values,
    tell_wrong_points,
    inject,
    save_and_load,
]


# Damaged histories.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("history") / "h.npz"
    minimize(ellipsoid, np.ones(3), 0.5, seed=0, batched=True, max_evals=200).history.save(path)
    return path.read_bytes()


def load(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> History | None:
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(content)
    try:
        return History.load(path)
    except ValueError as error:
        check_sentence(error, "damaged.npz is not a history")
        return None


@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_flipped_bytes_are_noticed_or_harmless(
    saved: bytes, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    damaged = bytearray(saved)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(saved) - 1))] ^= data.draw(st.integers(1, 255))
    check_damage(saved, bytes(damaged), tmp_path_factory)


@settings(deadline=None, max_examples=100)
@given(end=st.floats(0, 1, exclude_max=True), junk=st.binary(max_size=50))
def test_truncated_files_are_noticed(
    saved: bytes, end: float, junk: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cut = saved[: int(end * len(saved))]
    assert load(cut, tmp_path_factory) is None
    check_damage(saved, cut + junk, tmp_path_factory)


def check_damage(saved: bytes, damaged: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is not noticed was not used, such as dates, or is stored twice."""
    kept = load(damaged, tmp_path_factory)
    if kept is not None:
        whole = load(saved, tmp_path_factory)
        assert whole is not None
        for name, value in whole.as_dict().items():
            np.testing.assert_array_equal(value, kept.as_dict()[name])


class Trap:
    """What runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a file was unpickled",))


WRONG: dict[str, Any] = {
    "objects": np.array([Trap()], dtype=object),
    "text": np.array(["1"] * 3),
    "complex": np.full(3, 1j),
    "a number": np.array(3.0),
    "too many dimensions": np.ones((3, 2, 2, 2)),
    "another length": np.ones(100),
    "too many": np.ones(100_000),
    "too large": np.ones(200_000),
    "columns first": np.asfortranarray(np.arange(6.0).reshape(3, 2)),
    "huge": np.array([2**63], dtype=np.uint64),
    "negative": np.array(-1),
    "infinite": np.array(np.inf),
    "records": np.zeros(3, dtype=[("a", "f8")]),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["nfev", "fun", "mean", "stride", "seen"])
def test_files_with_other_contents_are_refused(name: str, wrong: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    history = minimize(ellipsoid, np.ones(3), 0.5, seed=0, batched=True, max_evals=200).history
    path = tmp_path_factory.getbasetemp() / "other.npz"
    np.savez(path, **{**history.as_dict(), name: WRONG[wrong]})
    assert load(path.read_bytes(), tmp_path_factory) is None
    np.savez(path, **{key: value for key, value in history.as_dict().items() if key != name})
    assert load(path.read_bytes(), tmp_path_factory) is None


def test_headers_that_claim_too_much_allocate_nothing(saved: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    import io
    import zipfile

    history = minimize(ellipsoid, np.ones(3), 0.5, seed=0, batched=True, max_evals=200).history
    path = tmp_path_factory.getbasetemp() / "claims.npz"
    for header in ("(9000000000000,)", "(-1,)", "(3", "(" * 300, "10**9", "('a',)", "(2, 1e3)"):
        np.savez(path, **{key: value for key, value in history.as_dict().items() if key != "fun"})
        text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {header}, }}".ljust(117) + "\n"
        entry = io.BytesIO(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode())
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("fun.npy", entry.getvalue())
        assert load(path.read_bytes(), tmp_path_factory) is None


def test_empty_histories_and_other_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "empty.npz"
    History().save(path)
    assert len(History.load(path)) == 0
    for missing in (path.parent / "missing.npz", path.parent):
        with pytest.raises(ValueError, match="not a history"):
            History.load(missing)
