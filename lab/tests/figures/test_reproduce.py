import itertools
import json
import math
import re
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import linalg

from eigenstep import Full, OuterProducts
from eigenstep_lab import cli, figures
from eigenstep_lab.baselines import eigen
from eigenstep_lab.baselines.van_loan import dense_curvature
from eigenstep_lab.bench import pages
from eigenstep_lab.console import UserError
from eigenstep_lab.figures import (
    exact_vs_truncated,
    full_matrix,
    gradient_free,
    low_precision,
    matching,
    report,
    reproduce,
    spd,
)
from eigenstep_lab.figures.training import RoundedWeights
from eigenstep_lab.problems.functions import FUNCTIONS
from eigenstep_lab.results import Curve, Panel, Result, Table, Verdict, typical_ratio
from eigenstep_lab.tasks import CLASSIFICATIONS

CPU = torch.device("cpu")
MINIATURES = {
    "full_matrix": matching.Settings(sizes=(6,), seeds=2, steps=6, lr=0.01, points=3),
    "kronecker": matching.Settings(sizes=(2, 3), seeds=2, steps=6, lr=0.01, points=3),
    "spd": spd.Settings(
        dimension=4,
        seeds=2,
        steps=40,
        samples=20,
        minibatch=10,
        target=0.5,
        lr_nearness=0.05,
        lr_log_det=0.1,
    ),
    "gradient_free": gradient_free.Settings(dimension=2, seeds=3, generations=12, target=2.0),
    "exact_vs_truncated": exact_vs_truncated.Settings("digits", steps=2, seeds=1, sides=(4,)),
    "low_precision": low_precision.Settings(
        ("digits",), steps=2, seeds=1, seeds_beside=1, tuning_steps=2, lrs=(1e-2,)
    ),
}

LIMITS = {
    "full_matrix": {
        "It converges to the fixed point as fast as the default scheme.": "≤ 1.1",
        "It matches the default scheme's iterates about as closely as the Cholesky scheme "
        "does.": "≤ 2",
        "One step equals the default scheme's up to first order in the step size (Claim "
        "2).": "≥ 1.9",
    },
    "kronecker": {
        "It converges as fast as the impractical projection.": "≤ 1.1",
        "It converges as fast as the structured Cholesky scheme.": "≤ 1.1",
        "It matches the unstructured iterates of the default scheme as closely as the impractical "
        "projection.": "≤ 1.1",
        "It matches the unstructured iterates of the default scheme as closely as the structured "
        "Cholesky scheme.": ("≤ 1.1"),
    },
    "spd": {
        "It performs as well as retraction-based and Cholesky-based Riemannian gradient "
        "descent.": "≤ 1.15",
    },
    "gradient_free": {
        "It performs similarly to existing natural evolution strategies.": "≤ 1.15 ≥ -0.1"
    },
    "exact_vs_truncated": {
        "Both maps work equally well in terms of iterations.": "≤ 1.05",
        "The exact Cayley map is much slower, because it uses matrix inversion.": "≥ 1.5",
    },
    "low_precision": {
        "It trains transformers in half precision effectively.": "≤ 1.05",
        "It matches the performance of Muon.": "≤ 1.05",
        "Non-diagonal methods have benefits.": "≤ 1",
        "A different root can affect the performance.": "≥ 2",
        "It is faster than SOAP, because it decomposes no matrix.": "≤ 0.9",
    },
}
"""The limits of every claim, fixed before anything was measured: no verdict may hold by changing
them.
"""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def few_test_batches(monkeypatch):
    """Training figures evaluate on few pictures."""
    from eigenstep_lab.figures import training

    monkeypatch.setattr(training, "TEST_BATCHES", 2)


def make(name, seed=0):
    planned = reproduce.plan(name, full=False, seed=seed)
    section = reproduce.make(
        replace(planned, settings=asdict(MINIATURES[name])), seed=seed, device=CPU
    )
    assert isinstance(section.result, Result), section.result
    return section


def untimed(result):
    """All numbers that must be the same in every run."""
    plain = result.as_dict()
    parts = [
        part
        for kind in ("panels", "verdicts", "tables")
        for part in plain[kind]
        if not part["timed"]
    ]
    return json.dumps(parts)


