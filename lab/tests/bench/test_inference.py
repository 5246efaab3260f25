"""The inference benchmark: its command on little data, and the results that we publish."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from eigenstep.inference import Gaussian
from eigenstep_lab.bench import inference
from eigenstep_lab.bench.inference_fits import linearized
from eigenstep_lab.bench.inference_predictions import predictive
from eigenstep_lab.bench.inference_quadrature import Quadrature as BenchQuadrature
from eigenstep_lab.problems.regressions import classifier
from inference.problems import Quadrature, small_logistic

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.slow
def test_the_command_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bench: Callable[..., dict[str, Any]]
) -> None:
    result = bench("inference", "--quick", "--plot", str(tmp_path / "gap.png"))
    judged = [{**asdict(v), "holds": v.holds} for v in inference.verdicts(result)]
    assert judged == result["verdicts"]
    assert len(result["verdicts"]) == 21
    assert (tmp_path / "gap.png").exists()
    assert "Verdicts" in capsys.readouterr().out


def test_published_verdicts_follow_from_published_figures() -> None:
    result = json.loads(
        (Path(__file__).parents[3] / "docs" / "results" / "inference.json").read_text()
    )["result"]
    found = list(inference.verdicts(result))
    assert [asdict(verdict) for verdict in found] == result["verdicts"]
    assert sum(verdict.holds for verdict in found) == sum(
        row[-1] == "holds" for row in result["tables"][-1]["rows"]
    )


def test_the_reference_is_the_best_gaussian() -> None:
    inputs, targets = small_logistic()
    exact, other = BenchQuadrature(inputs, targets, 0.5), Quadrature(inputs, targets, 0.5)
    best = exact.solve()
    mean, covariance = other.solve()
    torch.testing.assert_close(best.mean, mean)
    torch.testing.assert_close(best.covariance(), covariance)
    assert exact.elbo(best) == pytest.approx(other.elbo(mean, covariance))
    assert exact.gap(best, Gaussian.start(mean + 0.01, best.precision)) > 0


def test_the_linear_part_of_a_network() -> None:
    """Shifts by ``h`` and ``h / 2``: the error of the linear part falls to a quarter."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2))
    x = torch.randn(5, 3)
    model, start = classifier(net, x, torch.tensor([0, 1, 1, 0, 1]))
    flat, shift = (
        linearized(model, start),
        {name: torch.randn_like(tensor) for name, tensor in start.items()},
    )

    def error(h: float) -> float:
        points = {name: (tensor + h * shift[name])[None] for name, tensor in start.items()}
        return (predictive(flat, points, x) - predictive(model, points, x)).norm().item()

    assert error(0.0) == 0.0
    assert error(1e-3) / error(5e-4) == pytest.approx(4.0, rel=0.02)
