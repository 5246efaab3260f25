"""Compare the search without gradients with pycma and cmaes, and check what it promises.

  eigenstep bench search --json search.json              everything that is not yet in --directory, then verdicts
  eigenstep bench search --parts bbob --dimensions 5 10  a part; what it computes is kept for the next run
  eigenstep bench search --full                          BBOB with 15 instances in place of 5: hours

Parts:
  functions  evaluations to 1e-8 on Ackley, Griewank and Rosenbrock, without restarts, medians over seeds
  restarts   how often Bohachevsky's and Schaffer's functions are solved, with BIPOP restarts on both sides; Schaffer's
             is 1e-8 only at a distance of 1e-18 from its minimum, so neither stops because steps are small
  bbob       24 functions of the COCO platform with IPOP restarts: area under the ECDF of evaluations per target
  mixed      evaluations to 1e-6 on functions of numbers, integers and categories, against CatCMA with margin
  overhead   CPU time per evaluation beside the function itself, by dimension, in turns

Everything is computed piece by piece into files in --directory. Interrupt it as you like: the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eigenstep.search import Search

from ..console import UserError, require_peer, track, write_json
from ..lines import look
from ..plotting import figure, save
from ..problems.functions import FUNCTIONS
from ..results import Table, Verdict, verdict_table
from .search_bbob import BUDGET, run_function, summarize
from .search_bbob import FUNCTIONS as BBOB
from .search_mixed import FUNCTIONS as MIXED
from .search_mixed import SEARCHES, solve_mixed
from .search_peers import PEERS, TOLX, Array, Counted

PARTS = ("functions", "restarts", "bbob", "mixed", "overhead")
EASY = {"Ackley": 0.75, "Griewank": 0.75, "Rosenbrock": 0.95}
"""Functions that need no restarts, and the share of pycma's evaluations that is allowed."""
HARD = ("Bohachevsky", "Schaffer")
TARGET = 1e-8
PORTFOLIO = {"5": 0.335, "10": 0.285, "20": 0.249, "40": 0.2}
"""Areas of COCO's best-2009 portfolio, the best algorithm for each function and target; in 40 dimensions a bit less."""
BUDGETS = (10, 20, 50, 100, 200, 500, 1000)
"""Evaluations per dimension at which shares of targets are compared."""
OVERHEAD_DIMENSIONS = (5, 10, 20, 40, 80, 160, 320, 640)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to compute and where it is kept."""
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to compute (default: all)")
    parser.add_argument(
        "--dimensions", nargs="+", type=int, default=[5, 10, 20, 40], help="of BBOB (default: %(default)s)"
    )
    parser.add_argument(
        "--function-dimensions", nargs="+", type=int, default=[10, 20, 40], help="of the rest (default: %(default)s)"
    )
    parser.add_argument(
        "--instances", nargs=2, type=int, default=[1, 5], help="of BBOB, first and last (default: %(default)s)"
    )
    searches = [name for name in PEERS if name != "surrogate"]
    parser.add_argument(
        "--searches", nargs="+", choices=list(PEERS), default=searches, help="of BBOB (default: all but the slow one)"
    )
    parser.add_argument("--full", action="store_true", help="BBOB with instances 1 to 15")
    parser.add_argument("--seeds", type=int, default=25, help="of `functions` (default: %(default)s)")
    parser.add_argument("--mixed-seeds", type=int, default=10, help="of `mixed`, from 100 on (default: %(default)s)")
    parser.add_argument("--restart-seeds", type=int, default=10, help="of `restarts` (default: %(default)s)")
    parser.add_argument(
        "--restart-budget",
        type=int,
        default=2000,
        help="evaluations per dimension of `restarts` (default: %(default)s)",
    )
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/bench/search"), help="keeps the pieces (default: %(default)s)"
    )
    parser.add_argument("--plot", default="runs/bench/search.png", help="where the picture goes (default: %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compute what is missing, judge it, and draw."""
    if min(args.seeds, args.restart_seeds, args.restart_budget, *args.dimensions, *args.function_dimensions) < 1:
        raise UserError("seeds, dimensions and budgets must be at least 1")
    if not 1 <= args.instances[0] <= args.instances[1]:
        raise UserError(f"--instances must be the first and the last, got {args.instances}")
    torch.set_num_threads(1)
    computed = {part: COMPUTE[part](args) for part in PARTS if part in args.parts}
    judged = list(verdicts(computed))
    draw(computed, args.plot)
    shown = [*tables(computed), verdict_table("Search without gradients", judged)]
    return {
        **computed,
        "verdicts": [{**asdict(v), "holds": v.holds} for v in judged],
        "tables": [asdict(table) for table in shown],
    }


