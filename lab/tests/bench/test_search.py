"""The benchmark: counting, areas, verdicts and resuming, on figures small enough to
check by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eigenstep_lab.bench import search, search_bbob, search_large, search_mixed, search_verdicts
from eigenstep_lab.bench.search_mixed import SAMPLERS
from eigenstep_lab.bench.search_peers import PEERS, Counted, Over, Run
from search.problems import sphere

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "search.json"


def test_counting() -> None:
    counted = Counted(lambda x: float(x[0]), [10.0, 1.0, 0.1], budget=5)
    for value in (20.0, 5.0, 7.0, 0.5):
        assert counted(np.array([value])) == value
    assert counted.hits == [2, 4, math.inf]
    counted(np.array([3.0]))
    with pytest.raises(Over):
        counted(np.array([0.0]))
    assert counted.evaluations == 5


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("restarts", [None, "ipop"])
def test_every_search_stays_within_the_budget_and_stops_at_the_last_target(
    peer: str, restarts: str | None
) -> None:
    if not peer.startswith("eigenstep"):
        pytest.importorskip({"pycma": "cma", "surrogate": "cma"}.get(peer, peer))
    counted = Counted(lambda x: float(sphere(x)), [1.0, 1e-3], 2000)
    PEERS[peer](counted, Run(lambda rng: rng.uniform(-1, 1, 3), 0.5, 2000, restarts, 1))
    assert counted.hits[0] <= counted.hits[1] == counted.evaluations < 500
    short = Counted(lambda x: float(sphere(x)), [1e-300], 50)
    PEERS[peer](short, Run(lambda rng: rng.uniform(-1, 1, 3), 0.5, 50, restarts, 1))
    assert short.evaluations <= 50


def test_areas_and_curves() -> None:
    d = 10
    assert search_bbob.area([[10.0, 10.0]], d) == pytest.approx(1)
    assert search_bbob.area([[10_000.0, math.inf]], d) == pytest.approx(0)
    assert search_bbob.area([[10 * math.sqrt(1000)]], d) == pytest.approx(0.5)
    hits = [[20.0, 100.0], [50.0, math.inf]]
    np.testing.assert_allclose(
        search_bbob.ecdf(hits, d, np.array([1.0, 2.0, 5.0, 1000.0])), [0, 0.25, 0.5, 0.75]
    )
    # The area is the mean height of the curve over the logarithmic axis.
    at = np.logspace(0, 3, 20_001)
    assert search_bbob.ecdf(hits, d, at).mean() == pytest.approx(
        search_bbob.area(hits, d), abs=1e-3
    )


def test_least_values_of_bbob() -> None:
    cocoex = pytest.importorskip("cocoex")
    suite = cocoex.Suite("bbob", "instances: 1", "dimensions: 2")
    problem = suite.get_problem_by_function_dimension_instance(1, 2, 1)
    least = search_bbob.least_value(problem)
    assert least == pytest.approx(79.48)
    assert problem(np.zeros(2)) > least


def test_hits_of_bbob(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cocoex")
    monkeypatch.setattr(search_bbob, "BUDGET", 20)
    hits = search_bbob.run_instance("eigenstep", 1, 2, 1)
    assert len(hits) == len(search_bbob.TARGETS)
    assert math.isinf(hits[-1])


def test_command_on_a_miniature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Callable[..., dict[str, Any]]
) -> None:
    for package in ("cma", "cmaes"):
        pytest.importorskip(package)
    monkeypatch.setattr(search, "OVERHEAD_DIMENSIONS", (3,))
    parts = ["--parts", "functions", "restarts", "overhead", "--function-dimensions", "3"]
    small = ["--seeds", "2", "--restart-seeds", "1", "--restart-budget", "100"]
    places = ["--results", str(tmp_path / "r.jsonl"), "--plot", str(tmp_path / "p.png")]
    result = bench("search", *parts, *small, *places)
    assert set(result["functions"]["3"]) == set(search_verdicts.EASY)
    assert [v["holds"] for v in result["verdicts"]] == [
        v.holds for v in search_verdicts.verdicts(result)
    ]
    assert len(result["verdicts"]) == 3 + 2 + 1
    assert (tmp_path / "p.png").stat().st_size > 1000
    monkeypatch.setattr(search, "PEERS", {})  # a second computation would fail
    assert bench("search", *parts, *small, *places) == result


@pytest.mark.filterwarnings("ignore:Argument ``with_margin``")
def test_large_dimensions_and_optuna_on_a_miniature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Callable[..., dict[str, Any]]
) -> None:
    for package in ("cma", "cmaes", "crfmnes", "pypop7", "scipy"):
        pytest.importorskip(package)
    monkeypatch.setattr(search_large, "RANKED_SIZE", 6)
    monkeypatch.setattr(search_mixed, "TRIALS", 8)
    monkeypatch.setattr(search, "MIXED", ["sphere"])
    options = ["--parts", "ranked", "optuna", "--large-seeds", "1", "--optuna-seeds", "1"]
    places = ["--results", str(tmp_path / "r.jsonl"), "--plot", str(tmp_path / "p.png")]
    result = bench("search", *options, *places)
    assert set(result["ranked"]) == set(search_large.RANKED)
    assert all(set(hits) == set(search_large.RANKED_SEARCHES) for hits in result["ranked"].values())
    assert set(result["optuna"]["sphere"]) == set(SAMPLERS) == set(search_mixed.samplers(0))
    assert len(result["verdicts"]) == 4 + 3


@pytest.mark.parametrize("name", search_large.RANKED)
def test_large_functions_are_zero_at_the_origin_alone(name: str) -> None:
    pytest.importorskip("scipy")
    d = 8
    function, start = search_large.RANKED[name](d, 1)
    best = np.ones(d) if name == "Rosenbrock" else np.zeros(d)
    assert function(best) == pytest.approx(0.0, abs=1e-12)
    assert function(best + 1e-3 * (start - best)) > 1e-14
    assert function(start) > 1e-3


def bbob(ours: float, pycma: float, cmaes: float) -> dict[str, Any]:
    areas = {"eigenstep": ours, "pycma": pycma, "cmaes": cmaes}
    return {
        p: {"area": a, "functions": {"1": a, "2": 0.5}, "instances": "1-5"}
        for p, a in areas.items()
    }


def test_verdicts_can_fail() -> None:
    # Had a part in tuning, and does not count
    computed: dict[str, Any] = {
        "functions": {
            "10": {"Ackley": {"eigenstep": [50, 70, None], "pycma": [100, 100, 100]}},
            "20": {"Ackley": {"eigenstep": [80, None, None], "pycma": [100, 100, 100]}},
        },
        "restarts": {"10": {"Schaffer": {"eigenstep": [5, None], "pycma": [7, 8]}}},
        "bbob": {"dimensions": {"5": bbob(0.3, 0.2, 0.31)}},
        "overhead": {
            "40": {"eigenstep": 1.0, "pycma": 2.0},
            "80": {"eigenstep": 1.0, "pycma": 2.0},
        },
        "mixed": {"sphere": {"eigenstep": [10, 12], "CatCMAwM": [9, 30]}},
        "large": {
            "1000": {
                "sphere": {
                    "eigenstep-auto": [[5, 9, 30, None], [5, None, None, None]],
                    "separable": [[6, 20, None, None], [7, None, None, None]],
                    "X": [[8, 10, 31, None], [8, None, None, None]],
                },
                "other": {"eigenstep-auto": [[5, 7], [5, None]], "X": [[None, None], [6, 20]]},
            }
        },
        "ranked": {
            "ellipsoid": {"lowrank": [[None]], "X": [[1]], "Y": [[1]]},
            "edges": {"lowrank": [[5, 30, None]], "X": [[10, 40, None]], "Y": [[4, None, None]]},
            "powers": {"lowrank": [[5, None, None]], "X": [[10, None, None]], "Y": [[5, 20, None]]},
        },
        "optuna": {"sphere": {name: [[10 * k + 10, None]] for k, name in enumerate(SAMPLERS)}},
        "noise": {"sphere, noise 1": {"cautious": [1.0, 3.0], "LRA-CMA": [4.0, 4.0]}},
    }
    found = {
        v.quantity.split(":")[0]
        + next((f" {p}" for p in ("cmaes", "X", "Y") if f" {p}" in v.quantity), ""): v
        for v in search_verdicts.verdicts(computed)
    }
    assert {name: v.holds for name, v in found.items()} == {
        "Ackley, d = 10": True,
        "Ackley, d = 20": False,
        "Schaffer, d = 10": False,
        "BBOB, d = 5": True,
        "BBOB, d = 5 cmaes": False,
        "d = 40": False,
        "d = 80": True,
        "1 functions": False,
        "sphere, d = 1000": True,
        "other, d = 1000": False,
        "1 noisy functions": True,
        "2 functions, d = 1000 X": True,
        "2 functions, d = 1000 Y": False,
        "1 functions, 600 trials": True,
    }
    last = search_large.RANKED_BUDGET * search_large.RANKED_SIZE
    # Geometric means are over targets, then over functions
    edges, powers = (5 / 4 * 30 / last, last / 20)
    assert found["2 functions, d = 1000 Y"].value == pytest.approx((edges * powers) ** 0.25)
    assert found["sphere, d = 1000"].value == pytest.approx(30 / 31)
    assert found["Ackley, d = 10"].value == pytest.approx(0.7)
    assert search_verdicts.worse(computed["bbob"]["dimensions"]["5"], "cmaes") == []
    assert search_verdicts.worse(bbob(0.2, 0.3, 0.1), "pycma") == ["f1 (-0.10)"]


@pytest.mark.skipif(not RESULTS.exists(), reason="no published figures")
def test_published_verdicts_follow_from_published_figures() -> None:
    result = json.loads(RESULTS.read_text())["result"]
    assert [v["holds"] for v in result["verdicts"]] == [
        v.holds for v in search_verdicts.verdicts(result)
    ]
