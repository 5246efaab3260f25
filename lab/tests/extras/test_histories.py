"""Files of histories, whole and damaged, and their pictures."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eigenstep.search import History, Search, minimize, run
from eigenstep_lab.extras import load_history, plot_history, save_history
from eigenstep_lab.extras.histories import history_as_dict
from search.problems import ellipsoid
from search.test_random_use import check_sentence


def test_history_is_written_read_and_drawn(tmp_path: Path) -> None:
    search = Search(np.ones(3), 0.5, seed=0, bounds=(-2, 2), restarts="ipop", max_evals=3000)
    history = run(search, ellipsoid, batched=True).history
    save_history(history, tmp_path / "h.npz")
    again = load_history(tmp_path / "h.npz")
    for key, value in history_as_dict(history).items():
        np.testing.assert_array_equal(value, history_as_dict(again)[key])
    save_history(history, tmp_path / "h.csv")
    lines = (tmp_path / "h.csv").read_text().splitlines()
    assert lines[0].split(",")[:3] == ["nfev", "fun", "best"]
    assert len(lines) == len(history) + 1
    assert plot_history(history, tmp_path / "h.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="must end in"):
        save_history(history, tmp_path / "h.txt")
    (tmp_path / "bad.npz").write_text("nothing")
    with pytest.raises(ValueError, match="not a history"):
        load_history(tmp_path / "bad.npz")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("history") / "h.npz"
    save_history(
        minimize(ellipsoid, np.ones(3), 0.5, seed=0, batched=True, max_evals=200).history, path
    )
    return path.read_bytes()


def load(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> History | None:
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(content)
    try:
        return load_history(path)
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
        for name, value in history_as_dict(whole).items():
            np.testing.assert_array_equal(value, history_as_dict(kept)[name])


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
def test_files_with_other_contents_are_refused(
    name: str, wrong: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    history = minimize(ellipsoid, np.ones(3), 0.5, seed=0, batched=True, max_evals=200).history
    path = tmp_path_factory.getbasetemp() / "other.npz"
    np.savez(path, **{**history_as_dict(history), name: WRONG[wrong]})
    assert load(path.read_bytes(), tmp_path_factory) is None
    np.savez(path, **{key: value for key, value in history_as_dict(history).items() if key != name})
    assert load(path.read_bytes(), tmp_path_factory) is None


def test_headers_that_claim_too_much_allocate_nothing(
    saved: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    history = minimize(ellipsoid, np.ones(3), 0.5, seed=0, batched=True, max_evals=200).history
    path = tmp_path_factory.getbasetemp() / "claims.npz"
    for header in ("(9000000000000,)", "(-1,)", "(3", "(" * 300, "10**9", "('a',)", "(2, 1e3)"):
        np.savez(
            path, **{key: value for key, value in history_as_dict(history).items() if key != "fun"}
        )
        text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {header}, }}".ljust(117) + "\n"
        entry = io.BytesIO(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode())
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("fun.npy", entry.getvalue())
        assert load(path.read_bytes(), tmp_path_factory) is None


def test_empty_histories_and_other_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "empty.npz"
    save_history(History(), path)
    assert len(load_history(path)) == 0
    for missing in (path.parent / "missing.npz", path.parent):
        with pytest.raises(ValueError, match="not a history"):
            load_history(missing)