def kept(path: Path, compute: Any) -> Any:
    """Return what a file holds, or compute it and write the file."""
    if not path.exists():
        write_json(path, compute())
    try:
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it, and it will be computed again") from error


def compute_functions(args: argparse.Namespace) -> dict[str, Any]:
    """Return evaluations until the target by dimension, function, search and seed; null where it was not reached."""
    jobs = [(d, name, peer) for d in args.function_dimensions for name in EASY for peer in ("eigenstep", "pycma")]
    found: dict[str, Any] = {}
    for d, name, peer in track(jobs, "Functions"):
        path = args.directory / f"functions-{peer}-{name}-d{d}-{args.seeds}.json"
        budget = 20_000 * d
        hits = kept(path, lambda d=d, n=name, p=peer, b=budget: [solve(p, n, d, b, None, s) for s in range(args.seeds)])
        found.setdefault(str(d), {}).setdefault(name, {})[peer] = hits
    return found


def compute_restarts(args: argparse.Namespace) -> dict[str, Any]:
    """Return the same for hard functions, with restarts."""
    jobs = [(d, name, peer) for d in args.function_dimensions for name in HARD for peer in ("eigenstep", "pycma")]
    seeds = range(args.restart_seeds)
    found: dict[str, Any] = {}
    for d, name, peer in track(jobs, "Restarts"):
        budget = args.restart_budget * d
        path = args.directory / f"restarts-{peer}-{name}-d{d}-{len(seeds)}-{budget}-tolx0.json"
        hits = kept(path, lambda d=d, n=name, p=peer, b=budget: [solve(p, n, d, b, "bipop", s, 0.0) for s in seeds])
        found.setdefault(str(d), {}).setdefault(name, {})[peer] = hits
    return found


def solve(peer: str, name: str, d: int, budget: int, restarts: str | None, seed: int, tolx: float = TOLX) -> float:
    """Return the evaluations until the target, from a start at distance 3 from the minimum with step size 1."""
    function = FUNCTIONS[name]
    direction = np.random.default_rng(seed).standard_normal(d)
    start = function.coordinate + 3 * direction / np.linalg.norm(direction)
    counted = Counted(lambda x: float(function(torch.from_numpy(x))), [TARGET], budget)
    PEERS[peer](counted, lambda _: start, 1.0, budget, restarts, seed, tolx)
    return counted.hits[0]


def compute_bbob(args: argparse.Namespace) -> dict[str, Any]:
    """Return areas and curves; see ``.search_bbob``."""
    first, last = (1, 15) if args.full else args.instances
    instances = range(first, last + 1)
    found: dict[int, dict[str, dict[int, Any]]] = {d: {peer: {} for peer in args.searches} for d in args.dimensions}
    jobs = [(d, function, peer) for d in args.dimensions for function in BBOB for peer in args.searches]
    for d, function, peer in track(jobs, "BBOB"):
        found[d][peer][function] = run_function(args.directory, peer, function, d, instances)
    return summarize(found, f"{first}-{last}")


def compute_mixed(args: argparse.Namespace) -> dict[str, Any]:
    """Return evaluations until the target by function, search and seed; null where it was not reached."""
    found: dict[str, Any] = {}
    for number, (name, search) in enumerate(track([(n, s) for n in MIXED for s in SEARCHES], "Mixed")):
        path = args.directory / f"mixed-{search}-{number // len(SEARCHES)}-{args.mixed_seeds}.json"
        seeds = range(100, 100 + args.mixed_seeds)
        hits = kept(path, lambda n=name, s=search, seeds=seeds: [solve_mixed(s, n, seed) for seed in seeds])
        found.setdefault(name, {})[search] = hits
    return found


