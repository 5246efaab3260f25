"""The runner of benchmarks, on studies that take no time."""

from __future__ import annotations

import argparse
import importlib
import json
import pickle
import types
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eigenstep_lab import bench, cli, study
from eigenstep_lab.console import UserError
from eigenstep_lab.study import Cell, Plan, execute, nested

STUDIES = {
    name: importlib.import_module(command.module)
    for name, command in bench.BENCHMARKS.items()
    if command.computes
}


def square(x: float) -> float:
    if x < 0:
        raise ValueError("negative")
    return x * x


def cell(x: float, behavior: str = "") -> Cell:
    return Cell({"x": x}, partial(square, x), behavior)


def climb(limit: float) -> Plan:
    """Square until a limit is reached."""
    x = 2.0
    while x < limit:
        x = yield cell(x)
    return x


@pytest.mark.parametrize("jobs", [1, 2])
def test_plans_ask_for_cells_that_depend_on_results(tmp_path: Path, jobs: int) -> None:
    path = tmp_path / "results.jsonl"
    plans = {"far": partial(climb, 100.0), "near": cell(3.0)}
    found = execute(plans, path=path, jobs=jobs)
    assert {name: followed.value for name, followed in found.items()} == {"far": 256.0, "near": 9.0}
    assert len([line for line in path.read_text().splitlines() if line]) == 4
    shown = execute({**plans, "missing": cell(5.0)}, path=path, show=True)
    assert [followed.value for followed in shown.values()] == [256.0, 9.0, None]


def test_results_of_another_behavior_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for behavior in ("search:1", "search:1", "search:2+spd:3"):
        (found,) = execute({"a": cell(2.0, behavior)}, path=path).values()
    assert found.behaviors == {"search:2", "spd:3"}
    keys = [json.loads(line)["cell"] for line in path.read_text().splitlines() if line]
    assert [key["behavior"] for key in keys] == ["search:1", "search:2+spd:3"]


def test_what_fails_stops_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with pytest.raises(UserError, match="all others are kept:\nbad: ValueError: negative"):
        execute({"bad": cell(-1.0), "good": cell(2.0)}, path=path)
    assert path.read_text().count("result") == 1


def test_cells_may_wait_for_others(tmp_path: Path) -> None:
    toy = types.ModuleType("toy")

    def cells(args: argparse.Namespace, found: Mapping[str, Any]) -> dict[str, Cell]:
        first = found.get("first")
        later = {} if first is None else {"second": cell(first)}
        return {"first": cell(3.0), **later}

    toy.cells = cells  # type: ignore[attr-defined]
    toy.report = lambda args, found: dict(found)  # type: ignore[attr-defined]
    args = argparse.Namespace(jobs=1, results=tmp_path / "r.jsonl", show=True)
    with pytest.raises(UserError, match="1 of 1 results are not in"):
        study.run(toy, args)
    args.show = False
    assert study.run(toy, args) == ({"first": 9.0, "second": 81.0}, [])


@pytest.mark.parametrize("name", STUDIES)
def test_other_processes_can_compute_every_benchmark(name: str) -> None:
    module = STUDIES[name]
    parser = argparse.ArgumentParser()
    study.add_arguments(parser)
    module.add_arguments(parser)
    args = parser.parse_args([])
    args.benchmark = module
    plans = module.cells(args, {})
    assert plans
    for plan in list(plans.values())[::20]:
        pickle.dumps(plan)


def test_names_become_nested_figures() -> None:
    found = {("a", "b", 0): 1, ("a", "b", 7): 2, ("a", "c"): 3, ("d",): 4}
    assert nested(found) == {"a": {"b": [1, 2], "c": 3}, "d": 4}


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("spd --rounds 0", "--rounds must be at least 1"),
        ("spd --gap 0", "positive"),
        ("curvature --steps 59", "--steps must be at least 60"),
        ("curvature --seeds 0", "--seeds must be at least 1"),
        ("search --seeds 0", "at least 1"),
        ("search --instances 5 1", "first and the last"),
        ("scaling --width 3", "--width must be a multiple of 4, got 3"),
        ("inference --draws 0", "--draws must be at least 4"),
        ("suite --seeds 0", "--seeds must be at least 1"),
        ("speedrun --seeds 1", "--seeds must be at least 2"),
        ("step --jobs 0", "--jobs must be at least 1"),
    ],
)
def test_impossible_options(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *command.split()]) == 2
    assert text in capsys.readouterr().err
