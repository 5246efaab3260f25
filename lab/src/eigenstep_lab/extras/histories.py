"""Files and pictures of what happened in a search."""

from __future__ import annotations

import csv
import io
import math
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eigenstep.search import History
from eigenstep.search.history import LISTS, NUMBERS

from .. import plotting as plots

LARGEST_ARRAY = 1_000_000  # Bytes of the largest array that a file may hold, several times what a history has


def save_history(history: History, path: str | Path) -> None:
    """Write a table of numbers (``.csv``) or all records (``.npz``, for ``load_history``)."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".npz":
        np.savez_compressed(target, **history.as_dict())
    elif target.suffix == ".csv":
        columns = [name for name in LISTS if not len(history) or np.ndim(getattr(history, name)[0]) == 0]
        with target.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*(getattr(history, name) for name in columns), strict=True))
    else:
        raise ValueError(f"path must end in .csv or .npz, got {target.name!r}")


def load_history(path: str | Path) -> History:
    """Read what ``save_history`` wrote to an ``.npz`` file, or raise a ``ValueError`` if that is something else.

    The file is not trusted: nothing in it is executed, and at most a few megabytes of it are read.
    """
    try:
        return History.from_dict(read_arrays(Path(path), (*LISTS, *NUMBERS)))
    except Exception as error:  # a damaged archive can make its readers raise almost anything
        raise ValueError(f"{path} is not a history that was saved as .npz, or is damaged ({error!r})") from error


def read_arrays(path: Path, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Read arrays of numbers from an ``.npz`` file; NumPy's reader would allocate what a damaged header claims."""
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
    """Draw values, step size, coordinates, axes and deviations against evaluations, as users of pycma know it."""
    drawn, axes = plots.figure(columns=2, rows=2)
    best = np.array(history.best)
    above = np.array(history.fun) - best[np.isfinite(best)].min(initial=np.inf)
    values, *others = axes.flat
    values.plot(history.nfev, np.abs(history.fun), label="|value|, best of the generation")
    values.plot(history.nfev, np.where(above > 0, above, np.nan), label="value minus the least of all")
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