def compute_overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Return microseconds of CPU time per evaluation, by search and dimension: medians over rounds, in turns."""
    found: dict[str, Any] = {}
    for d in track(OVERHEAD_DIMENSIONS, "Overhead"):
        found[str(d)] = kept(args.directory / f"overhead-d{d}.json", lambda d=d: measure_overhead(d))
    return found


def measure_overhead(d: int) -> dict[str, float]:
    """Time generations of all searches on an ellipsoid, whose own time is not counted."""
    generations = max(3, min(200, 2000 // d))
    steppers = {name: make(d) for name, make in STEPPERS.items()}
    for step in steppers.values():
        for _ in range(generations):  # the first ones set up things
            next(step)
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for _ in range(5):
        for name, step in steppers.items():
            spent, count = np.sum([next(step) for _ in range(generations)], axis=0)
            times[name].append(1e6 * spent / count)
    return {name: statistics.median(found) for name, found in times.items()}


def _ellipsoid(x: Array) -> Array:
    d = x.shape[-1]
    return (10 ** (6 * np.arange(d) / (d - 1)) * x * x).sum(-1)


def _step_eigenstep(d: int) -> Iterator[tuple[float, int]]:
    search = Search(np.ones(d), 1.0, seed=0, max_evals=10**9, tolfun=0, tolx=0)
    while True:
        start = time.process_time()
        points = search.ask()
        asked = time.process_time()
        values = _ellipsoid(points)
        evaluated = time.process_time()
        search.tell(points, values)
        search.stop()
        yield time.process_time() - evaluated + asked - start, len(points)


def _step_pycma(d: int) -> Iterator[tuple[float, int]]:
    options = {"verbose": -9, "verb_log": 0, "seed": 1, "tolfun": 0, "tolx": 0, "tolfunhist": 0}
    strategy = require_peer("cma").CMAEvolutionStrategy(np.ones(d), 1.0, options)
    while True:
        start = time.process_time()
        points = strategy.ask()
        asked = time.process_time()
        values = _ellipsoid(np.array(points)).tolist()
        evaluated = time.process_time()
        strategy.tell(points, values)
        strategy.stop()
        yield time.process_time() - evaluated + asked - start, len(points)


def _step_cmaes(d: int) -> Iterator[tuple[float, int]]:
    strategy = require_peer("cmaes").CMA(np.ones(d), 1.0, seed=1)
    while True:
        start = time.process_time()
        points = [strategy.ask() for _ in range(strategy.population_size)]
        asked = time.process_time()
        values = _ellipsoid(np.array(points)).tolist()
        evaluated = time.process_time()
        strategy.tell(list(zip(points, values, strict=True)))
        strategy.should_stop()
        yield time.process_time() - evaluated + asked - start, len(points)


STEPPERS = {"eigenstep": _step_eigenstep, "pycma": _step_pycma, "cmaes": _step_cmaes}
COMPUTE = {
    "functions": compute_functions,
    "restarts": compute_restarts,
    "bbob": compute_bbob,
    "mixed": compute_mixed,
    "overhead": compute_overhead,
}


def median(hits: Sequence[float | None]) -> float:
    """Return the median, with failures counted as infinite."""
    return statistics.median_low([math.inf if hit is None else hit for hit in hits])


def solved(hits: Sequence[float | None]) -> int:
    """Return how many reached the target."""
    return sum(hit is not None for hit in hits)


def verdicts(computed: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge the figures."""
    for d, functions in computed.get("functions", {}).items():
        for name, hits in functions.items():
            ratio = median(hits["eigenstep"]) / median(hits["pycma"])
            quantity = f"{name}, d = {d}: median evaluations to {TARGET:g}, divided by pycma's"
            yield Verdict("It needs fewer evaluations than CMA-ES.", "spectral", quantity, ratio, EASY[name])
    for d, functions in computed.get("restarts", {}).items():
        for name, hits in functions.items():
            more = solved(hits["eigenstep"]) - solved(hits["pycma"])
            quantity = f"{name}, d = {d}: runs of {len(hits['pycma'])} that succeed with BIPOP, minus pycma's"
            yield Verdict("With restarts it succeeds as often.", "spectral", quantity, more, 0, at_least=True)
    for d, peers in computed.get("bbob", {}).get("dimensions", {}).items():
        yield from bbob_verdicts(d, peers)
    if "mixed" in computed:
        ratios = [median(hits["eigenstep"]) / median(hits["CatCMAwM"]) for hits in computed["mixed"].values()]
        ratio = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        quantity = f"{len(ratios)} functions: geometric mean of median evaluations, divided by those of CatCMAwM"
        yield Verdict("Categories cost fewer evaluations.", "mixed", quantity, ratio, 1.0)
    for d, times in computed.get("overhead", {}).items():
        quantity, limit = f"d = {d}: CPU time per evaluation, divided by pycma's", 1 / 3 if int(d) == 40 else 1.0
        ratio = times["eigenstep"] / times["pycma"]
        yield Verdict("It costs less time than pycma.", "spectral", quantity, ratio, limit, timed=True)


