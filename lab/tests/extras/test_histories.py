"""Files of histories, whole and damaged, and their pictures."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eigenstep.search import History, Search, minimize, run
from eigenstep_lab.extras import load_history, plot_history, save_history
from eigenstep_lab.extras.histories import history_as_dict, history_from_dict
from search.problems import ellipsoid
from search.test_random_use import check_sentence


def test_history_is_written_read_and_drawn(tmp_path):
    search = Search(np.ones(3), 0.5, seed=0, bounds=(-2, 2), restarts="ipop", max_evals=3000)
    history = run(search, ellipsoid, batched=True).history
    save_history(history, tmp_path / "h.npz")
    again = load_history(tmp_path / "h.npz")
    again = history_as_dict(again)
    for key, value in history_as_dict(history).items():
        np.testing.assert_array_equal(value, again[key])
    save_history(history, tmp_path / "h.csv")
    lines = (tmp_path / "h.csv").read_text().splitlines()
    assert lines[0].split(",")[:3] == ["nfev", "fun", "best"]
    assert len(lines) == len(history) + 1
    assert plot_history(history, tmp_path / "h.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="must end in"):
        save_history(history, tmp_path / "h.txt")


@pytest.fixture(scope="module")
def contents():
    """What a history holds."""
    return history_as_dict(
        minimize(ellipsoid, np.ones(3), 0.5, seed=0, batched=True, max_evals=200).history
    )


@pytest.fixture(scope="module")
def saved(contents, tmp_path_factory):
    path = tmp_path_factory.mktemp("history") / "h.npz"
    save_history(history_from_dict(contents), path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Read a file with some content; None if that is refused."""
    path = tmp_path_factory.mktemp("damaged") / "damaged.npz"

    def read(content):
        path.write_bytes(content)
        try:
            return load_history(path)
        except ValueError as error:
            check_sentence(error, "damaged.npz is not a history")
            return None

    return read


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_damage_is_noticed_or_harmless(contents, saved, load, data):
    """What is not noticed was not used, such as dates, or is stored twice."""
    damaged = bytearray(saved)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(saved) - 1))] ^= data.draw(st.integers(1, 255))
    kept = load(bytes(damaged))
    if kept is not None:
        for name, value in history_as_dict(kept).items():
            np.testing.assert_array_equal(value, contents[name])


@pytest.mark.parametrize("end", [0.0, 0.3, 0.99])
def test_truncated_files_are_noticed(saved, load, end):
    assert load(saved[: int(end * len(saved))]) is None


class Trap:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a file was unpickled",))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("fun", np.array([Trap()], dtype=object)),
        ("fun", np.array(["1"] * 3)),
        ("fun", np.ones(100)),
        ("fun", np.ones(200_000)),
        ("mean", np.asfortranarray(np.arange(6.0).reshape(3, 2))),
        ("nfev", np.zeros(3, dtype=[("a", "f8")])),
        ("stride", np.array(-1)),
        ("seen", np.array([2**63], dtype=np.uint64)),
    ],
)
def test_files_with_other_contents_are_refused(contents, load, name, wrong):
    for others in ({name: wrong}, {}):
        file = io.BytesIO()
        np.savez(file, **{key: contents[key] for key in contents if key != name}, **others)
        assert load(file.getvalue()) is None


@pytest.mark.parametrize("shape", ["(9000000000000,)", "(-1,)", "(3", "(2, 1e3)"])
def test_headers_that_claim_too_much_allocate_nothing(contents, load, shape):
    file = io.BytesIO()
    np.savez(file, **{key: contents[key] for key in contents if key != "fun"})
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    header = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("fun.npy", header)
    assert load(file.getvalue()) is None


def test_empty_histories_and_other_files(tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "empty.npz"
    save_history(History(), path)
    assert len(load_history(path)) == 0
    for missing in (path.parent / "missing.npz", path.parent):
        with pytest.raises(ValueError, match="not a history"):
            load_history(missing)
