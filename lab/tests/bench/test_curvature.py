"""The curvature benchmark: its figure against oracles, its command on little data, and the results
we publish.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eigenstep.core.matrices import Full, Kronecker
from eigenstep_lab import cli
from eigenstep_lab.bench import curvature, prediction
from eigenstep_lab.bench.curvature import SCHEMES, Scheme
from eigenstep_lab.bench.prediction import Shipped, Spectrum
from eigenstep_lab.rivals import TURNING

DOCS = Path(__file__).parents[3] / "docs"
SMALL = ["--tasks", "digits", "--steps", "60", "--width", "16", "--depth", "1"]


def random_matrix(sizes: tuple[int, int], dtype: torch.dtype = torch.float32) -> Kronecker:
    factors = [
        Full(torch.linalg.qr(torch.randn(n, n))[0], 10 ** (-2 * torch.rand(n))) for n in sizes
    ]
    return Kronecker(torch.tensor(3.0), tuple(factors)).normalized().to(dtype)


def spectrum_of(S: Kronecker) -> Spectrum:
    bases = [factor.basis[None, None] for factor in S.factors if isinstance(factor, Full)]
    return Spectrum(bases, S.spectrum[None, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predictive_nll_is_that_of_the_matrix_that_is_applied(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    S, gradient = random_matrix((5, 4), dtype), torch.randn(5, 4)
    vector, inverse = gradient.flatten().double(), S.dense(-1).double()
    want = (vector @ inverse @ vector - torch.logdet(inverse)) / 20
    found = prediction.predictive_nll(spectrum_of(S), gradient[None, None])[0]
    torch.testing.assert_close(
        found, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"eigenvalues": "kronecker"}, {"max_ratio": 1.0}, {"structure": "diagonal", "eps": 0.0}],
)
def test_the_spectrum_is_what_the_optimizer_divides_by(options: dict[str, Any]) -> None:
    """Without momentum and a turn, a step is the newest gradient times S^(-1/2) of the state it
    leaves.
    """
    torch.manual_seed(0)
    gradients = random_matrix((8, 4)).sample((6, 3), power=1.0).double()
    rests = [[0, 1], [3, 100]]
    plain = {"betas": (0.0, 0.95), "interval": rests, "map": "cayley", "grafting": False}
    scheme = Scheme("Spectral", {**plain, **options})
    learner = scheme.build(gradients[0])
    assert isinstance(learner, Shipped)
    learner._optimizer.param_groups[0]["lr"] = 1.0
    for count, gradient in enumerate(gradients):
        before = torch.stack([param.detach().clone() for param in learner._params])
        learner.learn(gradient)
        step = before - torch.stack([param.detach() for param in learner._params])
        if count < 3:
            continue
        S = learner.spectrum()
        turned = prediction.rotate(learner.lay_out(gradient), S.bases) / S.values.sqrt()
        torch.testing.assert_close(
            learner.lay_out(step),
            prediction.rotate(turned, [None if basis is None else basis.mT for basis in S.bases]),
        )


def test_learning_moves_no_weights_and_uses_the_options_that_are_named() -> None:
    gradients = torch.randn(3, 2, 8, 2)
    for name, scheme in SCHEMES.items():
        learner = scheme.build(gradients[0])
        if isinstance(learner, Shipped):
            learner.learn(gradients[0])
            assert not any(param.any() for param in learner._params)
            group = learner._optimizer.param_groups[0]
            wanted = {k: v for k, v in scheme.options.items() if k not in TURNING}
            assert {k: group[k] for k in wanted} == wanted, name
            assert type(learner._optimizer) is curvature.SHIPPED[scheme.family]


@pytest.mark.parametrize(
    "name", [name for name in SCHEMES if "paper" not in name and "5 steps" not in name]
)
def test_schemes_find_a_matrix_that_stays_the_same(name: str) -> None:
    """Gradients drawn from one Gaussian: one with whole bases comes close to knowing it, others do
    not.
    """
    torch.manual_seed(0)
    truth = random_matrix((8, 6))
    gradients = truth.sample((300, 2, 1), power=1.0)
    late = prediction.follow(gradients, SCHEMES[name].build)[150:].mean()
    known = torch.stack(
        [
            prediction.predictive_nll(spectrum_of(truth), g[None])
            for g in gradients[150:].flatten(0, 1)
        ]
    )
    assert (late - known.mean() < 0.2) == (name not in ("diagonal", "Spectral.fast"))
    assert late > known.mean()


@pytest.mark.parametrize("exact", [True, False])
def test_soap_keeps_second_moments_with_their_eigenvectors(exact: bool) -> None:
    """A basis that only changes its order changes no figure."""
    torch.manual_seed(0)
    first, later = torch.diag(torch.tensor([3.0, 1.0])), torch.diag(torch.tensor([1.0, 3.0]))
    learner = prediction.SOAP(2.0, 1, exact, first[None])
    for gradient in (first, later, later, later, later):
        learner.learn(gradient[None] + 1e-4 * torch.randn(1, 2, 2))
    S = learner.spectrum()
    dense: Tensor = S.bases[0][0, 0] @ S.values[0, 0] @ S.bases[1][0, 0].mT
    assert dense.abs().argmax() == 3


def test_layers_of_one_shape_are_stacked_with_wide_ones_transposed() -> None:
    recordings = [
        {"a": torch.randn(7, 2, 5), "b": torch.randn(7, 3, 3), "c": torch.randn(7, 5, 2)}
        for _ in range(4)
    ]
    first, second = prediction.stack(recordings)
    assert (first.names, first.gradients.shape) == (("a", "c"), (7, 4, 2, 5, 2))
    assert (second.names, second.gradients.shape) == (("b",), (7, 4, 1, 3, 3))
    assert torch.equal(first.gradients[:, 3, 0], recordings[3]["a"].mT)
    assert torch.equal(first.gradients[:, 2, 1], recordings[2]["c"])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curvature")
    options = [
        "--json",
        str(folder / "figures.json"),
        "--plot",
        str(folder / "figures.png"),
        "--seeds",
        "2",
    ]
    assert cli.main(["bench", "curvature", *SMALL, *options]) == 0
    assert (folder / "figures.png").stat().st_size > 0
    return folder / "figures.json"


@pytest.fixture
def result(written: Path) -> dict[str, Any]:
    return dict(json.loads(written.read_text())["result"])


def test_figures_are_finite_and_in_the_expected_order(result: dict[str, Any]) -> None:
    found = result["figures"]["digits"]
    assert list(found) == list(SCHEMES)
    for figures in found.values():
        assert math.isfinite(figures["early"])
        assert math.isfinite(figures["late"])
    for period in curvature.PERIODS:
        assert found["Spectral"][period] < found["diagonal"][period] - 0.5
        assert found["SOAP, eigh every step"][period] < found["diagonal"][period] - 0.5
        assert abs(found["Spectral, bfloat16 bases"][period] - found["Spectral"][period]) < 0.3


def test_figures_have_layers_seeds_and_curves(result: dict[str, Any]) -> None:
    figures = result["figures"]["digits"]["Spectral"]
    assert len(figures["curve"]) == 6
    assert len(figures["layers"]) == 6
    assert "blocks.0.attention.query.weight" in figures["layers"]
    for period in curvature.PERIODS:
        layers = [layer[period] for layer in figures["layers"].values()]
        assert figures[period] == pytest.approx(sum(layers) / 6, rel=1e-5)
        assert figures[period] == pytest.approx(sum(figures["seeds"][period]) / 2, rel=1e-5)
        assert figures["seeds"][period][0] != figures["seeds"][period][1]


def test_the_last_table_compares_with_the_best_that_decomposes(result: dict[str, Any]) -> None:
    found = result["figures"]["digits"]
    best = min(
        found[name]["late"] for name in SCHEMES if SCHEMES[name].family in curvature.DECOMPOSE
    )
    rows = {row[0]: row[-1] for row in result["tables"][-1]["rows"]}
    assert list(rows) == [name for name in SCHEMES if SCHEMES[name].family in curvature.SHIPPED]
    gap = found["Spectral"]["late"] - best
    assert rows["Spectral"] == f"{gap:+.3f} {'ahead' if gap < 0 else 'behind'}"


class TestPublishedResults:
    """What docs/curvature.md says, against docs/results/curvature.json and the benchmark as it is
    now.
    """

    @pytest.fixture
    def published(self) -> dict[str, Any]:
        return dict(json.loads((DOCS / "results" / "curvature.json").read_text())["result"])

    def test_tables_follow_from_the_figures(self, published: dict[str, Any]) -> None:
        assert [asdict(table) for table in curvature.summary_tables(published)] == published[
            "tables"
        ]

    def test_they_are_of_the_present_settings(self, published: dict[str, Any]) -> None:
        assert published["settings"] == {name: asdict(scheme) for name, scheme in SCHEMES.items()}
