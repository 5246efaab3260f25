"""Measure whether learning rates that suit a narrow GPT suit a wide one.

The suite's GPT over byte pairs is trained at several widths and learning rates. What counts is the held-out loss at the
rate that is best for the narrowest network, by the best at each width, for three rules: the same rate at all widths, or
one that falls as the root of the width or as the width itself. Runs are kept in a file: an interrupted study goes on
where it stopped, and a finished one is only read.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eigenstep import Spectral

from ..console import MOST_THREADS, between, track
from ..results import Table, Verdict, verdict_table
from ..store import Cells, code_version
from .suite.catalog import TASKS
from .suite.language import gpt_tokens
from .suite.task import run_one

RULES = {"same": 0.0, "root": 0.5, "width": 1.0}
"""By which power of the width rates fall."""
LIMIT = 1.05
"""How much larger than the best the loss may be."""
Losses = Mapping[int, Mapping[float, float]]  # by width and rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add widths, rates and lengths."""
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256, 512], help="widths, narrowest first")
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2], help="learning rates"
    )
    parser.add_argument("--steps", type=int, default=TASKS["gpt_tokens"].steps, help="steps (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds to average over (default: %(default)s)")
    parser.add_argument(
        "--results", type=Path, default=Path("runs/bench/widths.jsonl"), help="file of runs (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=between(1, MOST_THREADS), default=1, help="threads for torch (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train all, and say what the narrowest network's rate costs the others."""
    torch.set_num_threads(args.threads)
    cells = Cells(args.results)
    loss = partial(mean_loss, cells, args.steps, args.seeds)
    pairs = [(width, rate) for width in args.widths for rate in args.rates]
    losses: dict[int, dict[float, float]] = {width: {} for width in args.widths}
    for width, rate in track(pairs, "Widths"):
        losses[width][rate] = loss(width, rate)
    narrow = best_rate(losses[args.widths[0]])
    told = {
        rule: {width: loss(width, narrow * (args.widths[0] / width) ** power) for width in args.widths}
        for rule, power in RULES.items()
    }
    found = verdicts(losses, told)
    shown = [loss_table(losses, args.rates, args.steps), rule_table(told), verdict_table("What holds", found)]
    return {
        "best": {str(width): best_rate(own) for width, own in losses.items()},
        "losses": {str(width): {f"{rate:g}": x for rate, x in own.items()} for width, own in losses.items()},
        "rules": {rule: {str(width): x for width, x in own.items()} for rule, own in told.items()},
        "verdicts": [asdict(v) for v in found],
        "tables": [asdict(t) for t in shown],
    }


def best_rate(losses: Mapping[float, float]) -> float:
    """Return the rate with the least loss."""
    return min(losses, key=losses.__getitem__)


def verdicts(losses: Losses, told: Mapping[str, Mapping[int, float]]) -> list[Verdict]:
    """Compare what each rule gives at each width with the best that was seen there."""
    narrow, *others = losses
    seen = {width: min(*losses[width].values(), *(own[width] for own in told.values())) for width in others}
    claim = f"the best rate of width {narrow} is good enough"
    return [
        Verdict(claim, f"rule: {rule}", f"loss at width {width}, by the best", own[width] / seen[width], LIMIT)
        for rule, own in told.items()
        for width in others
    ]


def loss_table(losses: Losses, rates: Sequence[float], steps: int) -> Table:
    """Show all losses."""
    rows = [(f"{width}", *(f"{own[rate]:.3f}" for rate in rates)) for width, own in losses.items()]
    return Table(f"Held-out loss after {steps} steps, by learning rate", ("width", *(f"{r:g}" for r in rates)), rows)


def rule_table(told: Mapping[str, Mapping[int, float]]) -> Table:
    """Show what the rules give."""
    widths = list(next(iter(told.values())))
    rows = [(rule, *(f"{own[width]:.3f}" for width in widths)) for rule, own in told.items()]
    return Table("Held-out loss by rule", ("rule", *map(str, widths)), rows)


def mean_loss(cells: Cells, steps: int, seeds: int, width: int, rate: float) -> float:
    """Return the held-out loss, averaged over seeds; infinite if a run fails."""
    task = replace(TASKS["gpt_tokens"], build=partial(gpt_tokens, width=width))
    found = []
    for seed in range(seeds):
        cell = {"width": width, "rate": rate, "steps": steps, "seed": seed, "code": code_version()}
        compute = partial(_loss, task, rate, steps, seed)
        found.append(cells.get(cell, compute))
    return math.inf if None in found else sum(found) / len(found)


def _loss(task: Any, rate: float, steps: int, seed: int) -> float | None:
    record = run_one(task, lambda model: Spectral(model.parameters(), lr=rate), seed=seed, steps=steps)
    return record.loss if math.isfinite(record.loss) else None  # JSON knows no infinity
