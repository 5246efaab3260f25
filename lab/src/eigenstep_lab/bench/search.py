"""Compare the search without gradients with pycma and cmaes, and check what it promises.

  eigenstep bench search --results FILE --json search.json     what is not yet in FILE, and verdicts
  eigenstep bench search --parts bbob --dimensions 5 10        a part
  eigenstep bench search --instances 1 15 --jobs 8             BBOB with 15 instances for 5: hours

Parts:

  functions  evaluations to 1e-8 on Ackley, Griewank and Rosenbrock, without restarts, medians over
             seeds
  restarts   how often Bohachevsky's and Schaffer's functions are solved, with BIPOP restarts on
             both sides; Schaffer's is 1e-8 only at a distance of 1e-18 from its minimum, so neither
             stops because steps are small
  bbob       24 functions of the COCO platform with IPOP restarts: area under the ECDF of
             evaluations per target; lines show the best of all algorithms that COCO has collected;
             cma.fmin_lq_surr2 runs up to 100 d only
  mixed      evaluations to 1e-6 on functions of numbers, integers and categories, against CatCMA
             with margin
  optuna     evaluations on the same functions until the value has fallen to parts of that in the
             middle, of at most 600, against samplers of Optuna, all in Optuna
  large      evaluations until the value has fallen to parts of the first one, in 1,000 and 10,000
             dimensions, against searches with linear memory; LM-CMA needs
             `pip install --no-deps pypop7==0.0.82`
  ranked     the same in 1,000 dimensions for searches that see the order of values alone, on more
             functions
  noise      true values at the center after 8,000 noisy evaluations, against CMA-ES that adapts its
             learning rate
  overhead   CPU time per evaluation beside the function itself, by dimension, in turns

Interrupt it as you like: the same command goes on.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..behavior import behavior
from ..console import UserError
from ..problems.functions import FUNCTIONS
from ..study import Cell, Plans, figures, nested
from .search_bbob import FUNCTIONS as BBOB
from .search_bbob import run_instance, summarize
from .search_large import BUDGETS, FIRST_SEED, RANKED, RANKED_SEARCHES, solve_large, solve_ranked
from .search_large import FUNCTIONS as LARGE
from .search_large import SEARCHES as LARGE_SEARCHES
from .search_mixed import FUNCTIONS as MIXED
from .search_mixed import SAMPLERS, SEARCHES, solve_mixed, solve_trials
from .search_noise import FUNCTIONS as NOISY
from .search_noise import NOISE, solve_noisy
from .search_noise import SEARCHES as NOISY_SEARCHES
from .search_overhead import measure_overhead
from .search_peers import PEERS, TOLX, Counted, Run
from .search_verdicts import EASY, TARGET, draw, tables, verdicts

RESULTS = Path("runs/bench/search.jsonl")
HARD = ("Bohachevsky", "Schaffer")
OVERHEAD_DIMENSIONS = (5, 10, 20, 40, 80, 160, 320, 640)
RIVALS = (
    *("pycma", "cmaes", "surrogate", "CatCMAwM", "TPESampler", "CmaEsSampler", "RandomSampler"),
    *("CR-FM-NES", "LM-CMA", "VkD-CMA", "LRA-CMA"),
)
"""Searches that do not depend on our code."""

Job = tuple[tuple[Any, ...], Callable[[], Any]]
"""Where a result stands among the figures of its part, and what computes it."""
COUNTS = (
    "seeds",
    "mixed_seeds",
    "noise_seeds",
    "large_seeds",
    "optuna_seeds",
    "restart_seeds",
    "restart_budget",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to compute."""
    add = parser.add_argument
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    add("--dimensions", nargs="+", type=int, default=[5, 10, 20, 40], help="of BBOB")
    add("--function-dimensions", nargs="+", type=int, default=[10, 20, 40], help="of the rest")
    add("--instances", nargs=2, type=int, default=[1, 5], help="of BBOB, first and last")
    searches = [name for name in PEERS if name != "surrogate"]
    slow = "of BBOB (default: all but the slow one)"
    add("--searches", nargs="+", choices=list(PEERS), default=searches, help=slow)
    sizes = list(BUDGETS)
    add("--large-dimensions", nargs="+", type=int, choices=sizes, default=sizes, help="of `large`")
    add("--large-seeds", type=int, default=3, help="of `large` and `ranked`")
    add("--seeds", type=int, default=25, help="of `functions` (default: %(default)s)")
    add("--mixed-seeds", type=int, default=10, help="of `mixed`, from 100 on")
    add("--optuna-seeds", type=int, default=3, help="of `optuna`, from 100 on")
    add("--noise-seeds", type=int, default=5, help="of `noise`, from 100 on")
    add("--restart-seeds", type=int, default=10, help="of `restarts` (default: %(default)s)")
    add("--restart-budget", type=int, default=2000, help="of `restarts`, for each dimension")
    add("--plot", default="runs/bench/search.png", help="where the picture goes")


def cells(args: argparse.Namespace, found: Mapping[Any, Any]) -> Plans:
    """List a cell for each run."""
    counts = [getattr(args, name) for name in COUNTS]
    if min(*counts, *args.dimensions, *args.function_dimensions) < 1:
        raise UserError("seeds, dimensions and budgets must be at least 1")
    if not 1 <= args.instances[0] <= args.instances[1]:
        raise UserError(f"--instances must be the first and the last, got {args.instances}")
    torch.set_num_threads(1)
    jobs = (
        ((part, *place), compute)
        for part in PARTS
        if part in args.parts
        for place, compute in PARTS[part](args)
    )
    return {name: _cell(name, compute, args) for name, compute in jobs}


