"""Arguments that make no sense are refused, by a sentence that names them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from eigenstep.search import METHODS, SCHEDULES, Search, Start, minimize

from .problems import sphere

TYPES: list[tuple[str, dict[str, Any]]] = [
    ("x0 must be a vector", {"x0": "text"}),
    ("x0 must be a vector", {"x0": np.array([1j, 2.0])}),
    ("floating-point tensor", {"x0": torch.tensor([1, 2])}),
    ("population must be an integer", {"population": 4.5}),
    ("method must be one of", {"method": 3}),
    ("method must be one of", {"method": ["spectral"]}),
    ("numbers or None", {"bounds": ("a", 1)}),
    ("bounds must be", {"bounds": 3}),
    ("indices", {"integers": [0.5]}),
    ("dictionary", {"categories": [1]}),
    ("must be an integer", {"categories": {1: 2.0}}),
]
VALUES: list[tuple[str, dict[str, Any]]] = [
    ("x0 must be a vector", {"x0": []}),
    ("x0 must be a vector", {"x0": [[1.0]]}),
    ("finite", {"x0": [1.0, np.nan]}),
    ("x0 must be within the bounds", {"bounds": (1, 2)}),
    ("x0 must be within the bounds", {"x0": np.full(3, 3.0), "categories": {1: 3}}),
    ("sigma0 must be a positive number", {"sigma0": 0.0}),
    ("sigma0", {"sigma0": [1.0, 2.0]}),
    ("sigma0", {"sigma0": np.inf}),
    ("below tolx=.*larger sigma0", {"sigma0": 1e-30}),
    ("below tolx=.*larger sigma0", {"sigma0": [1e-20] * 3}),
    ("coordinate 1, so small that", {"x0": [0.0, 1.0], "sigma0": 1e-17, "tolx": 0.0}),
    ("rounding swallows", {"x0": torch.full((2,), 1e6), "sigma0": 1e-3}),
    ("population must be at least 4", {"population": 3}),
    ("max_evals must be at least 1", {"max_evals": 0}),
    ("tolx", {"tolx": -1.0}),
    ("target", {"target": np.nan}),
    ("spectral, separable, lowrank, cautious or a function, got 'magic'", {"method": "magic"}),
    ("restarts must be one of ipop, bipop or a function, got 'never'", {"restarts": "never"}),
    ("leave no room", {"bounds": (1, 0)}),
    ("coordinate 2", {"bounds": [(0, 1), (0, 1), (2, 2)]}),
    ("integer coordinate 1", {"bounds": (0.2, 0.8), "integers": [1]}),
    ("3 entries on each side", {"bounds": ([0, 0], 1)}),
    ("got 4 entries", {"bounds": [(0, 1)] * 4}),
    ("NaN", {"bounds": (np.nan, 1)}),
    ("indices below 3", {"integers": [3]}),
    ("mask", {"integers": np.array([True])}),
    ("keys below 3", {"categories": {7: 3}}),
    ("keys below 3", {"categories": {-1: 3}}),
    ("at least 2 values", {"categories": {1: 1}}),
    ("at least one coordinate", {"categories": {0: 3, 1: 3, 2: 3}}),
]


CASES = [(TypeError, *case) for case in TYPES] + [(ValueError, *case) for case in VALUES]


@pytest.mark.parametrize(("error", "text", "options"), CASES)
def test_impossible_arguments(error: type[Exception], text: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        Search(**{"x0": np.zeros(3), "sigma0": 1.0, **options})


def test_names_of_methods_and_schedules() -> None:
    assert list(METHODS) == ["spectral", "separable", "lowrank", "cautious"]
    assert list(SCHEDULES) == ["ipop", "bipop"]


def test_impossible_starts() -> None:
    for arguments, text in (((3,), "population"), ((8, 0.0), "width"), ((8, 1.0, 0), "max_evals")):
        with pytest.raises(ValueError, match=text):
            Start(*arguments)
    with pytest.raises(TypeError, match="restarts must return a Start or None, got int"):
        minimize(sphere, np.ones(2), 1.0, restarts=lambda ended, evals, rng: 16)
