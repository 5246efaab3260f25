"""The curvature benchmark: its figure against oracles, its command on little data, and the results we publish."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from eigenstep.core.kronecker import Kronecker
from eigenstep.core.matrices import Full
from eigenstep_lab import cli
from eigenstep_lab.bench import curvature, prediction
from eigenstep_lab.bench.prediction import Layers, Setting

DOCS = Path(__file__).parents[3] / "docs"
SMALL = ["--tasks", "digits", "--steps", "60", "--width", "16", "--depth", "1"]


def random_matrix(sizes: tuple[int, int], dtype: torch.dtype) -> Kronecker:
    factors = [Full(torch.linalg.qr(torch.randn(n, n))[0], 10 ** (-2 * torch.rand(n))) for n in sizes]
    return Kronecker(torch.tensor(3.0), tuple(factors)).normalized().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predictive_nll_is_that_of_the_matrix_that_is_applied(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    S, gradient = random_matrix((5, 4), dtype), torch.randn(5, 4)
    vector, inverse = gradient.flatten().double(), S.dense(-1).double()
    want = (vector @ inverse @ vector - torch.logdet(inverse)) / 20
    torch.testing.assert_close(prediction.predictive_nll(S, gradient).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", [curvature.BEST, curvature.EXACT, "paper, exact", "diagonal"])
def test_schemes_find_a_matrix_that_stays_the_same(scheme: str) -> None:
    """Gradients drawn from one Gaussian: a scheme with bases comes close to knowing it, a diagonal matrix does not."""
    torch.manual_seed(0)
    truth = random_matrix((8, 6), torch.float32)
    gradients = truth.sample((300, 2), power=1.0)
    late = prediction.follow(gradients, curvature.SCHEMES[scheme])[150:].mean()
    known = torch.stack([prediction.predictive_nll(truth, g) for g in gradients.flatten(0, 1)])[300:].mean()
    assert (late - known < 0.2) == (scheme != "diagonal")
    assert late > known


def test_the_first_prediction_knows_the_size_only() -> None:
    gradients = 3 * torch.randn(2, 4, 3)
    first = prediction.follow(gradients, curvature.SCHEMES[curvature.BEST])[0]
    torch.testing.assert_close(first, 1 + gradients[0].square().mean().log())


@pytest.mark.parametrize("turn", [True, False])
def test_between_turns_eigenvalues_learn_and_bases_wait(turn: bool) -> None:
    torch.manual_seed(0)
    S, recent = random_matrix((5, 4), torch.float32), torch.randn(2, 5, 4)
    new = prediction.learn(S, recent, 7, curvature.SCHEMES[curvature.BEST], turn=turn, interval=2)
    assert isinstance(S.factors[0], Full)
    assert isinstance(new.factors[0], Full)
    assert (not torch.equal(new.factors[0].basis, S.factors[0].basis)) == turn
    assert not torch.allclose(new.factors[0].eigs, S.factors[0].eigs)


def test_layers_of_one_shape_are_stacked_with_wide_ones_transposed() -> None:
    recordings = [{"a": torch.randn(7, 2, 5), "b": torch.randn(7, 3, 3), "c": torch.randn(7, 5, 2)} for _ in range(4)]
    first, second = prediction.stack(recordings)
    assert (first.names, first.gradients.shape) == (("a", "c"), (7, 4, 2, 5, 2))
    assert (second.names, second.gradients.shape) == (("b",), (7, 4, 1, 3, 3))
    assert torch.equal(first.gradients[:, 3, 0], recordings[3]["a"].mT)
    assert torch.equal(first.gradients[:, 2, 1], recordings[2]["c"])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curvature")
    options = ["--json", str(folder / "figures.json"), "--plot", str(folder / "figures.png"), "--seeds", "2"]
    assert cli.main(["bench", "curvature", *SMALL, *options]) == 0
    assert (folder / "figures.png").stat().st_size > 0
    return folder / "figures.json"


@pytest.fixture
def result(written: Path) -> dict[str, Any]:
    return dict(json.loads(written.read_text())["result"])


def test_figures_are_finite_and_in_the_expected_order(result: dict[str, Any]) -> None:
    found = result["figures"]["digits"]
    assert list(found) == list(curvature.SCHEMES)
    for runs in found.values():
        for figures in runs.values():
            assert math.isfinite(figures["early"])
            assert math.isfinite(figures["late"])
    for period in curvature.PERIODS:
        assert found[curvature.EXACT]["fp32"][period] < found["diagonal"]["fp32"][period] - 0.5
        assert found[curvature.BEST]["fp32"][period] < found["diagonal"]["fp32"][period] - 0.5
        assert abs(found[curvature.BEST]["bf16"][period] - found[curvature.BEST]["fp32"][period]) < 0.3


def test_figures_have_layers_seeds_and_curves(result: dict[str, Any]) -> None:
    figures = result["figures"]["digits"][curvature.BEST]["fp32, every 2"]
    assert len(figures["curve"]) == 6
    assert len(figures["layers"]) == 6
    assert "blocks.0.attention.query.weight" in figures["layers"]
    for period in curvature.PERIODS:
        layers = [layer[period] for layer in figures["layers"].values()]
        assert figures[period] == pytest.approx(sum(layers) / 6, rel=1e-5)
        assert figures[period] == pytest.approx(sum(figures["seeds"][period]) / 2, rel=1e-5)
        assert figures["seeds"][period][0] != figures["seeds"][period][1]


def test_verdicts_follow_from_the_figures(result: dict[str, Any]) -> None:
    assert len(result["verdicts"]) == 8
    assert list(curvature.verdicts(result["figures"])) == result["verdicts"]
    for verdict in result["verdicts"]:
        allowed = 0.1 if "every 2" in verdict["variant"] else 0.0
        assert verdict["holds"] == (verdict["ours"] - verdict["exact"] <= allowed)


def test_search_keeps_the_best_and_shows_what_it_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    gradients = random_matrix((6, 4), torch.float32).sample((80, 1, 1), power=1.0)
    schemes = {"paper": Setting("normalized", start=0, gap=0.1, rate=0.1), "exact": Setting("eigendecomposition", 0)}
    monkeypatch.setattr(curvature, "SCHEMES", schemes)
    found = curvature.search({"made up": [Layers(("layer",), gradients)]})
    for name, setting in schemes.items():
        tried = [entry for entry in found["tried"] if entry["rotation"] == setting.rotation]
        best = min(tried, key=lambda entry: entry["early"] + entry["late"])
        assert {key: best[key] for key in asdict(setting)} == found["chosen"][name]


@pytest.mark.parametrize(
    ("options", "text"),
    [(["--steps", "59"], "--steps must be at least 60"), (["--seeds", "0"], "--seeds must be at least 1")],
)
def test_impossible_options(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "curvature", *options]) == 2
    assert text in capsys.readouterr().err


class TestPublishedResults:
    """What docs/curvature.md says, against docs/results/curvature.json and the benchmark as it is now."""

    @pytest.fixture
    def published(self) -> dict[str, Any]:
        return dict(json.loads((DOCS / "results" / "curvature.json").read_text())["result"])

    def test_tables_follow_from_the_figures(self, published: dict[str, Any]) -> None:
        assert [asdict(table) for table in curvature.summary_tables(published)] == published["tables"]

    def test_they_are_of_the_present_settings(self, published: dict[str, Any]) -> None:
        assert published["settings"] == {name: asdict(setting) for name, setting in curvature.SCHEMES.items()}

    def test_our_best_is_no_worse_than_an_exact_eigendecomposition(self, published: dict[str, Any]) -> None:
        assert list(curvature.verdicts(published["figures"])) == published["verdicts"]
        assert all(verdict["holds"] for verdict in published["verdicts"])