def _cell(name: tuple[Any, ...], compute: Callable[[], Any], args: argparse.Namespace) -> Cell:
    ours = not any(rival in name for rival in RIVALS)
    budget = {"budget": args.restart_budget} if name[0] == "restarts" else {}
    return Cell({"run": list(name), **budget}, compute, behavior("search") if ours else "")


def report(args: argparse.Namespace, found: Mapping[Any, Any]) -> dict[str, Any]:
    """Judge what was computed, and draw."""
    computed = nested(found)
    if "bbob" in computed:
        first, last = args.instances
        by_dimension = {int(d): peers for d, peers in computed["bbob"].items()}
        computed["bbob"] = summarize(by_dimension, f"{first}-{last}")
    judged = list(verdicts(computed))
    draw(computed, args.plot)
    return figures(computed, judged, list(tables(computed)), "Search without gradients")


def functions(args: argparse.Namespace) -> Iterator[Job]:
    """Give evaluations until the target, null where it was not reached."""
    for d, name, peer in product(args.function_dimensions, EASY, ("eigenstep", "pycma")):
        for seed in range(args.seeds):
            yield (str(d), name, peer, seed), partial(solve, peer, name, d, 20_000 * d, None, seed)


def restarts(args: argparse.Namespace) -> Iterator[Job]:
    """Give the same for hard functions, with restarts."""
    for d, name, peer in product(args.function_dimensions, HARD, ("eigenstep", "pycma")):
        budget = args.restart_budget * d
        for seed in range(args.restart_seeds):
            compute = partial(solve, peer, name, d, budget, "bipop", seed, 0.0)
            yield (str(d), name, peer, seed), compute


def solve(
    peer: str, name: str, d: int, budget: int, restarts: str | None, seed: int, tolx: float = TOLX
) -> float | None:
    """Return the evaluations until the target, from a start at distance 3 from the minimum with
    step size 1.
    """
    function = FUNCTIONS[name]
    direction = np.random.default_rng(seed).standard_normal(d)
    start = function.coordinate + 3 * direction / np.linalg.norm(direction)
    counted = Counted(lambda x: float(function(torch.from_numpy(x))), [TARGET], budget)
    PEERS[peer](counted, Run(lambda _: start, 1.0, budget, restarts, seed, tolx))
    return reached(counted.hits[0])


def reached(count: float) -> float | None:
    """Return evaluations, or nothing if a target was not reached."""
    return count if math.isfinite(count) else None


def reached_all(compute: Callable[..., list[float]], *options: Any) -> list[float | None]:
    """Return evaluations until each target."""
    return [reached(count) for count in compute(*options)]


def reached_one(compute: Callable[..., float], *options: Any) -> float | None:
    """Return evaluations until the target."""
    return reached(compute(*options))


def bbob(args: argparse.Namespace) -> Iterator[Job]:
    """Give evaluations until each target of BBOB, see ``.search_bbob``."""
    instances = range(args.instances[0], args.instances[1] + 1)
    for d, peer, function in product(args.dimensions, args.searches, BBOB):
        for instance in instances:
            compute = partial(run_instance, peer, function, d, instance)
            yield (str(d), peer, str(function), instance), compute


def mixed(args: argparse.Namespace) -> Iterator[Job]:
    """Give evaluations until the target on functions of numbers, integers and categories."""
    for name, search in product(MIXED, SEARCHES):
        for seed in range(100, 100 + args.mixed_seeds):
            yield (name, search, seed), partial(reached_one, solve_mixed, search, name, seed)


def optuna(args: argparse.Namespace) -> Iterator[Job]:
    """Give trials until parts of the value in the middle."""
    for name, sampler in product(MIXED, SAMPLERS):
        for seed in range(100, 100 + args.optuna_seeds):
            yield (name, sampler, seed), partial(reached_all, solve_trials, sampler, name, seed)


def large(args: argparse.Namespace) -> Iterator[Job]:
    """Give evaluations until parts of the first value."""
    for d, name, peer in product(args.large_dimensions, LARGE, LARGE_SEARCHES):
        for seed in range(1, 1 + args.large_seeds):
            compute = partial(reached_all, solve_large, peer, name, d, seed)
            yield (str(d), name, peer, seed), compute


def ranked(args: argparse.Namespace) -> Iterator[Job]:
    """Give the same in 1,000 dimensions."""
    for name, peer in product(RANKED, RANKED_SEARCHES):
        for seed in range(FIRST_SEED, FIRST_SEED + args.large_seeds):
            yield (name, peer, seed), partial(reached_all, solve_ranked, peer, name, seed)


def noise(args: argparse.Namespace) -> Iterator[Job]:
    """Give true values in the end."""
    for name, level, peer in product(NOISY, NOISE, NOISY_SEARCHES):
        for seed in range(100, 100 + args.noise_seeds):
            compute = partial(solve_noisy, peer, name, level, seed)
            yield (f"{name}, noise {level:g}", peer, seed), compute


def overhead(args: argparse.Namespace) -> Iterator[Job]:
    """Give microseconds of CPU time per evaluation, by search: medians over rounds, in turns."""
    for d in OVERHEAD_DIMENSIONS:
        yield (str(d),), partial(measure_overhead, d)


PARTS: Mapping[str, Callable[[argparse.Namespace], Iterator[Job]]] = {
    "functions": functions,
    "restarts": restarts,
    "bbob": bbob,
    "mixed": mixed,
    "optuna": optuna,
    "large": large,
    "ranked": ranked,
    "noise": noise,
    "overhead": overhead,
}
