"""`bench training`: losses of other optimizers that were measured before stay, and their times do
not.
"""

from __future__ import annotations

import argparse
import json

import pytest

from eigenstep_lab.bench import training
from eigenstep_lab.console import UserError
from eigenstep_lab.problems.tasks import Record


def _arguments(tmp_path, *more):
    parser = argparse.ArgumentParser()
    training.add_arguments(parser)
    small = [
        "--tasks",
        "shakespeare",
        "--lrs",
        "0.01",
        "--seeds",
        "1",
        "--steps",
        "4",
        "--long-steps",
        "0",
    ]
    return parser.parse_args([*small, "--directory", str(tmp_path), *more])


@pytest.fixture
def quick(monkeypatch):
    """Runs that end at once, with a loss for each optimizer."""

    def train(task, make, *, steps, seed):
        return Record([2.0] * steps, 1.5, 0.5, optimizer_seconds=0.1, total_seconds=0.2)

    monkeypatch.setattr(training, "_task", lambda name: None)
    monkeypatch.setattr(training, "train", train)


def _row(optimizer, loss):
    row = {
        "task": "shakespeare",
        "optimizer": optimizer,
        "lr": 0.01,
        "loss": loss,
        "spread": None,
        "error": 0.4,
    }
    return {**row, "seeds": 1, "loss_by_lr": {"0.01": loss}, "optimizer_ms": 7.0, "step_ms": 9.0}


def test_others_keep_their_losses_and_lose_their_times(tmp_path, quick):
    before = tmp_path / "before.json"
    rows = [
        _row("adamw", 1.6),
        _row("spectral", 9.0),
        {**_row("muon", 1.4), "task": "cifar-10"},
        _row("muon", 1.4),
    ]
    before.write_text(json.dumps({"result": {"grid": rows}}))
    found = training.run(
        _arguments(tmp_path / "runs", "--optimizers", "spectral", "--keep", str(before))
    )
    assert [(row["optimizer"], row["loss"]) for row in found["grid"]] == [
        ("muon", 1.4),
        ("spectral", 1.5),
        ("adamw", 1.6),
    ]
    times = {cells[1]: cells[-2:] for cells in found["tables"][0]["rows"]}
    assert times["muon"] == ("", "") != times["spectral"]
    judged = {verdict["claim"]: verdict["value"] for verdict in found["verdicts"]}
    assert judged["at least as good as muon on every task"] == pytest.approx(1.5 / 1.4)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"result": 3}', '{"result": {"grid": [{"task": "shakespeare"}]}}']
)
def test_files_that_hold_no_figures_are_refused(tmp_path, text):
    path = tmp_path / "before.json"
    path.write_text(text)
    with pytest.raises(UserError, match="does not hold figures"):
        training.run(_arguments(tmp_path / "runs", "--optimizers", "spectral", "--keep", str(path)))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.json"):
        training.run(
            _arguments(
                tmp_path, "--optimizers", "spectral", "--keep", str(tmp_path / "nowhere.json")
            )
        )
