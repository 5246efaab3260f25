"""The benchmark of posteriors: scores against their definitions, runs that resume; and the best
Gaussian of a model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from eigenstep_lab import cli
from eigenstep_lab.bench.posterior import chosen, compute, scored, scores, spread, tables
from eigenstep_lab.bench.posterior.methods import METHODS
from eigenstep_lab.bench.posterior.problems import Problem, rotated


@pytest.fixture
def probabilities() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(200, 3).softmax(-1)


def test_scores_are_what_they_are_called(probabilities: Tensor) -> None:
    targets = torch.multinomial(probabilities, 1)[:, 0]
    found = scores.class_scores(probabilities, targets)
    rows = range(200)
    assert found["nll"] == pytest.approx(
        -sum(math.log(probabilities[i, targets[i]]) for i in rows) / 200, rel=1e-5
    )
    brier = (
        sum(
            sum((probabilities[i, c] - (targets[i] == c).float()) ** 2 for c in range(3))
            for i in rows
        )
        / 200
    )
    assert found["brier"] == pytest.approx(float(brier), rel=1e-5)
    assert found["ece"] < 0.12  # what was drawn from the probabilities is calibrated but for chance
    sure = torch.nn.functional.one_hot(targets, 3).float()
    assert scores.class_scores(sure, targets) == {
        "nll": 0.0,
        "ece": 0.0,
        "brier": 0.0,
        "accuracy": 1.0,
    }


def test_temperature_is_recovered(probabilities: Tensor) -> None:
    torch.manual_seed(1)
    many = torch.randn(20_000, 3).softmax(-1)
    targets = torch.multinomial(many, 1)[:, 0]
    assert scores.best_temperature(scores.scaled(many, 0.5), targets) == pytest.approx(
        2.0, rel=0.08
    )


def test_detection_is_the_area_under_the_curve(probabilities: Tensor) -> None:
    other = torch.randn(150, 3).mul(0.5).softmax(-1)
    labels = [1] * 200 + [0] * 150
    confidence = torch.cat([probabilities, other]).max(-1).values
    assert scores.detection(probabilities, other) == pytest.approx(
        roc_auc_score(labels, confidence)
    )


def test_scores_of_values() -> None:
    torch.manual_seed(0)
    means = torch.randn(400, 1)
    targets = means + 0.5 * torch.randn(400, 1)
    variance = scores.best_variance(means[None], targets)
    assert variance == pytest.approx((targets - means).square().mean().item(), rel=0.06)
    found = scores.value_scores(means[None].expand(3, -1, -1), variance, targets)
    want = -torch.distributions.Normal(means, variance**0.5).log_prob(targets).mean().item()
    assert found["nll"] == pytest.approx(want, rel=1e-4)
    assert found["ece"] < 0.04
    assert scores.value_scores(means[None], 100 * variance, targets)["ece"] > 0.15


def test_reliability_is_drawn(probabilities: Tensor, tmp_path: Path) -> None:
    rows = scores.reliability(probabilities, torch.zeros(200, dtype=torch.int64))
    assert sum(count for *_, count in rows) == 200
    assert (
        scores.plot_reliability({"ours": rows}, "title", tmp_path / "picture.png").stat().st_size
        > 1000
    )


def test_pictures_are_turned() -> None:
    picture = torch.arange(16.0).view(1, 1, 4, 4)
    torch.testing.assert_close(
        rotated(picture, 90.0)[0, 0], torch.rot90(picture[0, 0]), atol=1e-4, rtol=0.0
    )


@pytest.fixture
def problem() -> Problem:
    torch.manual_seed(0)
    x = torch.randn(150, 4)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    data = x[:90], y[:90]
    tests = {"clean": (x[120:], y[120:])}
    return Problem(
        data,
        (x[90:120], y[90:120]),
        tests,
        lambda p: _net(p),
        foreign=3 * torch.randn(20, 4),
        epochs=3,
        batch=30,
    )


def _net(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 3))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_predicts(problem: Problem, method: str) -> None:
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, **chosen(method, 1)[0]}
    found = compute(problem, method, options, 0)
    assert math.isfinite(found["valid"])
    assert {"nll", "ece", "brier", "scaled nll"} <= found["tests"]["clean"].keys()
    assert 0 <= found["detection"] <= 1
    again = compute(problem, method, options, 0)
    assert again["tests"] == found["tests"]


def test_verdicts_count_test_sets() -> None:
    def runs(value: float) -> dict[str, Any]:
        own = {"nll": value, "ece": value, "scaled nll": -value}
        return {"runs": [{"tests": {"clean": own}, "seconds": 1.0}] * 2}

    found = {
        f"p{i}": {
            tables.OURS: runs(1.0),
            "IVON": runs(2.0),
            "last-layer Laplace": runs(2.0 if i < 1 else 0.5),
        }
        for i in range(3)
    }
    shown = {table["title"]: table["rows"] for table in tables.tables_of(found)}
    assert "Root mean square error" not in shown  # nothing to show is not shown
    rows = shown["Verdicts"]
    plain = [["3 of 3 test sets", "holds"], ["1 of 3 test sets", "does not hold"]]
    reverse = [["0 of 3 test sets", "does not hold"], ["2 of 3 test sets", "holds"]]
    # First after temperature scaling
    assert [row[1:] for row in rows] == [*reverse, *plain, *plain, *plain]


def test_trials_cover_each_range_evenly() -> None:
    trials = spread({"lr": (1e-4, 1.0), "kind": ["a", "b"]}, 8)
    assert trials == spread({"lr": (1e-4, 1.0), "kind": ["a", "b"]}, 8)
    assert sorted(math.floor(2 * math.log10(1e4 * trial["lr"])) for trial in trials) == list(
        range(8)
    )
    assert sorted(trial["kind"] for trial in trials) == ["a"] * 4 + ["b"] * 4


def test_validation_data_choose_the_temperature_of_draws() -> None:
    """Draws scatter twice as far as targets do, so that a quarter of their variance is right."""
    torch.manual_seed(0)
    noise, data = torch.randn(100, 300, 1), (torch.zeros(300, 1), torch.randn(300, 1))
    problem = Problem(data, data, {"clean": data}, _net, variance=1e-9)
    found = scored(
        problem,
        lambda x, temperature: 2 * temperature**0.5 * noise,
        [1 / 64, 1 / 16, 1 / 4, 1.0, 4.0],
    )
    assert found["draws at"] <= 0.25  # what is missing is noise of the data
    assert found["valid"] == pytest.approx(found["tests"]["clean"]["nll"])
    assert found["valid"] == pytest.approx(0.5 * math.log(2 * math.pi * math.e), abs=0.1)


@pytest.mark.parametrize(
    "method", ["Spectral.posterior", "IVON", "last-layer Laplace", "Kronecker Laplace", "SWAG"]
)
def test_draws_scatter_with_the_root_of_the_temperature(problem: Problem, method: str) -> None:
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, **chosen(method, 1)[0]}
    predict = METHODS[method].train(problem, 0, options)
    with torch.no_grad():
        wide, narrow = (predict(problem.valid[0], t).std(0).mean() for t in (1e-4, 1e-6))
    assert 9 < wide / narrow < 11


def test_runs_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.jsonl"
    command = [
        "bench",
        "posterior",
        "--problems",
        "diabetes",
        "--methods",
        "IVON",
        "--trials",
        "1",
        "--seeds",
        "1",
    ]
    assert cli.main([*command, "--results", str(file)]) == 0
    kept, first = file.read_text(), capsys.readouterr().out.partition("\n")[2]
    assert kept.count('"cell"') == 2
    assert cli.main([*command, "--results", str(file)]) == 0
    assert file.read_text() == kept
    assert capsys.readouterr().out.partition("\n")[2] == first  # but for the time it took
