"""A step can be followed: how many files it crosses, and how much a newcomer is shown at once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from torch import Tensor, nn

import eigenstep
from eigenstep import Spectral, minimize_spd
from eigenstep.search import Search

ROOT = str(Path(eigenstep.__file__).parent)


def files_of_calls(run: Callable[[], object]) -> list[str]:
    """Return the file of each call of a function of the library; comprehensions do not count."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        named = not code.co_name.startswith("<")
        if event == "call" and named and code.co_filename.startswith(ROOT):
            files.append(code.co_filename)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return files


def test_calls_are_noted() -> None:
    assert files_of_calls(lambda: None) == []
    files = files_of_calls(lambda: Spectral([nn.Parameter(torch.ones(2))]))
    assert len(set(files)) > 2


def test_a_turning_step_crosses_five_files() -> None:
    weight = nn.Parameter(torch.randn(8, 4))
    optimizer = Spectral([weight], interval=1)
    for _ in range(4):
        weight.grad = torch.randn(8, 4)
        optimizer.step()
    files = files_of_calls(optimizer.step)
    assert len(set(files)) <= 5
    assert sum(one != other for one, other in pairwise(files)) <= 15


def test_a_generation_of_a_search_crosses_five_files() -> None:
    search = Search(np.full(5, 2.0), 0.5, seed=0)

    def generation() -> None:
        points = search.ask()
        search.tell(points, [float((point**2).sum()) for point in points])

    for _ in range(3):
        generation()
    assert len(set(files_of_calls(generation))) <= 5


def test_an_iteration_over_matrices_crosses_eight_files() -> None:
    target = torch.diag(torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64))

    def cost(S: Tensor) -> Tensor:
        return torch.linalg.solve(S, target).trace() + torch.logdet(S)

    start = torch.eye(3, dtype=torch.float64)
    files = {}
    for count in (1, 2):
        files[count] = files_of_calls(lambda n=count: minimize_spd(cost, start, max_iter=n))
    # What a second iteration adds to one: the calls before and after it are the same.
    calls = {name: files[2].count(name) - files[1].count(name) for name in set(files[2])}
    assert 0 < sum(count > 0 for count in calls.values()) <= 8


def test_the_constructor_has_few_arguments() -> None:
    assert len(inspect.signature(Spectral.__init__).parameters) - 1 <= 24


def test_an_optimizer_prints_what_differs_from_the_defaults() -> None:
    layers = (nn.Embedding(3000, 64), nn.Linear(64, 256), nn.Linear(256, 3000))
    lines = repr(Spectral.for_model(nn.Sequential(*layers))).splitlines()
    assert len(lines) <= 12
    assert "structure='diagonal'" in lines[1]
