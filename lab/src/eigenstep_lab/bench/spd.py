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
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from eigenstep.core.matrices import Full
from eigenstep.manifold.retractions import RETRACTIONS

from ..baselines import rgd
from ..console import UserError, track
from ..lines import look
from ..plotting import figure, save
from ..problems.spd import PROBLEMS, random_spd
from . import spd_stochastic
from .spd_solvers import FIXED, RATES, SEARCHING, Meter, best_fixed

OURS, CG, TR = "ours", "pymanopt conjugate gradient", "pymanopt trust regions"
SLOW = 1.0
"""A solver that takes longer than this, in seconds, runs in the first round only."""


PARTS = ("main", "fixed", "sweep", "stochastic")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how much to measure."""
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)"
    )
    parser.add_argument(
        "--size", type=int, default=60, help="rows of the matrix (default: %(default)s)"
    )
    parser.add_argument(
        "--conditions", type=float, nargs="+", default=[10, 1e3, 1e5], help="condition numbers of Q"
    )
    parser.add_argument(
        "--gap",
        type=float,
        default=1e-8,
        help="how close to the least value (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="random problems of each kind (default: %(default)s)"
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="*",
        default=[20, 60, 150, 500],
        help="sizes of the sweep, at condition number 1e3",
    )
    parser.add_argument(
        "--seeds", type=int, default=20, help="seeds of the stochastic part (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=400, help="its iterations at most (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="CPU time for one run (default: %(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small matrices, one round, few seeds: half a minute"
    )
    parser.add_argument(
        "--plot", default="runs/bench/spd.png", help="where the picture goes (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and draw the curves."""
    torch.set_num_threads(1)
    if args.quick:
        args.size, args.rounds, args.sizes, args.seeds, args.steps, args.seconds = (
            10,
            1,
            [5, 10],
            3,
            100,
            1.0,
        )
    for name in ("size", "rounds", "seeds", "steps"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if min([args.gap, args.seconds, *args.conditions]) <= 0:
        raise UserError("--gap, --seconds and --conditions must be positive")
    result = measure(args)
    draw(result, args.plot)
    return result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    result: dict[str, Any] = {
        "gap": args.gap,
        "size": args.size,
        "rounds": args.rounds,
        "slopes": slopes(args.size),
    }
    if "main" in args.parts:
        cases = [
            (problem, args.size, condition) for problem in PROBLEMS for condition in args.conditions
        ]
        result["main"] = compare(
            cases, list(SEARCHING), args.rounds, args.gap, args.seconds, "Searching solvers"
        )
    if "fixed" in args.parts:
        result["fixed"] = fixed(args)
    if "sweep" in args.parts:
        cases = [(problem, size, 1e3) for size in sorted(args.sizes) for problem in PROBLEMS]
        result["sweep"] = compare(cases, [OURS, CG, TR], 1, args.gap, 4 * args.seconds, "Sizes")
    if "stochastic" in args.parts:
        result["stochastic"] = spd_stochastic.measure(args.size, args.seeds, args.steps)
    result["verdicts"] = verdicts(result)
    return {"tables": list(tables(result)), **result}


Case = tuple[str, int, float]


def compare(
    cases: list[Case], solvers: list[str], rounds: int, gap: float, seconds: float, title: str
) -> list[dict[str, Any]]:
    """Run solvers in turn on the same problems; one entry for each case and solver, with medians
    over the rounds.
    """
    for solver in solvers:  # the first call of a package takes longer: it imports and sets up
        Meter(PROBLEMS["log-det"](4, 2.0, 0), gap, 1000, seconds).run(SEARCHING[solver])
    runs: dict[tuple[Case, str], list[tuple[Meter, float]]] = {}
    for seed in range(rounds):
        for case in track(cases, f"{title}, round {seed + 1} of {rounds}"):
            name, size, condition = case
            problem = PROBLEMS[name](size, condition, seed)
            for solver in solvers:
                found = runs.setdefault((case, solver), [])
                if not found or found[0][1] < SLOW:
                    meter = Meter(problem, gap, 10_000, seconds)
                    found.append((meter, meter.run(SEARCHING[solver])))
    return [
        {**_entry(case), "solver": solver, **_summary(found)}
        for (case, solver), found in runs.items()
    ]


def _entry(case: Case) -> dict[str, Any]:
    return {"problem": case[0], "size": case[1], "condition": case[2]}


def _summary(found: list[tuple[Meter, float]]) -> dict[str, Any]:
    meters = [meter for meter, _ in found]
    reached = all(meter.message == "reached" for meter in meters)
    return {
        "reached": reached,
        "gradients": statistics.median(meter.gradients + meter.products for meter in meters),
        "values": statistics.median(meter.values for meter in meters),
        "seconds": statistics.median(spent for _, spent in found),
        "best": max(meter.best for meter in meters),
        "messages": sorted({meter.message for meter in meters}),
        "trace": meters[0].trace,
    }


def fixed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the schemes that need a step size, with each of several, on the easier problems."""
    cases = [
        (problem, c, name)
        for problem in PROBLEMS
        for c in sorted(args.conditions)[:2]
        for name in FIXED
    ]
    found = []
    for problem, condition, name in track(cases, "Fixed step sizes"):
        make = partial(
            Meter, PROBLEMS[problem](args.size, condition, 0), args.gap, 300, args.seconds / 4
        )
        meter, endings = best_fixed(name, make)
        gradients = {
            "reached": meter.message == "reached",
            "gradients": meter.gradients,
            "best": meter.best,
        }
        found.append(
            {
                **_entry((problem, args.size, condition)),
                "solver": name,
                **gradients,
                "endings": endings,
            }
        )
    return found


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


def verdicts(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare the figures with what we want to be true."""
    found: list[dict[str, Any]] = []

    def add(claim: str, case: str, ours: float, limit: float, holds: bool) -> None:
        found.append({"claim": claim, "case": case, "ours": ours, "limit": limit, "holds": holds})

    entries = {(e["problem"], e["condition"], e["solver"]): e for e in result.get("main", ())}
    for problem, condition in dict.fromkeys(key[:2] for key in entries):
        ours, cg, tr = (entries[problem, condition, solver] for solver in (OURS, CG, TR))
        case = f"{problem}, condition {condition:g}"
        fewer = ours["reached"] and (not cg["reached"] or ours["gradients"] <= cg["gradients"])
        add(
            "gradients: no more than conjugate gradient",
            case,
            ours["gradients"],
            cg["gradients"],
            fewer,
        )
        faster = ours["reached"] and (not tr["reached"] or ours["seconds"] < tr["seconds"])
        add("CPU seconds: less than trust regions", case, ours["seconds"], tr["seconds"], faster)
    for v in spd_stochastic.verdicts(result.get("stochastic", {})):
        case = f"{v['problem']}, {v['scheme']}"
        add(
            "minibatches: iterations, no more than the better tuned baseline",
            case,
            v["ours"],
            v["baseline"],
            v["holds"],
        )
    for name, orders in result["slopes"].items():
        for other, order in orders.items():
            add("one step: equal to first order", f"{name} and {other}", order, 2.0, order > 1.95)
    return found


def tables(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the figures as tables."""
    if "main" in result:
        yield from _main_tables(result)
    if "fixed" in result:
        keys = list(dict.fromkeys((e["problem"], e["condition"]) for e in result["fixed"]))
        rows = [
            [solver, *(_count(e) for key in keys for e in _matching(result["fixed"], solver, key))]
            for solver in dict.fromkeys(e["solver"] for e in result["fixed"])
        ]
        title = f"Gradients with the best of {len(RATES)} fixed step sizes, 300 at most"
        columns = ["scheme", *(f"{problem}, κ = {condition:g}" for problem, condition in keys)]
        yield {"title": title, "columns": columns, "rows": rows}
    if "sweep" in result:
        rows = [
            [e["problem"], str(e["size"]), e["solver"], _count(e), _time(e)]
            for e in sorted(result["sweep"], key=lambda e: (e["problem"], e["size"]))
        ]
        columns = ["problem", "size", "solver", "gradients", "CPU ms"]
        yield {"title": "Sizes, at condition number 1000", "columns": columns, "rows": rows}
    if "stochastic" in result:
        yield _minibatch_table(result["stochastic"])
    rows = [
        [
            v["claim"],
            v["case"],
            _number(v["ours"]),
            _number(v["limit"]),
            "holds" if v["holds"] else "DOES NOT HOLD",
        ]
        for v in result["verdicts"]
    ]
    yield {
        "title": "Verdicts",
        "columns": ["claim", "case", "ours", "limit", "verdict"],
        "rows": rows,
    }


def _main_tables(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
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
        yield {"title": title, "columns": columns, "rows": rows}


def _minibatch_table(stochastic: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for problem, figures in stochastic.items():
        for scheme, found in figures["schemes"].items():
            settings = ", ".join(f"{key} {value:g}" for key, value in found["settings"].items())
            arrivals = found["arrivals"]
            late = sum(not math.isfinite(value) for value in arrivals)
            median, worst = f"{statistics.median(arrivals):g}", f"{max(arrivals):g}"
            rows.append(
                [problem, f"{figures['target']:.2g}", scheme, settings, median, worst, str(late)]
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
    return {
        "title": "Minibatches: iterations until the noise is reached",
        "columns": columns,
        "rows": rows,
    }


def _matching(
    entries: list[dict[str, Any]], solver: str, key: tuple[str, float]
) -> list[dict[str, Any]]:
    return [e for e in entries if e["solver"] == solver and (e["problem"], e["condition"]) == key]


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


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "never"


def draw(result: Mapping[str, Any], path: str) -> None:
    """Draw the gap over gradients for each problem and condition number, and over iterations on
    minibatches.
    """
    main = result.get("main", [])
    keys = list(dict.fromkeys((e["problem"], e["condition"]) for e in main))
    columns = max(len(keys) // len(PROBLEMS), 2)
    drawn, axes = figure(columns=columns, rows=3, width=4.5, height=3.2)
    for ax, (problem, condition) in zip(axes[:2].flat, keys, strict=False):
        mine = [e for e in main if (e["problem"], e["condition"]) == (problem, condition)]
        for number, e in enumerate(mine):
            if e["trace"]:
                gradients, gaps = zip(*e["trace"], strict=True)
                style = {"label": e["solver"], **look(e["solver"], number)}
                ax.loglog([1 + g for g in gradients], [max(g, 1e-12) for g in gaps], **style)
        ax.axhline(result["gap"], color="gray", linestyle=":")
        ax.set(title=f"{problem}, condition {condition:g}", xlabel="gradients", ylabel="gap")
    if main:
        axes[0, 0].legend(fontsize=6)
    for ax, (problem, figures) in zip(axes[2], result.get("stochastic", {}).items(), strict=False):
        for number, (scheme, found) in enumerate(figures["schemes"].items()):
            ax.semilogy(found["curve"], label=scheme, **look(scheme, number))
        ax.axhline(figures["target"], color="gray", linestyle=":")
        ax.set(title=f"{problem}, minibatches", xlabel="iteration", ylabel="gap, median")
        ax.legend(fontsize=6)
    for ax in axes.flat:
        ax.set_visible(bool(ax.lines))
    save(drawn, path)