@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_figure_shows_the_papers_scheme_and_ours_and_ends_in_verdicts(
    name, few_test_batches, tmp_path
):
    section = make(name)
    for panel in section.result.panels:
        assert any(curve.startswith("paper") for curve in panel.curves)
        assert any(curve.startswith("ours") for curve in panel.curves)
        for curve in panel.curves.values():
            assert all(len(run) == len(curve.x) > 0 for run in curve.runs)
            assert np.isfinite(curve.runs).all()
    for family in ("paper", "ours"):
        assert any(verdict.scheme.startswith(family) for verdict in section.result.verdicts)
    assert all(math.isfinite(v.value) for v in section.result.verdicts if not v.timed)
    limits: dict[str, dict[str, None]] = {}
    for verdict in section.result.verdicts:
        limits.setdefault(verdict.claim, {})[
            f"{'≥' if verdict.at_least else '≤'} {verdict.limit:g}"
        ] = None
    assert {claim: " ".join(found) for claim, found in limits.items()} == LIMITS[name]
    assert untimed(make(name).result) == untimed(section.result)
    if name in ("full_matrix", "kronecker", "spd"):
        assert untimed(make(name, seed=1).result) != untimed(section.result)

    report.write_figure(tmp_path, section, {"seed": 0, "commit": "abc"})
    again = report.read_figure(
        tmp_path, replace(section, result=""), {"seed": 0, "commit": "other"}
    )
    assert again == replace(section, commit="abc", result=again.result)
    assert again.result.as_dict() == json.loads(json.dumps(section.result.as_dict()))
    assert report.read_figure(tmp_path, section, {"seed": 1}) is None
    assert report.read_figure(tmp_path, replace(section, settings={}), {"seed": 0}) is None
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert written["figure"] == name
    assert [v["holds"] for v in written["verdicts"]] == [v.holds for v in section.result.verdicts]
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in (tmp_path / f"{name}.svg").read_bytes()


@pytest.mark.parametrize(
    ("value", "at_least", "holds"),
    [(1.0, False, True), (1.01, False, False), (1.0, True, True), (0.99, True, False)]
    + [(math.nan, way, False) for way in (False, True)],
)
def test_a_verdict_follows_from_the_figure_and_the_limit(value, at_least, holds):
    assert Verdict("claim", "ours", "ratio", value, limit=1.0, at_least=at_least).holds is holds


def test_curves_give_quantiles_in_which_divergence_ranks_last():
    curve = Curve([1.0, 2.0], [[1.0, math.nan], [2.0, 5.0], [3.0, math.inf]])
    assert curve.quantile(0.5) == [2.0, math.inf]
    assert curve.quantile(0.1) == [1.0, 5.0]


def test_the_typical_ratio_is_a_geometric_mean_over_pairs():
    two, half = Curve([1.0, 2.0], [[2.0, 8.0]]), Curve([1.0, 2.0], [[1.0, 2.0]])
    assert typical_ratio(two, half) == pytest.approx(math.sqrt(2 * 4))
    assert math.isnan(typical_ratio(Curve([1.0], [[math.nan]]), Curve([1.0], [[1.0]])))
    assert typical_ratio(Curve([1.0], [[math.inf]]), Curve([1.0], [[1.0]])) > 1e300


def test_distances_agree_with_scipy():
    torch.manual_seed(0)
    a, b = (torch.randn(5, 5, dtype=torch.float64) for _ in range(2))
    a, b = a @ a.T, b @ b.T
    root = linalg.sqrtm(b.numpy())
    squared = np.trace(a) + np.trace(b) - 2 * np.trace(linalg.sqrtm(root @ a.numpy() @ root)).real
    assert float(matching.wasserstein(a, b)) == pytest.approx(math.sqrt(squared / np.trace(b)))
    assert float(matching.wasserstein(a, a)) == pytest.approx(0, abs=1e-6)
    assert float(matching.frobenius(a, b)) == pytest.approx(
        np.linalg.norm(a - b) / np.linalg.norm(b)
    )


def test_the_truth_of_iterate_matching_is_the_default_scheme():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    dense = matching.random_covariances(4, 3, 10, generator)
    curvature = OuterProducts(torch.randn(1, 3, 4, dtype=torch.float64))
    want = eigen.update(Full.from_dense(dense), curvature, lr=0.1).dense()
    torch.testing.assert_close(0.9 * dense + 0.1 * dense_curvature(curvature), want)


