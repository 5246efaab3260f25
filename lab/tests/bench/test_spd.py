"""The benchmark of SPD solvers: its problems against autodiff, its meter, its command, and what is
published.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from eigenstep_lab import cli
from eigenstep_lab.bench import spd
from eigenstep_lab.bench.spd_solvers import Meter, Over, ours
from eigenstep_lab.problems.spd import MINIBATCHES, PROBLEMS, SAMPLES

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", PROBLEMS)
def test_hand_written_derivatives_are_those_of_autodiff(name: str) -> None:
    torch.manual_seed(0)
    problem = PROBLEMS[name](4, 10.0, 0)
    S = torch.randn(4, 4, dtype=torch.float64)
    S = S @ S.T + torch.eye(4)
    V = torch.randn(4, 4, dtype=torch.float64)
    V = V + V.T
    assert problem.numpy().value(S.numpy()) == pytest.approx(problem.value(S).item())
    leaf = S.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.value(leaf), leaf, create_graph=True)
    symmetric = (gradient + gradient.T) / 2
    np.testing.assert_allclose(
        problem.numpy().gradient(S.numpy()), symmetric.detach().numpy(), rtol=1e-9
    )
    torch.testing.assert_close(problem.gradient(S), symmetric.detach())
    (product,) = torch.autograd.grad((symmetric * V).sum(), leaf)
    product = (product + product.T) / 2
    np.testing.assert_allclose(
        problem.numpy().hessian(S.numpy(), V.numpy()), product.numpy(), rtol=1e-9
    )


def test_meter_counts_and_stops() -> None:
    meter = Meter(PROBLEMS["log-det"](4, 10.0, 0), 1e-8, 1000, 10.0)
    meter.run(ours)
    assert meter.message == "reached"
    assert meter.best <= 1e-8
    assert 0 < meter.gradients < meter.values < 40
    short = Meter(PROBLEMS["log-det"](4, 10.0, 0), 1e-8, 3, 10.0)
    short.run(ours)
    assert (short.message, short.gradients) == ("3 gradients", 3)
    with pytest.raises(Over, match="reached"):
        meter.see(meter.problem.least)


@pytest.mark.parametrize("name", MINIBATCHES)
def test_gaps_are_zero_at_the_solution_and_losses_add_up(name: str) -> None:
    problem = MINIBATCHES[name](3, 10.0, 0, (2,))
    S = torch.eye(3, dtype=torch.float64).expand(2, -1, -1).clone().requires_grad_()
    everything = torch.arange(SAMPLES)
    (slope,) = torch.autograd.grad(problem.value(S, everything).sum(), S)
    (other,) = torch.autograd.grad(problem.gap(S).sum(), S)
    torch.testing.assert_close(slope + slope.mT, other + other.mT, rtol=1e-6, atol=1e-8)
    assert (problem.gap(S) > 0).all()
    torch.testing.assert_close(
        problem.gap(torch.linalg.inv(problem.Q)), torch.zeros(2, dtype=torch.float64)
    )
    torch.testing.assert_close(problem.gradient(S.detach(), everything), (slope + slope.mT) / 2)
    few = torch.arange(7)
    (slope,) = torch.autograd.grad(problem.value(S, few).sum(), S)
    torch.testing.assert_close(problem.gradient(S.detach(), few), (slope + slope.mT) / 2)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_gap_is_the_distance_from_the_least_value(name: str) -> None:
    problem = PROBLEMS[name](4, 10.0, 1)
    S = torch.diag(torch.linspace(0.5, 2, 4, dtype=torch.float64))
    assert problem.gap(S).item() == pytest.approx(problem.value(S).item() - problem.least)


def test_verdicts_follow_from_the_figures() -> None:
    entry = {"problem": "log-det", "condition": 10.0, "reached": True}
    figures = {"ours": (8, 0.02), spd.CG: (8, 0.01), spd.TR: (30, 0.02)}
    main = [{**entry, "solver": s, "gradients": g, "seconds": t} for s, (g, t) in figures.items()]
    found = spd.verdicts({"main": main, "slopes": {"paper": {"Cholesky": 1.0}}})
    # As many are no more, as long is not less
    assert [v.holds for v in found] == [True, False, False]
    main[0]["reached"] = False
    assert not any(v.holds for v in spd.verdicts({"main": main, "slopes": {}}))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("pymanopt", "geoopt", "rich", "matplotlib"):
        pytest.importorskip(package)
    options = [
        "--size",
        "3",
        "--conditions",
        "10",
        "--rounds",
        "1",
        "--sizes",
        "2",
        "--seeds",
        "1",
        "--steps",
        "12",
    ]
    files = [
        "--seconds",
        "0.2",
        "--json",
        str(tmp_path / "spd.json"),
        "--plot",
        str(tmp_path / "spd.png"),
    ]
    assert cli.main(["bench", "spd", *options, *files]) == 0
    result = json.loads((tmp_path / "spd.json").read_text())["result"]
    assert {e["solver"] for e in result["main"]} == set(spd.SEARCHING)
    assert all(e["reached"] for e in result["main"] if e["solver"] == "ours")
    assert {e["solver"] for e in result["fixed"]} == set(spd.FIXED)
    assert (tmp_path / "spd.png").stat().st_size > 0
    assert "Verdicts" in capsys.readouterr().out
