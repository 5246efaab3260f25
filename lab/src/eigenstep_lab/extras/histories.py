"""Files and pictures of what happened in a search."""

from __future__ import annotations

import csv
import io
import math
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eigenstep.search import History
from eigenstep.search.record import LIMIT, LISTS

from .. import plotting as plots

LARGEST_ARRAY = (
    1_000_000  # Bytes of the largest array that a file may hold, several times what a history has
)
NUMBERS = ("stride", "seen")
VECTORS = ("axes", "mean", "deviations")
WHOLE = ("nfev", "population", "run")
EVERYTHING = (*LISTS, *NUMBERS)


def history_as_dict(history: History) -> dict[str, Any]:
    """Return everything as arrays and numbers."""
    return {
        **{name: np.array(getattr(history, name)) for name in LISTS},
        "stride": history.stride,
        "seen": history.seen,
    }


def history_from_dict(state: Mapping[str, Any]) -> History:
    """Build from what ``history_as_dict`` returned, or raise a ``ValueError``."""
    arrays = {name: np.asarray(state[name]) for name in EVERYTHING}
    records = arrays["nfev"].shape
    for name, array in arrays.items():
        vectors = name in VECTORS and records != (0,)
        expected = () if name in NUMBERS else records
        if array.shape[:1] != expected or array.ndim != len(expected) + vectors:
            raise ValueError(f"{name!r} has shape {array.shape}")
        whole = name in (*NUMBERS, *WHOLE)
        if array.dtype.kind not in ("iu" if whole and array.size else "iuf"):
            raise ValueError(f"{name!r} holds {array.dtype}")
    stride, seen = (int(arrays[name]) for name in NUMBERS)
    if len(records) != 1 or records[0] >= LIMIT or stride < 1 or seen < 0:
        raise ValueError(f"{records} records with stride {stride} of {seen} generations")
    lists = {n: list(arrays[n]) if n in VECTORS else arrays[n].tolist() for n in LISTS}
    return History(**lists, stride=stride, seen=seen)


def save_history(history: History, path: str | Path) -> None:
    """Write a table of numbers (``.csv``) or all records (``.npz``, for ``load_history``)."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".npz":
        np.savez_compressed(target, **history_as_dict(history))
    elif target.suffix == ".csv":
        columns = [
            name for name in LISTS if not len(history) or np.ndim(getattr(history, name)[0]) == 0
        ]
        with target.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*(getattr(history, name) for name in columns), strict=True))
    else:
        raise ValueError(f"path must end in .csv or .npz, got {target.name!r}")


def load_history(path: str | Path) -> History:
    """Read what ``save_history`` wrote to an ``.npz`` file, or raise a ``ValueError``.

    The file is not trusted: nothing in it is executed, and at most a few megabytes of it are read.
    """
    try:
        return history_from_dict(read_arrays(Path(path), EVERYTHING))
    except Exception as error:  # a damaged archive can make its readers raise almost anything
        raise ValueError(
            f"{path} is not a history that was saved as .npz, or is damaged ({error!r})"
        ) from error


def read_arrays(path: Path, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Read arrays of numbers, never more than a file really holds."""
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for name in names:
            with archive.open(f"{name}.npy") as member:
                content = member.read(LARGEST_ARRAY + 1)
                if len(content) > LARGEST_ARRAY:  # a whole one was compared with its checksum
                    raise ValueError(f"{name!r} is too large")
            file = io.BytesIO(content)
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"{name!r} has version {version}")
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=1000)
            data = content[file.tell() :]
            if fortran or dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data):
                raise ValueError(f"{name!r} does not hold what its header says")
            arrays[name] = np.frombuffer(data, dtype).reshape(shape)
    return arrays


def plot_history(history: History, path: str | Path) -> Path:
    """Draw values, step size, coordinates, axes and deviations against evaluations."""
    drawn, axes = plots.figure(columns=2, rows=2)
    best = np.array(history.best)
    above = np.array(history.fun) - best[np.isfinite(best)].min(initial=np.inf)
    values, *others = axes.flat
    values.plot(history.nfev, np.abs(history.fun), label="|value|, best of the generation")
    values.plot(
        history.nfev, np.where(above > 0, above, np.nan), label="value minus the least of all"
    )
    values.plot(history.nfev, history.sigma, label="step size σ")
    values.plot(history.nfev, history.ratio, label="axis ratio")
    for ax, vectors in zip(others, (history.mean, history.axes, history.deviations), strict=True):
        ax.plot(history.nfev, np.array(vectors), linewidth=0.8)
    titles = {
        "values": "log",
        "coordinates of the mean": "linear",
        "lengths of the axes": "log",
        "deviations": "log",
    }
    for ax, (title, scale) in zip(axes.flat, titles.items(), strict=True):
        ax.set(title=title, xlabel="evaluations", yscale=scale)
        for at in np.flatnonzero(np.diff(history.run)):
            ax.axvline(history.nfev[at + 1], color="gray", linestyle=":", linewidth=0.8)
    values.legend(fontsize=7)
    return plots.save(drawn, path)
