"""What less state costs: the comparison, the optimizers that are compared, and widths."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from eigenstep_lab import cli
from eigenstep_lab.bench import modes, widths
from eigenstep_lab.bench.suite.catalog import TASKS
from eigenstep_lab.bench.suite.task import Problem, Task

LOSSES = {
    "calm": {"float32": [1.0, 1.01], "int8": [1.0, 1.01], "bases anew": [1.02, 1.0302]},
    "other": {"float32": [2.0, 2.0], "int8": [2.002, 2.002], "bases anew": [2.0, 2.0]},
    "restless": {"float32": [0.1, 0.3], "int8": [0.9, 0.9], "bases anew": [0.2, 0.2]},
}


def test_ratios_are_means_over_tasks_that_can_tell() -> None:
    assert modes.restless(LOSSES, "restless")
    ratio, error = modes.suite_ratio(LOSSES, "int8")
    assert ratio == pytest.approx(math.sqrt(1.001))
    assert error == pytest.approx(0.0, abs=1e-9)
    assert modes.suite_ratio(LOSSES, "bases anew")[0] == pytest.approx(math.sqrt(1.02))
    over = {mode: modes.suite_ratio(LOSSES, mode) for mode in modes.CLAIMED}
    assert [verdict.holds for verdict in modes.verdicts(over)] == [True, False]
    rows = {row[0]: row[1:] for row in modes.task_table(LOSSES, modes.CLAIMED).rows}
    assert rows["calm"] == ("1.0050", "+0.00% ± 0.00%", "+2.00% ± 0.00%")
    assert "restless, does not count" in rows


def test_a_run_that_fails_is_no_success() -> None:
    losses = {"calm": {"float32": [1.0, 1.01], "int8": [math.inf, 1.0]}}
    assert math.isinf(modes.suite_ratio(losses, "int8")[0])


def test_bases_are_learned_anew_once() -> None:
    """In the middle: till then both runs are the same to the bit, then bases from two bytes take
    the others' place.
    """
    paths = []
    for mode in ("float32", "bases anew"):
        torch.manual_seed(0)
        model = nn.Linear(8, 6, bias=False)
        optimizer, path = modes.optimizer_of(mode, 1e-2, 8, model), []
        for _ in range(8):
            model.weight.grad = torch.randn(6, 8)
            optimizer.step()
            path.append(model.weight.detach().clone())
        paths.append(path)
    apart = [float((ours - theirs).abs().max()) for ours, theirs in zip(*paths, strict=True)]
    assert apart[:4] == [0.0] * 4
    assert all(0 < difference < 1e-2 for difference in apart[4:])


def test_another_rounding_is_another_run() -> None:
    ends = []
    for mode in ("float32", "other rounding"):
        torch.manual_seed(0)
        model = nn.Linear(8, 6, bias=False)
        optimizer = modes.optimizer_of(mode, 1e-2, 8, model)
        for _ in range(8):
            model.weight.grad = torch.randn(6, 8)
            optimizer.step()
        ends.append(model.weight.detach())
    assert 0 < (ends[0] - ends[1]).abs().max() < 1e-5


def quick(seed: int, width: int = 4) -> Problem:
    """A regression, in place of the suite's tasks."""
    torch.manual_seed(seed)
    model, inputs = nn.Linear(width, 3), torch.randn(16, width)

    def loss(generator: torch.Generator) -> torch.Tensor:
        return (model(inputs) - inputs[:, :3]).square().mean() + 1

    return Problem(model, loss, lambda: loss(torch.Generator()).item())


def test_both_studies_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def build(seed: int, width: int = 4) -> Problem:
        built.append(width)
        return quick(seed, width)

    tasks = {name: Task("regression", build, 6) for name in TASKS}
    monkeypatch.setattr(modes, "TASKS", tasks)
    monkeypatch.setattr(widths, "gpt_tokens", build)
    short = [
        "--json",
        str(tmp_path / "found.json"),
        "--results",
        str(tmp_path / "runs.jsonl"),
        "--seeds",
        "2",
    ]
    for arguments in (
        ["modes", "--tasks", "vit", "lora"],
        ["widths", "--widths", "4", "8", "--steps", "3"],
    ):
        assert cli.main(["bench", *arguments, *short]) == 0
        first, count = json.loads((tmp_path / "found.json").read_text())["result"], len(built)
        assert cli.main(["bench", *arguments, *short]) == 0
        assert json.loads((tmp_path / "found.json").read_text())["result"] == first
        assert len(built) == count, "nothing is computed twice"
        assert first["verdicts"]


@pytest.mark.parametrize("best", [1e-3, 8e-3, 0.064])
def test_rates_are_searched_until_the_neighbors_are_worse(best: float) -> None:
    found = widths.search(lambda rate: abs(math.log(rate / best)), 8e-3)
    assert widths.best_rate(found) == pytest.approx(best)
    assert {round(math.log2(rate / best)) for rate in found} >= {-1, 0, 1}


def test_what_is_too_wide_to_search_is_trained_as_rules_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def loss(cells: object, steps: int, seeds: int, width: int, rate: float) -> float:
        tried.append((width, rate))
        return 1 + abs(math.log(rate * width / 0.512))

    monkeypatch.setattr(widths, "mean_loss", loss)
    file = tmp_path / "found.json"
    short = [
        "--widths",
        "64",
        "256",
        "--searched",
        "64",
        "--rules",
        "same",
        "width",
        "--json",
        str(file),
    ]
    assert cli.main(["bench", "widths", *short]) == 0
    assert {rate for width, rate in tried if width == 256} == {8e-3, 2e-3}
    verdicts = json.loads(file.read_text())["result"]["verdicts"]
    assert [round(v["value"], 2) for v in verdicts] == [round(1 + math.log(4), 2), 1.0]


def test_where_every_run_fails_the_search_ends() -> None:
    assert len(widths.search(lambda rate: math.inf, 8e-3)) < 30
