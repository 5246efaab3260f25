"""Measure whether learning rates that suit a narrow GPT suit a wide one.

The suite's GPT over byte pairs is trained at several widths. At each, the best learning rate is
searched on a grid of powers of two times 0.001, from the best of the width before, until both its
neighbors are worse. What counts is the held-out loss at the rate that a rule makes of the narrowest
network's, by the best that was seen: the rule says that rates stay as they are, or fall as the root
of the width, or as the width. Runs are kept in a file: an interrupted study goes on where it
stopped, and a finished one is only read. Wide networks are dear: those wider than `--searched` are
trained only at the best rate of the width before, and at those that the rules give.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eigenstep import Spectral

from ..behavior import behavior
from ..console import MOST_THREADS, between
from ..results import Table, Verdict, verdict_table
from ..store import Cells
from .suite.catalog import TASKS
from .suite.language import gpt_tokens
from .suite.task import Task, run_one

RULES = {"same": 0.0, "root": 0.5, "width": 1.0}
"""By which power of the width rates fall."""
LIMIT = 1.05
"""How much larger than the best the loss may be."""
FIRST = 8e-3
"""Where the search begins at the narrowest width."""
Losses = Mapping[int, Mapping[float, float]]  # by width and rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add widths, rules and lengths."""
    parser.add_argument(
        "--widths", nargs="+", type=int, default=[64, 128, 256, 512], help="widths, narrowest first"
    )
    parser.add_argument(
        "--searched", type=int, default=512, help="widest to search (default: %(default)s)"
    )
    parser.add_argument(
        "--rules", nargs="+", choices=RULES, default=list(RULES), help="how rates follow widths"
    )
    parser.add_argument(
        "--steps", type=int, default=TASKS["gpt_tokens"].steps, help="steps (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="seeds to average over (default: %(default)s)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("runs/bench/widths.jsonl"),
        help="file of runs (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=between(1, MOST_THREADS),
        default=1,
        help="threads for torch (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Search the best rates, and say what the narrowest network's costs the others."""
    torch.set_num_threads(args.threads)
    cells = Cells(args.results)
    losses: dict[int, dict[float, float]] = {}
    best = FIRST
    for width in args.widths:
        loss = partial(mean_loss, cells, args.steps, args.seeds, width)
        losses[width] = search(loss, best) if width <= args.searched else {best: loss(best)}
        best = best_rate(losses[width])
    narrow = best_rate(losses[args.widths[0]])
    for width in args.widths[1:]:
        for rule in args.rules:
            rate = ruled(narrow, args.widths[0], width, rule)
            if rate not in losses[width]:
                losses[width][rate] = mean_loss(cells, args.steps, args.seeds, width, rate)
    found = verdicts(losses, narrow, args.rules)
    tables = [loss_table(losses, args.steps), verdict_table("What holds", found)]
    return {
        "best": {str(width): best_rate(own) for width, own in losses.items()},
        "losses": {
            str(width): {f"{rate:g}": own[rate] for rate in sorted(own)}
            for width, own in losses.items()
        },
        "verdicts": [asdict(v) for v in found],
        "tables": [asdict(t) for t in tables],
    }


def search(loss: Callable[[float], float], start: float) -> dict[float, float]:
    """Return losses by rates around the best one, whose neighbors are among them.

    Args:
        loss: the loss at a rate; infinite where a run fails.
        start: the rate to begin with.
    """
    found = {start: loss(start)}
    while True:
        best = best_rate(found)
        # Wide networks want less
        missing = [rate for rate in (best / 2, best * 2) if rate not in found]
        if not missing or best < start / 2**12:
            return found
        found[missing[0]] = loss(missing[0])


def best_rate(losses: Mapping[float, float]) -> float:
    """Return the rate with the least loss."""
    return min(losses, key=losses.__getitem__)


def ruled(rate: float, narrow: int, width: int, rule: str) -> float:
    """Return the rate that a rule gives at a width."""
    return float(rate * (narrow / width) ** RULES[rule])


def verdicts(losses: Losses, rate: float, rules: list[str]) -> list[Verdict]:
    """Compare what each rule gives at each width with the best that was seen there."""
    narrow, *others = losses
    claim = f"the best rate of width {narrow} is good enough"
    found = []
    for rule in rules:
        for width in others:
            own = losses[width]
            ratio = own[ruled(rate, narrow, width, rule)] / min(own.values())
            found.append(
                Verdict(claim, f"rule: {rule}", f"loss at width {width}, by the best", ratio, LIMIT)
            )
    return found


def loss_table(losses: Losses, steps: int) -> Table:
    """Show all losses."""
    rates = sorted({rate for own in losses.values() for rate in own})
    rows = [
        (f"{width}", *(f"{own[r]:.3f}" if r in own else "" for r in rates))
        for width, own in losses.items()
    ]
    return Table(
        f"Held-out loss after {steps} steps, by learning rate",
        ("width", *(f"{r:.3g}" for r in rates)),
        rows,
    )


def mean_loss(cells: Cells, steps: int, seeds: int, width: int, rate: float) -> float:
    """Return the held-out loss, averaged over seeds; infinite if a run fails."""
    task = replace(TASKS["gpt_tokens"], build=partial(gpt_tokens, width=width))
    found = []
    for seed in range(seeds):
        cell = {
            "width": width,
            "rate": rate,
            "steps": steps,
            "seed": seed,
            "code": behavior("spectral", "options"),
        }
        found.append(cells.get(cell, partial(_loss, task, rate, steps, seed)))
    mean = math.inf if None in found else sum(found) / len(found)
    print(f"width {width}, rate {rate:g}: {mean:.4f}", flush=True)
    return mean


def _loss(task: Task, rate: float, steps: int, seed: int) -> float | None:
    record = run_one(
        task, lambda model: Spectral(model.parameters(), lr=rate), seed=seed, steps=steps
    )
    return record.loss if math.isfinite(record.loss) else None  # JSON knows no infinity
