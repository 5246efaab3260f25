"""Random searches without gradients, told all kinds of values, killed and restored."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from eigenstep.search import History, Search

from ..baselines.paper_nes import PaperNES
from ..extras import load_history, save_history
from ..extras.histories import history_as_dict
from .training import check

METHODS: tuple[Any, ...] = ("spectral", "separable", "lowrank", PaperNES)


def _values(chance: np.random.Generator, points: np.ndarray) -> np.ndarray:
    """Return values of a simple function, some of them strange."""
    usual: np.ndarray = (points**2).sum(-1)
    strange = chance.random(len(points)) < chance.choice([0.0, 0.0, 0.1, 0.9])
    return np.where(
        strange, chance.choice([math.nan, math.inf, 1e300, 0.5], size=len(points)), usual
    )


def search(chance: np.random.Generator) -> dict[str, int]:
    """Search twice, undisturbed and restored before every generation."""
    dimension = int(chance.integers(1, 9))
    options: dict[str, Any] = {
        "method": METHODS[chance.integers(len(METHODS))],
        "population": int(chance.integers(4, 20)),
        "seed": int(chance.integers(2**31)),
        "bounds": (-2.0, 3.0) if chance.random() < 0.3 else None,
        "noisy": bool(chance.random() < 0.2),
        "max_evals": 400,
    }
    start = chance.standard_normal(dimension).clip(-2, 3)
    sigma = float(10.0 ** chance.uniform(-3, 1))
    undisturbed, disturbed = (Search(start, sigma, **options) for _ in range(2))
    told: list[float] = []
    tells = 0
    while not undisturbed.stop() and tells < 40:
        fresh = Search(start, sigma, **options)
        fresh.load_state_dict(disturbed.state_dict())
        disturbed = fresh
        points, same = np.asarray(undisturbed.ask()), np.asarray(disturbed.ask())
        check(np.array_equal(points, same), "a search that was restored asks for other points")
        check(bool(np.isfinite(points).all()), "a search asks for points that are not finite")
        values = _values(chance, points)
        undisturbed.tell(points, values)
        disturbed.tell(same, values)
        told += values.tolist()
        tells += 1
    check(undisturbed.evaluations == len(told), "evaluations were lost")
    finite = [value for value in told if math.isfinite(value)]
    check(
        options["noisy"] or not finite or undisturbed.best_fun == min(finite),
        "the best value was lost",
    )
    _check_history(undisturbed.history)
    return {"tells": tells, "evaluations": len(told)}


def _check_history(history: History) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_history(history, Path(folder, "history.npz"))
        again = history_as_dict(load_history(Path(folder, "history.npz")))
    for name, value in history_as_dict(history).items():
        same = np.array_equal(np.asarray(value), np.asarray(again[name]), equal_nan=True)
        check(same, f"{name!r} of a history differs after it was saved and loaded")
