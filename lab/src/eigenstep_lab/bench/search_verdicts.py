"""What the figures of the search say: verdicts, tables and pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..lines import look
from ..plotting import figure, save
from ..results import Table, Verdict
from .search_bbob import BUDGET, BUDGETS
from .search_large import PARTS, RANKED_BUDGET, RANKED_SIZE, TUNED
from .search_mixed import PARTS as MIXED_PARTS
from .search_mixed import SAMPLERS, SEARCHES, TRIALS

EASY = {"Ackley": 0.75, "Griewank": 0.75, "Rosenbrock": 0.95}
"""Functions that need no restarts, and the share of pycma's evaluations that is allowed."""
TARGET = 1e-8
PORTFOLIO = {"5": 0.335, "10": 0.285, "20": 0.249, "40": 0.2}
"""Areas that are wanted: of COCO's best-2009 portfolio, and in 40 dimensions a bit less."""


def median(hits: Sequence[float | None]) -> float:
    """Return the median, with failures counted as infinite."""
    return statistics.median_low(finite(hits))


def solved(hits: Sequence[float | None]) -> int:
    """Return how many reached the target."""
    return sum(hit is not None for hit in hits)


def verdicts(computed: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge the figures of all parts."""
    for part, judge in JUDGES.items():
        if part in computed:
            yield from judge(computed[part])


def function_verdicts(figures: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge evaluations until the target."""
    for d, functions in figures.items():
        for name, hits in functions.items():
            ratio = median(hits["eigenstep"]) / median(hits["pycma"])
            quantity = f"{name}, d = {d}: median evaluations to {TARGET:g}, divided by pycma's"
            claim = "It needs fewer evaluations than CMA-ES."
            yield Verdict(claim, "spectral", quantity, ratio, EASY[name])


def restart_verdicts(figures: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge how many runs succeed with restarts."""
    claim = "With restarts it succeeds as often."
    for d, functions in figures.items():
        for name, hits in functions.items():
            more = solved(hits["eigenstep"]) - solved(hits["pycma"])
            runs = f"runs of {len(hits['pycma'])} that succeed with BIPOP, minus pycma's"
            yield Verdict(claim, "spectral", f"{name}, d = {d}: {runs}", more, 0, at_least=True)


def all_bbob_verdicts(figures: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge what was computed of BBOB."""
    for d, peers in figures["dimensions"].items():
        yield from bbob_verdicts(d, peers)


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def ratio_verdict(claim: str, ours: str, what: str, ratios: Sequence[float]) -> Verdict:
    """Judge the geometric mean of ratios of medians, over functions."""
    quantity = f"{len(ratios)} {what}"
    return Verdict(claim, ours, quantity, geometric_mean(ratios), 1.0)


def mixed_verdicts(figures: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge functions of numbers, integers and categories."""
    ratios = [median(hits["eigenstep"]) / median(hits["CatCMAwM"]) for hits in figures.values()]
    what = "functions: geometric mean of median evaluations, divided by those of CatCMAwM"
    yield ratio_verdict("Categories cost fewer evaluations.", "mixed", what, ratios)


def optuna_verdicts(figures: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge samplers of Optuna."""
    ours, *rivals = SAMPLERS
    for rival in rivals:
        ratios = [relative(hits, ours, rival, TRIALS) for hits in figures.values()]
        what = f"functions, {TRIALS} trials: geometric mean of trials, divided by {rival}'s"
        yield ratio_verdict("In Optuna it needs fewer trials.", ours, what, ratios)


def noise_verdicts(figures: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge what was learned from noisy values."""
    ratios = [
        statistics.median(ends["cautious"]) / statistics.median(ends["LRA-CMA"])
        for ends in figures.values()
    ]
    what = "noisy functions: geometric mean of median values in the end, divided by LRA-CMA's"
    yield ratio_verdict("It learns from noisy values.", "cautious", what, ratios)


def overhead_verdicts(figures: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge CPU time beside the function itself."""
    for d, times in figures.items():
        quantity = f"d = {d}: CPU time per evaluation, divided by pycma's"
        limit = 1 / 3 if int(d) == 40 else 1.0
        ratio = times["eigenstep"] / times["pycma"]
        claim = "It costs less time than pycma."
        yield Verdict(claim, "spectral", quantity, ratio, limit, timed=True)
        if d == "20" and "surrogate" in times:
            quantity = "d = 20: microseconds of CPU time per evaluation with the quadratic model"
            claim = "A model costs little time."
            yield Verdict(claim, "surrogate", quantity, times["surrogate"], 1000.0, timed=True)


def large_verdicts(computed: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge searches in large dimensions: at the seed and target where the lead over the best rival
    is smallest.
    """
    claim = "It needs fewer evaluations than searches with linear memory."
    for d, functions in computed.items():
        for name, hits in functions.items():
            ratios = [
                ratio for seed in range(len(hits["eigenstep-auto"])) for ratio in leads(hits, seed)
            ]
            where = f"at the worst of {len(ratios)} targets and seeds"
            quantity = f"{name}, d = {d}: evaluations, divided by the best rival's, {where}"
            yield Verdict(claim, "auto", quantity, max(ratios), 1.0)


def ranked_verdicts(computed: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge searches that see the order of values alone, on functions that had no part in choosing
    constants.
    """
    claim = (
        "Of searches with linear memory that see the order of values alone, it needs the "
        "fewest evaluations."
    )
    fresh = {name: hits for name, hits in computed.items() if name not in TUNED}
    for rival in (name for name in next(iter(fresh.values()), {}) if name != "lowrank"):
        logs = [
            math.log(relative(hits, "lowrank", rival, RANKED_BUDGET * RANKED_SIZE))
            for hits in fresh.values()
        ]
        quantity = (
            f"{len(fresh)} functions, d = {RANKED_SIZE}: geometric mean of evaluations, "
            f"divided by {rival}'s"
        )
        yield Verdict(claim, "lowrank", quantity, math.exp(statistics.fmean(logs)), 1.0)


def relative(hits: Mapping[str, Any], name: str, rival: str, last: int) -> float:
    """Return the geometric mean, over seeds and targets that one has reached, of evaluations
    divided by a rival's.

    A search that has not reached a target counts as if it had with the last evaluation, whichever
    it is; if none has been reached, both are alike.
    """
    runs = zip(hits[name], hits[rival], strict=True)
    pairs = [
        pair
        for ours, theirs in runs
        for pair in zip(ours, theirs, strict=True)
        if pair != (None, None)
    ]
    return math.exp(
        statistics.fmean([math.log((a or last) / (b or last)) for a, b in pairs] or [0.0])
    )


def leads(hits: Mapping[str, Any], seed: int) -> list[float]:
    """Return evaluations of the default, divided by the best rival's, at all targets that a rival
    has reached.
    """
    best = [
        min(counts)
        for counts in zip(
            *(finite(h[seed]) for p, h in hits.items() if p != "eigenstep-auto"), strict=True
        )
    ]
    ours = finite(hits["eigenstep-auto"][seed])
    return [mine / least for mine, least in zip(ours, best, strict=True) if least < math.inf]


def finite(hits: Sequence[float | None]) -> list[float]:
    """Return evaluations with those that are missing as infinite."""
    return [math.inf if hit is None else hit for hit in hits]


def bbob_verdicts(d: str, peers: Mapping[str, Any]) -> Iterator[Verdict]:
    """Judge what was computed of BBOB in one dimension."""
    where = f"BBOB, d = {d}"
    for rival in ("pycma", "cmaes"):
        if {rival, "eigenstep"} <= set(peers):
            more = peers["eigenstep"]["area"] - peers[rival]["area"]
            quantity = f"{where}: area under the ECDF, minus that of {rival}"
            claim = "It is the better choice on BBOB."
            yield Verdict(claim, "spectral", quantity, more, 0, at_least=True)
    if "eigenstep-auto" in peers:
        yield from default_verdicts(d, peers["eigenstep-auto"], peers)


def default_verdicts(
    d: str, ours: Mapping[str, Any], peers: Mapping[str, Any]
) -> Iterator[Verdict]:
    """Judge the default of `minimize` on BBOB in one dimension."""
    where = f"BBOB, d = {d}"
    if d in PORTFOLIO:
        claim = "Its default is as good as the best of many."
        quantity = f"{where}: area under the ECDF"
        yield Verdict(claim, "auto", quantity, ours["area"], PORTFOLIO[d], at_least=True)
    claim = "A descent does no harm at any budget."
    for rival, allowed, budgets in (("eigenstep", -0.01, BUDGETS), ("surrogate", 0.0, (50, 100))):
        if rival in peers:
            theirs = peers[rival]["budgets"]
            more = min(ours["budgets"][str(b)] - theirs[str(b)] for b in budgets)
            quantity = (
                f"{where}: least lead over {rival} of the share of targets at {budgets} "
                "evaluations / d"
            )
            yield Verdict(claim, "auto", quantity, more, allowed, at_least=True)


def tables(computed: Mapping[str, Any]) -> Iterator[Table]:
    """Give the figures of all parts as tables."""
    for part, show in TABLES.items():
        if part in computed:
            yield from show(computed[part])


def hits_cell(hits: Sequence[float | None]) -> str:
    """Show the median of evaluations, and how many runs reached the target."""
    return f"{median(hits):.0f} ({solved(hits)}/{len(hits)})"


def hits_table(title: str, figures: Mapping[str, Any]) -> Iterator[Table]:
    """Give evaluations until the target, by function and dimension."""
    names = ("eigenstep", "pycma")
    rows = [
        (name, d, *(hits_cell(hits[peer]) for peer in names))
        for d, functions in figures.items()
        for name, hits in functions.items()
    ]
    yield Table(title, ("function", "d", *names), rows)


def mixed_table(figures: Mapping[str, Any]) -> Iterator[Table]:
    """Give evaluations on functions of numbers, integers and categories."""
    rows = [(name, *(hits_cell(hits[s]) for s in SEARCHES)) for name, hits in figures.items()]
    title = "Numbers, integers and categories: median evaluations to 1e-6"
    yield Table(title, ("function", *SEARCHES), rows)


def optuna_table(figures: Mapping[str, Any]) -> Iterator[Table]:
    """Give trials of Optuna."""
    title = "The same in Optuna: median trials until a part of the value in the middle"
    yield parts_table(title, figures, MIXED_PARTS, 2)


def large_tables(figures: Mapping[str, Any]) -> Iterator[Table]:
    """Give evaluations in thousands of dimensions."""
    for d, functions in figures.items():
        title = f"{d} dimensions: median evaluations until a part of the first value"
        yield parts_table(title, functions, PARTS)


def ranked_tables(figures: Mapping[str, Any]) -> Iterator[Table]:
    """Give the same for searches that see the order of values alone, and ratios of ours."""
    title = (
        f"{RANKED_SIZE} dimensions, only the order of values: median evaluations until a "
        "part of the first one"
    )
    yield parts_table(title, figures, PARTS, 2)
    names = [name for name in next(iter(figures.values())) if name != "lowrank"]
    last = RANKED_BUDGET * RANKED_SIZE
    rows = [
        (
            name,
            "yes" if name in TUNED else "no",
            *(f"{relative(hits, 'lowrank', rival, last):.2f}" for rival in names),
        )
        for name, hits in figures.items()
    ]
    title = "Evaluations of lowrank, divided by those of a rival: geometric mean over targets"
    yield Table(title, ("function", "used for tuning", *names), rows)


def noise_table(figures: Mapping[str, Any]) -> Iterator[Table]:
    """Give true values after noisy ones."""
    names = list(next(iter(figures.values())))
    rows = [
        (name, *(f"{statistics.median(ends[peer]):.3g}" for peer in names))
        for name, ends in figures.items()
    ]
    yield Table("Noisy values: median true value in the end", ("function", *names), rows)


def overhead_table(figures: Mapping[str, Any]) -> Iterator[Table]:
    """Give CPU time beside the function itself."""
    names = list(next(iter(figures.values())))
    rows = [
        (d, *(f"{times[peer]:.1f}" if peer in times else "–" for peer in names))
        for d, times in figures.items()
    ]
    yield Table("Microseconds of CPU time per evaluation", ("d", *names), rows, timed=True)


def parts_table(
    title: str, functions: Mapping[str, Any], parts: Sequence[float], every: int = 1
) -> Table:
    """Give evaluations until all or every so many of the targets."""
    names = list(next(iter(functions.values())))
    rows = [
        [name, f"{part:.2g}", *("–" if count == math.inf else f"{count:.0f}" for count in counts)]
        for name, hits in functions.items()
        for k, part in list(enumerate(parts))[every - 1 :: every]
        for counts in [[median([run[k] for run in hits[p]]) for p in names]]
        if min(counts) < math.inf
    ]
    return Table(title, ["function", "part", *names], rows)


def bbob_tables(computed: Mapping[str, Any]) -> Iterator[Table]:
    """Give what was computed of BBOB as tables."""
    entries, known = computed["dimensions"], computed.get("portfolios", {})
    names = list(next(iter(entries.values())))
    full = [
        name for name in names if all(peers[name]["area"] is not None for peers in entries.values())
    ]
    lines = list(next(iter(known.values()), {}))
    rows = [
        [
            d,
            peers[full[0]]["instances"],
            *(f"{peers[name]['area']:.4f}" for name in full),
            *(f"{known[d][name]['area']:.4f}" if d in known else "–" for name in lines),
        ]
        for d, peers in entries.items()
    ]
    title = f"BBOB: area under the ECDF, {BUDGET} evaluations per dimension"
    yield Table(title, ["d", "instances", *full, *lines], rows)
    rows = [
        [
            d,
            name,
            *(
                f"{entry['budgets'][str(b)]:.3f}" if str(b) in entry["budgets"] else "–"
                for b in BUDGETS
            ),
        ]
        for d, peers in entries.items()
        for name, entry in {**peers, **known.get(d, {})}.items()
    ]
    yield Table(
        "BBOB: share of targets reached", ["d", "search", *(f"{b} d" for b in BUDGETS)], rows
    )
    ours, *rivals = sorted(full, key="eigenstep-auto".__ne__)
    rows = [
        [d, *(", ".join(worse(peers, p, ours)) or "none" for p in rivals)]
        for d, peers in entries.items()
    ]
    if rivals:
        yield Table(
            f"BBOB: functions on which the area of {ours} is smaller than that of",
            ["d", *rivals],
            rows,
        )


def worse(peers: Mapping[str, Any], rival: str, name: str = "eigenstep") -> list[str]:
    """Name the functions on which a search is worse than a rival by more than 0.01, with the
    difference.
    """
    ours, theirs = peers[name]["functions"], peers[rival]["functions"]
    return [f"f{f} ({ours[f] - theirs[f]:+.2f})" for f in ours if ours[f] < theirs[f] - 0.01]


def draw(computed: Mapping[str, Any], path: str) -> None:
    """Draw the ECDFs, one panel for each dimension, and cost against dimension."""
    bbob = computed.get("bbob", {"dimensions": {}})
    drawn, axes = figure(
        columns=max(1, len(bbob["dimensions"]) + ("overhead" in computed)), width=4.2
    )
    panels = list(axes[0])
    for d, peers in bbob["dimensions"].items():
        ax = panels.pop(0)
        for number, (name, entry) in enumerate(peers.items()):
            label = name if entry["area"] is None else f"{name}: area {entry['area']:.3f}"
            at = bbob["evaluations_per_dimension"][: len(entry["curve"])]
            ax.plot(at, entry["curve"], label=label, **look(name, number))
        for dash, (name, entry) in zip(
            ("--", ":"), bbob.get("portfolios", {}).get(d, {}).items(), strict=False
        ):
            label = f"{name}: area {entry['area']:.3f}"
            ax.plot(
                bbob["evaluations_per_dimension"],
                entry["curve"],
                color="black",
                linestyle=dash,
                label=label,
            )
        ax.set(
            title=f"BBOB, d = {d}",
            xlabel="evaluations / d",
            ylabel="targets reached",
            xscale="log",
            ylim=(0, 1),
        )
        ax.legend(fontsize=8)
    if "overhead" in computed:
        ax, found = panels.pop(0), computed["overhead"]
        for number, name in enumerate(next(iter(found.values()))):
            times = {int(d): row[name] for d, row in found.items() if name in row}
            ax.plot(list(times), list(times.values()), marker="o", label=name, **look(name, number))
        ax.set(
            title="Overhead", xlabel="d", ylabel="CPU µs per evaluation", xscale="log", yscale="log"
        )
        ax.legend(fontsize=8)
    save(drawn, path)


JUDGES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Verdict]]] = {
    "functions": function_verdicts,
    "restarts": restart_verdicts,
    "bbob": all_bbob_verdicts,
    "mixed": mixed_verdicts,
    "optuna": optuna_verdicts,
    "large": large_verdicts,
    "ranked": ranked_verdicts,
    "noise": noise_verdicts,
    "overhead": overhead_verdicts,
}
_REACHED = f"Median evaluations to {TARGET:g}, and how many runs reached it"
TABLES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Table]]] = {
    "functions": partial(hits_table, _REACHED),
    "restarts": partial(hits_table, "The same with BIPOP restarts"),
    "bbob": bbob_tables,
    "mixed": mixed_table,
    "optuna": optuna_table,
    "large": large_tables,
    "ranked": ranked_tables,
    "noise": noise_table,
    "overhead": overhead_table,
}