def literal(name, w):
    """The paper's formulas, with numpy and loops."""
    d, pairs = len(w), list(itertools.pairwise(w))
    if name == "Ackley":
        e1, e2 = np.exp(-0.2 * np.sqrt(np.mean(w**2))), np.exp(np.mean(np.cos(2 * np.pi * w)))
        return 20 - 20 * e1 + np.e - e2
    if name == "Rosenbrock":
        return sum(100 * (b - a**2) ** 2 + (a - 1) ** 2 for a, b in pairs)
    if name == "Bohachevsky":
        waves = sum(
            -0.3 * np.cos(3 * np.pi * a) - 0.4 * np.cos(4 * np.pi * b) + 0.7 for a, b in pairs
        )
        return sum(a**2 + 2 * b**2 for a, b in pairs) + waves
    if name == "Schaffer":
        squares = [a**2 + b**2 for a, b in pairs]
        return sum(s**0.25 * (np.sin(50 * s**0.1) ** 2 + 1) for s in squares)
    return np.sum(w**2) / 4000 - np.prod(np.cos(w / np.sqrt(np.arange(1, d + 1)))) + 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_the_papers_and_vanish_at_their_minimum(name):
    function = FUNCTIONS[name]
    points = torch.randn(3, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = [[literal(name, w) for w in row] for row in points.numpy()]
    torch.testing.assert_close(function(points), torch.tensor(want))
    assert float(function(torch.full((5,), function.coordinate, dtype=torch.float64))) == 0
    assert (function(points) > 0).all()
    with pytest.raises(ValueError, match="d >= 2"):
        function(torch.zeros(3, 1))
    with pytest.raises(TypeError, match="floating-point"):
        function(torch.zeros(3, 2, dtype=torch.int64))


def test_rounded_weights_compute_in_float32_with_bfloat16_weights_and_gradients():
    plain = CLASSIFICATIONS["digits"]().model(0)
    rounded = RoundedWeights(CLASSIFICATIONS["digits"]().model(0)).to(torch.bfloat16)
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16().float()
    inputs = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(rounded(inputs), plain(inputs))
    rounded(inputs).sum().backward()
    assert {parameter.grad.dtype for parameter in rounded.parameters()} == {torch.bfloat16}


def toy():
    curves = {name: Curve([1.0, 2.0], [[1.0, 0.1]]) for name in ("paper", "ours <fast>")}
    verdict = Verdict("It is fast & good.", "ours", "ratio", 2.0, limit=1.0)
    table = Table("T", ("a", "b"), [("1", "<2>")])
    return Result([Panel("A", "x", "y", curves)], [verdict], [table])


def test_the_report_is_one_page_that_needs_nothing_else(tmp_path):
    good = report.Section("one", "First", "A.\n\nB <b>.", {"steps": 3}, "again", 1.0, "abc", toy())
    bad = replace(good, name="two", title="Second", result="no data & no luck")
    report.write_report(tmp_path / "report.html", [good, bad], {"command": "eigenstep"})
    page = (tmp_path / "report.html").read_text()
    assert "0 of 1 checks hold" in page
    assert "does not hold" in page
    assert "no data &amp; no luck" in page
    assert "B &lt;b&gt;." in page
    assert page.count("data:image/svg+xml;base64,") == 1
    assert not re.search(r"(src|href)=['\"](?!data:|#)", page)


def test_the_same_numbers_give_the_same_pictures():
    assert report.pictures(toy()) == report.pictures(toy())


@pytest.fixture
def reproduced(tmp_path, monkeypatch):
    """Run the command with two figures that are made at once; `made` lists them."""

    def make(planned, **_):
        run.made.append(planned.name)
        return replace(planned, result="out of luck" if planned.name in run.unlucky else toy())

    def run(words=""):
        return cli.main(["reproduce", "all", "--jobs=1", f"--directory={tmp_path}", *words.split()])

    run.made = []
    run.unlucky = []
    two = {name: figures.FIGURES[name] for name in ("full_matrix", "spd")}
    monkeypatch.setattr(reproduce, "FIGURES", two)
    monkeypatch.setattr(reproduce, "make", make)
    return run


def test_all_goes_on_when_one_figure_cannot_be_made(tmp_path, reproduced, capsys):
    reproduced.unlucky = ["spd"]
    assert reproduced() == 2
    assert "could not be made, see above: spd" in capsys.readouterr().err
    assert {path.stem for path in tmp_path.glob("*.json")} == {"full_matrix", "report"}
    (table,) = pages.read(tmp_path / "report.json")["result"]["tables"]
    assert table["title"].startswith("Full-matrix scheme (quick run, commit ")
    assert "out of luck" in (tmp_path / "report.html").read_text()


def test_what_is_there_is_not_made_again_but_drawn_anew(tmp_path, reproduced, capsys):
    assert reproduced() == 0
    (tmp_path / "full_matrix.png").write_bytes(b"as it was drawn once")
    (tmp_path / "spd.json").write_text("{")
    assert reproduced() == 0
    assert reproduced.made == ["full_matrix", "spd", "spd"]
    assert (tmp_path / "full_matrix.png").read_bytes().startswith(b"\x89PNG")
    assert "made before, at commit" in capsys.readouterr().out
    assert reproduced("--again") == 0
    assert reproduced.made[3:] == ["full_matrix", "spd"]


def test_what_other_versions_made_can_be_kept(tmp_path, reproduced):
    assert reproduced() == 0
    path = tmp_path / "full_matrix.json"
    older = {"code": "older", "commit": "abc1234"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **older}))
    assert reproduced("--as-made") == 0
    assert reproduced.made == ["full_matrix", "spd"]
    assert "quick run, commit abc1234" in (tmp_path / "report.json").read_text()
    assert reproduced() == 0
    assert reproduced.made[2:] == ["full_matrix"]


