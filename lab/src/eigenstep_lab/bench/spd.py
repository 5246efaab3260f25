"""Minimize over positive-definite matrices, against pymanopt, geoopt and the baselines of the
paper.

Log-det and metric nearness from S = I: how many gradients and how much CPU time until the value is
within 1e-8 of the least one, at several condition numbers and sizes. All solvers run on the same
random problems in turn, round after round, and the figures are medians. Then the same problems
through minibatches, with every scheme tuned; and a slope
test: steps of our schemes and of the baselines agree to first order.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch

from eigenstep.core.matrices import Full
from eigenstep.manifold.retractions import RETRACTIONS

from ..baselines import rgd
from ..behavior import behavior
from ..console import UserError
from ..lines import look
from ..plotting import figure, save
from ..problems.spd import MINIBATCHES, PROBLEMS, random_spd
from ..results import Table, Verdict
from ..study import Cell, Plans, figures
from . import spd_stochastic
from .spd_solvers import FIXED, RATES, SEARCHING, Meter, best_fixed

OURS, CG, TR = "ours", "pymanopt conjugate gradient", "pymanopt trust regions"
SLOW = 1.0
"""A solver that takes longer than this, in seconds, runs in the first round only."""
PARTS = ("main", "fixed", "sweep", "stochastic")
SWEEP_CONDITION = 1e3
QUICK = {"size": 10, "rounds": 1, "sizes": [5, 10], "seeds": 3, "steps": 100, "seconds": 1.0}

Case = tuple[str, int, float]
"""Problem, size and condition number."""
Named = tuple[tuple[Any, ...], Cell]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how much to measure."""
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    add("--size", type=int, default=60, help="rows of the matrix (default: %(default)s)")
    conditions = [10, 1e3, 1e5]
    add("--conditions", type=float, nargs="+", default=conditions, help="condition numbers of Q")
    add("--gap", type=float, default=1e-8, help="how close to the least value (default: 1e-8)")
    add("--rounds", type=int, default=3, help="random problems of each kind (default: 3)")
    sizes = [20, 60, 150, 500]
    add("--sizes", type=int, nargs="*", default=sizes, help="of the sweep, at condition 1e3")
    add("--seeds", type=int, default=20, help="seeds of the stochastic part (default: 20)")
    add("--steps", type=int, default=400, help="its iterations at most (default: %(default)s)")
    add("--seconds", type=float, default=4.0, help="CPU time for one run (default: %(default)s)")
    add("--quick", action="store_true", help="small matrices, one round, few seeds: half a minute")
    add("--plot", default="runs/bench/spd.png", help="where the picture goes")


def cells(args: argparse.Namespace, found: Mapping[Any, Any]) -> Plans:
    """List all runs; rounds after the first are for solvers that are not slow."""
    torch.set_num_threads(1)
    if args.quick:
        vars(args).update(QUICK)
    _check(args)
    parts: dict[str, Callable[[argparse.Namespace], Iterator[Named]]] = {
        "main": partial(main_runs, found),
        "fixed": fixed_runs,
        "sweep": sweep_runs,
        "stochastic": stochastic_runs,
    }
    plans: dict[Any, Cell] = {}
    plans["slopes",] = _cell({"slopes": args.size}, partial(slopes, args.size))
    for part in args.parts:
        plans.update(parts[part](args))
    return plans


def main_runs(found: Mapping[Any, Any], args: argparse.Namespace) -> Iterator[Named]:
    """Give runs of the solvers that search for step sizes, in turn, round after round."""
    conditions = args.conditions
    for seed, problem, condition, solver in product(
        range(args.rounds), PROBLEMS, conditions, SEARCHING
    ):
        case = problem, args.size, condition
        first = found.get(("main", case, solver, 0), {"seconds": math.inf})
        if seed == 0 or first["seconds"] < SLOW:
            yield ("main", case, solver, seed), run_of(case, solver, seed, args, 1.0)


def fixed_runs(args: argparse.Namespace) -> Iterator[Named]:
    """Give runs of the schemes that need a step size, on the easier problems."""
    for problem, condition, scheme in product(PROBLEMS, sorted(args.conditions)[:2], FIXED):
        case = problem, args.size, condition
        yield ("fixed", case, scheme), fixed_of(case, scheme, args)