def bbob_verdicts(d: str, peers: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge what was computed of BBOB in one dimension."""
    area = {peer: entry["area"] for peer, entry in peers.items()}
    for rival in ("pycma", "cmaes"):
        if {rival, "eigenstep"} <= set(peers):
            more = area["eigenstep"] - area[rival]
            quantity = f"BBOB, d = {d}: area under the ECDF, minus that of {rival}"
            yield Verdict("It is the better choice on BBOB.", "spectral", quantity, more, 0, at_least=True)
    if "eigenstep-auto" not in peers:
        return
    claim, ours = "Its default is as good as the best of many.", peers["eigenstep-auto"]
    if d in PORTFOLIO:
        quantity = f"BBOB, d = {d}: area under the ECDF"
        yield Verdict(claim, "auto", quantity, ours["area"], PORTFOLIO[d], at_least=True)
    for rival, allowed, budgets in (("eigenstep", -0.01, BUDGETS), ("surrogate", 0.0, (50, 100))):
        if rival in peers:
            more = min(ours["budgets"][str(b)] - peers[rival]["budgets"][str(b)] for b in budgets)
            quantity = f"BBOB, d = {d}: least lead over {rival} of the share of targets at {budgets} evaluations / d"
            yield Verdict("A descent does no harm at any budget.", "auto", quantity, more, allowed, at_least=True)


def tables(computed: Mapping[str, Any]) -> Iterator[Table]:
    """Give the figures as tables."""
    for part, title in (
        ("functions", f"Median evaluations to {TARGET:g}, and how many runs reached it"),
        ("restarts", "The same with BIPOP restarts"),
    ):
        rows = [
            [name, d, *(f"{median(hits[p]):.0f} ({solved(hits[p])}/{len(hits[p])})" for p in ("eigenstep", "pycma"))]
            for d, functions in computed.get(part, {}).items()
            for name, hits in functions.items()
        ]
        if rows:
            yield Table(title, ["function", "d", "eigenstep", "pycma"], rows)
    if "bbob" in computed:
        entries = computed["bbob"]["dimensions"].items()
        names = list(next(iter(computed["bbob"]["dimensions"].values())))
        rows = [[d, peers[names[0]]["instances"], *(f"{peers[p]['area']:.4f}" for p in names)] for d, peers in entries]
        title = f"BBOB: area under the ECDF, {BUDGET} evaluations per dimension"
        yield Table(title, ["d", "instances", *names], rows)
        rows = [
            [d, name, *(f"{entry['budgets'][str(b)]:.3f}" for b in BUDGETS)]
            for d, peers in entries
            for name, entry in peers.items()
        ]
        yield Table("BBOB: share of targets reached", ["d", "search", *(f"{b} d" for b in BUDGETS)], rows)
        rivals = [name for name in names if name != names[0]]
        rows = [[d, *(", ".join(worse(peers, p, names[0])) or "none" for p in rivals)] for d, peers in entries]
        yield Table(f"BBOB: functions on which the area of {names[0]} is smaller than that of", ["d", *rivals], rows)
    if "mixed" in computed:
        rows = [
            [name, *(f"{median(hits[s]):.0f} ({solved(hits[s])}/{len(hits[s])})" for s in SEARCHES)]
            for name, hits in computed["mixed"].items()
        ]
        yield Table("Numbers, integers and categories: median evaluations to 1e-6", ["function", *SEARCHES], rows)
    if "overhead" in computed:
        rows = [[d, *(f"{times[p]:.1f}" for p in STEPPERS)] for d, times in computed["overhead"].items()]
        yield Table("Microseconds of CPU time per evaluation", ["d", *STEPPERS], rows, timed=True)


def worse(peers: Mapping[str, Any], rival: str, name: str = "eigenstep") -> list[str]:
    """Name the functions on which a search is worse than a rival by more than 0.01, with the difference."""
    ours, theirs = peers[name]["functions"], peers[rival]["functions"]
    return [f"f{f} ({ours[f] - theirs[f]:+.2f})" for f in ours if ours[f] < theirs[f] - 0.01]


def draw(computed: Mapping[str, Any], path: str) -> None:
    """Draw the ECDFs, one panel for each dimension, and cost against dimension."""
    bbob = computed.get("bbob", {"dimensions": {}})
    drawn, axes = figure(columns=max(1, len(bbob["dimensions"]) + ("overhead" in computed)), width=4.2)
    panels = list(axes[0])
    for d, peers in bbob["dimensions"].items():
        ax = panels.pop(0)
        for number, (name, entry) in enumerate(peers.items()):
            label = f"{name}: area {entry['area']:.3f}"
            ax.plot(bbob["evaluations_per_dimension"], entry["curve"], label=label, **look(name, number))
        if d in PORTFOLIO:
            ax.plot([], [], " ", label=f"(best-2009 portfolio: area {PORTFOLIO[d]:.3f})")
        ax.set(title=f"BBOB, d = {d}", xlabel="evaluations / d", ylabel="targets reached", xscale="log", ylim=(0, 1))
        ax.legend(fontsize=8)
    if "overhead" in computed:
        ax, found = panels.pop(0), computed["overhead"]
        for number, name in enumerate(STEPPERS):
            times = [row[name] for row in found.values()]
            ax.plot([int(d) for d in found], times, marker="o", label=name, **look(name, number))
        ax.set(title="Overhead", xlabel="d", ylabel="CPU µs per evaluation", xscale="log", yscale="log")
        ax.legend(fontsize=8)
    save(drawn, path)
