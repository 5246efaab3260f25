"""Compare the search without gradients with pycma and cmaes, and check what it promises.

  eigenstep bench search --json search.json              everything that is not yet in --directory,
  then verdicts eigenstep bench search --parts bbob --dimensions 5 10  a part; what it computes is
  kept for the next run eigenstep bench search --full                          BBOB with 15
  instances in place of 5: hours

Parts: functions  evaluations to 1e-8 on Ackley, Griewank and Rosenbrock, without restarts, medians
  over seeds restarts   how often Bohachevsky's and Schaffer's functions are solved, with BIPOP
  restarts on both sides; Schaffer's is 1e-8 only at a distance of 1e-18 from its minimum, so
  neither stops because steps are small bbob       24 functions of the COCO platform with IPOP
  restarts: area under the ECDF of evaluations per target; lines show the best of all algorithms
  that COCO has collected; cma.fmin_lq_surr2 runs up to 100 d only mixed      evaluations to 1e-6 on
  functions of numbers, integers and categories, against CatCMA with margin optuna     evaluations
  on the same functions until the value has fallen to parts of that in the middle, of at most 600,
  against samplers of Optuna, all in Optuna large      evaluations until the value has fallen to
  parts of the first one, in 1,000 and 10,000 dimensions, against searches with linear memory;
  LM-CMA needs `pip install --no-deps pypop7==0.0.82` ranked     the same in 1,000 dimensions for
  searches that see the order of values alone, on more functions noise      true values at the
  center after 8,000 noisy evaluations, against CMA-ES that adapts its learning rate overhead   CPU
  time per evaluation beside the function itself, by dimension, in turns

Everything is computed piece by piece into files in --directory. Interrupt it as you like: the same
command goes on.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..console import UserError, track, write_json
from ..problems.functions import FUNCTIONS
from ..results import verdict_table
from .search_bbob import FUNCTIONS as BBOB
from .search_bbob import run_function, summarize
from .search_large import BUDGETS, FIRST_SEED, RANKED, RANKED_SEARCHES, solve_large, solve_ranked
from .search_large import FUNCTIONS as LARGE
from .search_large import SEARCHES as LARGE_SEARCHES
from .search_mixed import FUNCTIONS as MIXED
from .search_mixed import SAMPLERS, SEARCHES, solve_mixed, solve_trials
from .search_noise import FUNCTIONS as NOISY
from .search_noise import NOISE, solve_noisy
from .search_noise import SEARCHES as NOISY_SEARCHES
from .search_overhead import measure_overhead
from .search_peers import PEERS, TOLX, Counted
from .search_verdicts import EASY, TARGET, draw, tables, verdicts

PARTS = ("functions", "restarts", "bbob", "mixed", "optuna", "large", "ranked", "noise", "overhead")
HARD = ("Bohachevsky", "Schaffer")
OVERHEAD_DIMENSIONS = (5, 10, 20, 40, 80, 160, 320, 640)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to compute and where it is kept."""
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        help="what to compute (default: all)",
    )
    parser.add_argument(
        "--dimensions",
        nargs="+",
        type=int,
        default=[5, 10, 20, 40],
        help="of BBOB (default: %(default)s)",
    )
    parser.add_argument(
        "--function-dimensions",
        nargs="+",
        type=int,
        default=[10, 20, 40],
        help="of the rest (default: %(default)s)",
    )
    parser.add_argument(
        "--instances",
        nargs=2,
        type=int,
        default=[1, 5],
        help="of BBOB, first and last (default: %(default)s)",
    )
    searches = [name for name in PEERS if name != "surrogate"]
    parser.add_argument(
        "--searches",
        nargs="+",
        choices=list(PEERS),
        default=searches,
        help="of BBOB (default: all but the slow one)",
    )
    parser.add_argument(
        "--large-dimensions",
        nargs="+",
        type=int,
        choices=list(BUDGETS),
        default=list(BUDGETS),
        help="of `large`",
    )
    parser.add_argument(
        "--large-seeds", type=int, default=3, help="of `large` and `ranked` (default: %(default)s)"
    )
    parser.add_argument("--full", action="store_true", help="BBOB with instances 1 to 15")
    parser.add_argument(
        "--seeds", type=int, default=25, help="of `functions` (default: %(default)s)"
    )
    parser.add_argument(
        "--mixed-seeds", type=int, default=10, help="of `mixed`, from 100 on (default: %(default)s)"
    )
    parser.add_argument(
        "--optuna-seeds",
        type=int,
        default=3,
        help="of `optuna`, from 100 on (default: %(default)s)",
    )
    parser.add_argument(
        "--noise-seeds", type=int, default=5, help="of `noise`, from 100 on (default: %(default)s)"
    )
    parser.add_argument(
        "--restart-seeds", type=int, default=10, help="of `restarts` (default: %(default)s)"
    )
    parser.add_argument(
        "--restart-budget",
        type=int,
        default=2000,
        help="evaluations per dimension of `restarts` (default: %(default)s)",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("runs/bench/search"),
        help="keeps the pieces (default: %(default)s)",
    )
    parser.add_argument(
        "--plot",
        default="runs/bench/search.png",
        help="where the picture goes (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compute what is missing, judge it, and draw."""
    if (
        min(
            args.seeds,
            args.mixed_seeds,
            args.noise_seeds,
            args.large_seeds,
            args.optuna_seeds,
            args.restart_seeds,
            args.restart_budget,
            *args.dimensions,
            *args.function_dimensions,
        )
        < 1
    ):
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
        raise UserError(
            f"{path} is damaged ({error}): delete it, and it will be computed again"
        ) from error


def compute_functions(args: argparse.Namespace) -> dict[str, Any]:
    """Return evaluations until the target by dimension, function, search and seed; null where it
    was not reached.
    """
    jobs = [
        (d, name, peer)
        for d in args.function_dimensions
        for name in EASY
        for peer in ("eigenstep", "pycma")
    ]
    found: dict[str, Any] = {}
    for d, name, peer in track(jobs, "Functions"):
        path = args.directory / f"functions-{peer}-{name}-d{d}-{args.seeds}.json"
        budget = 20_000 * d
        hits = kept(
            path,
            lambda d=d, n=name, p=peer, b=budget: [
                solve(p, n, d, b, None, s) for s in range(args.seeds)
            ],
        )
        found.setdefault(str(d), {}).setdefault(name, {})[peer] = hits
    return found


def compute_restarts(args: argparse.Namespace) -> dict[str, Any]:
    """Return the same for hard functions, with restarts."""
    jobs = [
        (d, name, peer)
        for d in args.function_dimensions
        for name in HARD
        for peer in ("eigenstep", "pycma")
    ]
    seeds = range(args.restart_seeds)
    found: dict[str, Any] = {}
    for d, name, peer in track(jobs, "Restarts"):
        budget = args.restart_budget * d
        path = args.directory / f"restarts-{peer}-{name}-d{d}-{len(seeds)}-{budget}-tolx0.json"
        hits = kept(
            path,
            lambda d=d, n=name, p=peer, b=budget: [
                solve(p, n, d, b, "bipop", s, 0.0) for s in seeds
            ],
        )
        found.setdefault(str(d), {}).setdefault(name, {})[peer] = hits
    return found


def solve(
    peer: str, name: str, d: int, budget: int, restarts: str | None, seed: int, tolx: float = TOLX
) -> float:
    """Return the evaluations until the target, from a start at distance 3 from the minimum with
    step size 1.
    """
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
    found: dict[int, dict[str, dict[int, Any]]] = {
        d: {peer: {} for peer in args.searches} for d in args.dimensions
    }
    jobs = [
        (d, function, peer) for d in args.dimensions for function in BBOB for peer in args.searches
    ]
    for d, function, peer in track(jobs, "BBOB"):
        found[d][peer][function] = run_function(args.directory, peer, function, d, instances)
    return summarize(found, f"{first}-{last}")


def compute_mixed(args: argparse.Namespace) -> dict[str, Any]:
    """Return evaluations until the target by function, search and seed; null where it was not
    reached.
    """
    found: dict[str, Any] = {}
    for number, (name, search) in enumerate(
        track([(n, s) for n in MIXED for s in SEARCHES], "Mixed")
    ):
        path = args.directory / f"mixed-{search}-{number // len(SEARCHES)}-{args.mixed_seeds}.json"
        seeds = range(100, 100 + args.mixed_seeds)
        hits = kept(
            path, lambda n=name, s=search, seeds=seeds: [solve_mixed(s, n, seed) for seed in seeds]
        )
        found.setdefault(name, {})[search] = hits
    return found


def compute_optuna(args: argparse.Namespace) -> dict[str, Any]:
    """Return trials until parts of the value in the middle, by function, sampler and seed; null:
    not reached.
    """
    found: dict[str, Any] = {}
    seeds = range(100, 100 + args.optuna_seeds)
    for number, (name, sampler) in enumerate(
        track([(n, s) for n in MIXED for s in SAMPLERS], "Optuna")
    ):
        path = (
            args.directory / f"optuna-{sampler}-{number // len(SAMPLERS)}-{args.optuna_seeds}.json"
        )
        hits = kept(
            path,
            lambda n=name, s=sampler, seeds=seeds: [solve_trials(s, n, seed) for seed in seeds],
        )
        found.setdefault(name, {})[sampler] = hits
    return found


def compute_large(args: argparse.Namespace) -> dict[str, Any]:
    """Return evaluations until parts of the first value, by dimension, function, search and seed;
    null: not reached.
    """
    found: dict[str, Any] = {}
    seeds = range(1, 1 + args.large_seeds)
    jobs = [
        (s, d, name, peer)
        for s in seeds
        for d in args.large_dimensions
        for name in LARGE
        for peer in LARGE_SEARCHES
    ]
    for seed, d, name, peer in track(jobs, "Large"):
        path = (
            args.directory / f"large-{peer}-{name.replace(' ', '-')}-d{d}-{BUDGETS[d]}-s{seed}.json"
        )
        hits = kept(path, lambda d=d, n=name, p=peer, s=seed: solve_large(p, n, d, s))
        found.setdefault(str(d), {}).setdefault(name, {}).setdefault(peer, []).append(hits)
    return found


def compute_ranked(args: argparse.Namespace) -> dict[str, Any]:
    """Return the same in 1,000 dimensions, by function, search and seed."""
    found: dict[str, Any] = {}
    seeds = range(FIRST_SEED, FIRST_SEED + args.large_seeds)
    jobs = [(s, name, peer) for s in seeds for name in RANKED for peer in RANKED_SEARCHES]
    for seed, name, peer in track(jobs, "Ranked"):
        path = args.directory / f"ranked-{peer}-{re.sub('[^a-zA-Z0-9]+', '-', name)}-s{seed}.json"
        hits = kept(path, lambda n=name, p=peer, s=seed: solve_ranked(p, n, s))
        found.setdefault(name, {}).setdefault(peer, []).append(hits)
    return found


def compute_noise(args: argparse.Namespace) -> dict[str, Any]:
    """Return true values in the end by function and noise, search and seed."""
    found: dict[str, Any] = {}
    for name, noise, peer in track(
        [(n, v, s) for n in NOISY for v in NOISE for s in NOISY_SEARCHES], "Noise"
    ):
        path = (
            args.directory
            / f"noise-{peer}-{name.replace(' ', '-')}-{noise}-{args.noise_seeds}.json"
        )
        seeds = range(100, 100 + args.noise_seeds)
        ends = kept(
            path,
            lambda n=name, v=noise, p=peer, seeds=seeds: [
                solve_noisy(p, n, v, seed) for seed in seeds
            ],
        )
        found.setdefault(f"{name}, noise {noise:g}", {})[peer] = ends
    return found


def compute_overhead(args: argparse.Namespace) -> dict[str, Any]:
    """Return microseconds of CPU time per evaluation, by search and dimension: medians over rounds,
    in turns.
    """
    found: dict[str, Any] = {}
    for d in track(OVERHEAD_DIMENSIONS, "Overhead"):
        found[str(d)] = kept(
            args.directory / f"overhead-d{d}.json", lambda d=d: measure_overhead(d)
        )
    return found


COMPUTE = {
    "functions": compute_functions,
    "restarts": compute_restarts,
    "bbob": compute_bbob,
    "mixed": compute_mixed,
    "optuna": compute_optuna,
    "large": compute_large,
    "ranked": compute_ranked,
    "noise": compute_noise,
    "overhead": compute_overhead,
}