def test_a_full_run_may_leave_some_figures_brief(tmp_path, reproduced):
    assert reproduced("--full --brief spd") == 0
    full, brief = (
        json.loads((tmp_path / f"{name}.json").read_text())["settings"]["seeds"]
        for name in ("full_matrix", "spd")
    )
    assert full == full_matrix.FULL.seeds
    assert brief == spd.QUICK.seeds
    titles = [table["title"] for table in pages.read(tmp_path / "report.json")["result"]["tables"]]
    assert [re.search("full|quick", title)[0] for title in titles] == ["full", "quick"]


def test_one_command_publishes_the_report(tmp_path, reproduced, capsys):
    folder = tmp_path / "paper"
    assert reproduced(f"--publish {folder}") == 2
    assert "paper.md to put verdicts into" in capsys.readouterr().err
    page = tmp_path / "paper.md"
    page.write_text("Text.\n<!-- tables of paper/report.json -->\n<!-- end of tables -->\n")
    assert reproduced(f"--publish {folder}") == 0
    assert "It is fast & good." in page.read_text()
    published = {"report.html", "report.json", "full_matrix.png", "spd.png"}
    assert {path.name for path in folder.iterdir()} == published


def test_missing_devices_data_and_processes_are_named(monkeypatch, capsys, tmp_path):
    words = ["reproduce", "spd", f"--directory={tmp_path}"]
    assert cli.main([*words, "--device=cuda:99"]) == 2
    assert "device 'cuda:99' cannot be used here" in capsys.readouterr().err
    assert cli.main([*words, "--jobs=0"]) == 2
    assert "--jobs must be at least 1" in capsys.readouterr().err

    def fail(*_, **__):
        raise UserError("no such data")

    monkeypatch.setattr(spd, "run", fail)
    assert cli.main(words) == 2
    assert "no such data" in capsys.readouterr().out


def titled(planned):
    """A figure that is made: its title says of what."""
    return replace(planned, title=f"{planned.name} {planned.share}")


@pytest.mark.parametrize("jobs", [1, 2])
def test_figures_come_in_order_however_they_are_made(jobs):
    names = ["spd", "low_precision", "kronecker"]
    plans = [reproduce.plan(name, full=False, seed=0) for name in names]
    made = reproduce._make_all(plans, jobs, titled)
    assert [section.title for section in made] == [f"{name} " for name in names]
    shares = [titled(share).title for share in reproduce.shares(plans[1])]
    assert shares == [f"low_precision {task}" for task in reversed(low_precision.QUICK.tasks)]


def test_shares_keep_their_trainings_for_the_whole_figure(tmp_path, monkeypatch, few_test_batches):
    settings = replace(MINIATURES["low_precision"], tasks=("digits", "digits-hiera"))
    planned = reproduce.plan("low_precision", full=False, seed=0)
    planned = replace(planned, settings=asdict(settings))
    origin = {"seed": 0, "commit": "abc"}
    make = partial(reproduce._make, directory=tmp_path, device=CPU, origin=origin)
    for share in reproduce.shares(planned):
        make(share)
    assert not list(tmp_path.glob("*.json"))  # a share is no figure
    monkeypatch.setattr("eigenstep_lab.figures.training._train", None)  # nothing is left to train
    whole = make(planned)
    assert isinstance(whole.result, Result), whole.result
    assert (tmp_path / "low_precision.json").is_file()