def sweep_runs(args: argparse.Namespace) -> Iterator[Named]:
    """Give runs on matrices of several sizes."""
    for size, problem, solver in product(sorted(args.sizes), PROBLEMS, (OURS, CG, TR)):
        case = problem, size, SWEEP_CONDITION
        yield ("sweep", case, solver, 0), run_of(case, solver, 0, args, 4.0)


def stochastic_runs(args: argparse.Namespace) -> Iterator[Named]:
    """Give the problems that are seen through minibatches."""
    for problem in MINIBATCHES:
        how = {"size": args.size, "seeds": args.seeds, "steps": args.steps}
        compute = partial(spd_stochastic.measure, problem, **how)
        yield ("stochastic", problem), _cell({"stochastic": problem, **how}, compute)


def _check(args: argparse.Namespace) -> None:
    for name in ("size", "rounds", "seeds", "steps"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if min([args.gap, args.seconds, *args.conditions]) <= 0:
        raise UserError("--gap, --seconds and --conditions must be positive")


def _cell(key: Mapping[str, Any], compute: Any, ours: bool = True) -> Cell:
    return Cell(key, compute, behavior("spd") if ours else "")


def run_of(case: Case, solver: str, seed: int, args: argparse.Namespace, longer: float) -> Cell:
    """Return the run of a solver on a random problem."""
    how = {"gap": args.gap, "seconds": longer * args.seconds}
    key = {"case": list(case), "solver": solver, "seed": seed, **how}
    return _cell(key, partial(solve, case, solver, seed, **how), solver.startswith(OURS))


def fixed_of(case: Case, scheme: str, args: argparse.Namespace) -> Cell:
    """Return the best run of a scheme that needs a step size."""
    how = {"gap": args.gap, "seconds": args.seconds / 4}
    key = {"case": list(case), "fixed": scheme, **how}
    return _cell(key, partial(solve_fixed, case, scheme, **how), scheme == "paper's scheme")


def solve(case: Case, solver: str, seed: int, *, gap: float, seconds: float) -> dict[str, Any]:
    """Run a solver, and return what it took."""
    warm_up(solver)
    problem, size, condition = case
    meter = Meter(PROBLEMS[problem](size, condition, seed), gap, 10_000, seconds)
    spent = meter.run(SEARCHING[solver])
    return {**_figures(meter), "seconds": spent, "values": meter.values, "trace": meter.trace}


@lru_cache
def warm_up(solver: str) -> None:
    """Let a package import and set up what it needs, which takes longer than a short run."""
    Meter(PROBLEMS["log-det"](4, 2.0, 0), 1e-8, 1000, 1.0).run(SEARCHING[solver])


def solve_fixed(case: Case, scheme: str, *, gap: float, seconds: float) -> dict[str, Any]:
    """Run a scheme with each of several step sizes."""
    problem, size, condition = case
    meters = partial(Meter, PROBLEMS[problem](size, condition, 0), gap, 300, seconds)
    meter, endings = best_fixed(scheme, meters)
    return {**_figures(meter), "endings": endings}


def _figures(meter: Meter) -> dict[str, Any]:
    return {
        "reached": meter.message == "reached",
        "message": meter.message,
        "gradients": meter.gradients + meter.products,
        "best": meter.best,
    }


def report(args: argparse.Namespace, found: Mapping[Any, Any]) -> dict[str, Any]:
    """Return all figures, and draw the curves."""
    result: dict[str, Any] = {"gap": args.gap, "size": args.size, "rounds": args.rounds}
    result["slopes"] = found["slopes",]
    for part in ("main", "sweep"):
        if part in args.parts:
            result[part] = summaries(found, part)
    if "fixed" in args.parts:
        result["fixed"] = [
            {**_entry(name[1]), "solver": name[2], **run}
            for name, run in found.items()
            if name[0] == "fixed"
        ]
    if "stochastic" in args.parts:
        result["stochastic"] = {problem: found["stochastic", problem] for problem in MINIBATCHES}
    draw(result, args.plot)
    return figures(result, list(verdicts(result)), list(tables(result)), "Verdicts")


def summaries(found: Mapping[Any, Any], part: str) -> list[dict[str, Any]]:
    """Return an entry for each case and solver, with medians over the rounds."""
    runs: dict[tuple[Case, str], list[dict[str, Any]]] = {}
    for name, run in found.items():
        if name[0] == part:
            runs.setdefault((name[1], name[2]), []).append(run)
    return [
        {**_entry(case), "solver": solver, **_summary(own)} for (case, solver), own in runs.items()
    ]


def _entry(case: Case) -> dict[str, Any]:
    return {"problem": case[0], "size": case[1], "condition": case[2]}


def _summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    medians = {
        name: statistics.median(run[name] for run in runs)
        for name in ("gradients", "values", "seconds")
    }
    return {
        "reached": all(run["reached"] for run in runs),
        **medians,
        "best": max(run["best"] for run in runs),
        "messages": sorted({run["message"] for run in runs}),
        "trace": runs[0]["trace"],
    }


def slopes(size: int) -> dict[str, dict[str, float]]:
    """Return the order in the step size at which one step of each of our schemes differs from each
    baseline's.
    """
    generator = torch.Generator().manual_seed(0)
    S = Full.from_dense(random_spd(size, 3.0, generator))
    Q, dense = random_spd(size, 10.0, generator), S.dense()
    gradient = Q - torch.linalg.inv(dense)
    gradient = (gradient + gradient.T) / 2
    frame, factor = S.basis * S.eigs.sqrt(), torch.linalg.cholesky(dense)
    tangent = -2 * frame.T @ gradient @ frame

    def difference(name: str, baseline: str, lr: float) -> float:
        ours = RETRACTIONS[name](S, lr * (tangent + tangent.T) / 2)[0].dense()
        moved = rgd.cholesky_step(factor, gradient, lr)
        theirs = (
            rgd.retraction_step(dense, gradient, lr)
            if baseline == "retraction"
            else moved @ moved.T
        )
        return float((ours - theirs).norm())

    return {
        name: {
            other: math.log10(difference(name, other, 1e-3) / difference(name, other, 1e-4))
            for other in ("retraction", "Cholesky")
        }
        for name in RETRACTIONS
    }


def verdicts(result: Mapping[str, Any]) -> Iterator[Verdict]:
    """Compare the figures with what we want to be true."""
    entries = {(e["problem"], e["condition"], e["solver"]): e for e in result.get("main", ())}
    for problem, condition in dict.fromkeys(key[:2] for key in entries):
        case = f"{problem}, condition {condition:g}"
        for claim, rival, what, strict in (
            ("no more gradients than conjugate gradient", CG, "gradients", math.inf),
            ("less CPU time than trust regions", TR, "seconds", 0.0),
        ):
            ours, theirs = (entries[problem, condition, solver] for solver in (OURS, rival))
            value = ours[what] if ours["reached"] else math.nan
            limit = math.nextafter(theirs[what], strict) if theirs["reached"] else math.inf
            yield Verdict(claim, OURS, f"{case}: {what}", value, limit, timed=what == "seconds")
    yield from spd_stochastic.verdicts(result.get("stochastic", {}))
    for name, orders in result["slopes"].items():
        for other, order in orders.items():
            quantity = f"order of the difference from {other}"
            yield Verdict(
                "one step: equal to first order", name, quantity, order, 1.95, at_least=True
            )


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Give the figures as tables."""
    if "main" in result:
        yield from _main_tables(result)
    if "fixed" in result:
        yield _fixed_table(result["fixed"])
    if "sweep" in result:
        rows = [
            (e["problem"], str(e["size"]), e["solver"], _count(e), _time(e))
            for e in sorted(result["sweep"], key=lambda e: (e["problem"], e["size"]))
        ]
        columns = ("problem", "size", "solver", "gradients", "CPU ms")
        yield Table("Sizes, at condition number 1000", columns, rows, timed=True)
    if "stochastic" in result:
        yield _minibatch_table(result["stochastic"])


def _fixed_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    counts = {(e["solver"], e["problem"], e["condition"]): _count(e) for e in entries}
    cases = list(dict.fromkeys(key[1:] for key in counts))
    schemes = dict.fromkeys(key[0] for key in counts)
    rows = [(scheme, *(counts[(scheme, *case)] for case in cases)) for scheme in schemes]
    title = f"Gradients with the best of {len(RATES)} fixed step sizes, 300 at most"
    heads = (f"{problem}, κ = {condition:g}" for problem, condition in cases)
    return Table(title, ("scheme", *heads), rows)


def _main_tables(result: Mapping[str, Any]) -> Iterator[Table]:
    for problem in PROBLEMS:
        entries = [e for e in result["main"] if e["problem"] == problem]
        conditions = list(dict.fromkeys(e["condition"] for e in entries))
        rows = []
        for solver in dict.fromkeys(e["solver"] for e in entries):
            mine = {e["condition"]: e for e in entries if e["solver"] == solver}
            rows.append(
                [solver, *(text for c in conditions for text in (_count(mine[c]), _time(mine[c])))]
            )
        columns = [
            "solver",
            *(f"κ = {c:g}: {what}" for c in conditions for what in ("gradients", "CPU ms")),
        ]
        title = f"{problem}, {result['size']} × {result['size']}, to a gap of {result['gap']:g}"
        yield Table(title, columns, rows, timed=True)


def _minibatch_table(stochastic: Mapping[str, Any]) -> Table:
    rows = []
    for problem, own in stochastic.items():
        for scheme, found in own["schemes"].items():
            settings = ", ".join(f"{key} {value:g}" for key, value in found["settings"].items())
            arrivals = found["arrivals"]
            late = sum(not math.isfinite(value) for value in arrivals)
            median, worst = f"{statistics.median(arrivals):g}", f"{max(arrivals):g}"
            rows.append(
                [problem, f"{own['target']:.2g}", scheme, settings, median, worst, str(late)]
            )
    columns = [
        "problem",
        "goal: gap",
        "scheme",
        "tuned settings",
        "median iterations",
        "slowest seed",
        "never",
    ]
    return Table("Minibatches: iterations until the noise is reached", columns, rows)


def _count(entry: Mapping[str, Any]) -> str:
    """Return the number of gradients, or how far a run that did not arrive got."""
    if entry["reached"]:
        return f"{entry['gradients']:g}"
    best = entry["best"]
    return (
        f"gap {best:.0e} after {entry['gradients']:g}"
        if math.isfinite(best) and best > 0
        else "fails"
    )


def _time(entry: Mapping[str, Any]) -> str:
    return (
        f"{1e3 * entry['seconds']:.0f}" if entry["reached"] else f"({1e3 * entry['seconds']:.0f})"
    )


def draw(result: Mapping[str, Any], path: str) -> None:
    """Draw the gap over gradients for each problem and condition number, and over iterations on
    minibatches.
    """
    entries = result.get("main", [])
    keys = list(dict.fromkeys((e["problem"], e["condition"]) for e in entries))
    columns = max(len(keys) // len(PROBLEMS), 2)
    drawn, axes = figure(columns=columns, rows=3, width=4.5, height=3.2)
    for ax, (problem, condition) in zip(axes[:2].flat, keys, strict=False):
        mine = [e for e in entries if (e["problem"], e["condition"]) == (problem, condition)]
        _draw_runs(ax, mine)
        ax.axhline(result["gap"], color="gray", linestyle=":")
        ax.set(title=f"{problem}, condition {condition:g}", xlabel="gradients", ylabel="gap")
    for ax, (problem, own) in zip(axes[2], result.get("stochastic", {}).items(), strict=False):
        for number, (scheme, run) in enumerate(own["schemes"].items()):
            ax.semilogy(run["curve"], label=scheme, **look(scheme, number))
        ax.axhline(own["target"], color="gray", linestyle=":")
        ax.set(title=f"{problem}, minibatches", xlabel="iteration", ylabel="gap, median")
        ax.legend(fontsize=6)
    for ax in axes.flat:
        ax.set_visible(bool(ax.lines))
    save(drawn, path)


def _draw_runs(ax: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    for number, entry in enumerate(entries):
        if entry["trace"]:
            gradients, gaps = zip(*entry["trace"], strict=True)
            shifted = [1 + count for count in gradients]
            style = look(entry["solver"], number)
            ax.loglog(shifted, [max(gap, 1e-12) for gap in gaps], label=entry["solver"], **style)
    ax.legend(fontsize=6)
