"""Measure whether learning rates that suit a narrow GPT suit a wide one.

A small GPT over characters is trained at several widths and learning rates. What counts is the training loss at the end
(mean of the last tenth of the steps) at the rate that is best for the narrowest network, by the best at each width.
`--rule sqrt` divides rates by the root of the width's ratio to the narrowest, `--rule width` by the ratio itself.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from eigenstep import Spectral

from ..console import MOST_THREADS, between
from ..problems.tasks import text_task, train
from ..results import Table, Verdict, verdict_table

RULES = {"same": 0.0, "sqrt": 0.5, "width": 1.0}
"""By which power of the width rates fall."""
LIMIT = 1.05
"""How much larger than the best the loss may be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add widths, rates and lengths."""
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256, 512], help="widths, narrowest first")
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2], help="learning rates"
    )
    parser.add_argument("--steps", type=int, default=400, help="steps of a run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds to average over (default: %(default)s)")
    parser.add_argument("--rule", choices=RULES, default="same", help="how rates follow widths (default: %(default)s)")
    parser.add_argument(
        "--threads", type=between(1, MOST_THREADS), default=1, help="threads for torch (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train all, and say what the narrowest network's rate costs the others."""
    torch.set_num_threads(args.threads)
    losses = {width: {rate: loss(args, width, rate) for rate in args.rates} for width in args.widths}
    narrow = min(losses[args.widths[0]], key=losses[args.widths[0]].__getitem__)
    found = [
        Verdict(
            f"the rate of width {args.widths[0]} is good enough",
            f"width {width}",
            f"loss at {narrow:g}, by the best",
            own[narrow] / min(own.values()),
            LIMIT,
        )
        for width, own in losses.items()
    ]
    rows = [(f"{width}", *(f"{own[rate]:.4f}" for rate in args.rates)) for width, own in losses.items()]
    columns = ("width", *(f"{rate:g}" for rate in args.rates))
    tables = [Table(f"Loss by learning rate, rule: {args.rule}", columns, rows), verdict_table("What holds", found)]
    return {
        "rule": args.rule,
        "best": {str(width): _best(own) for width, own in losses.items()},
        "losses": {str(width): {f"{rate:g}": x for rate, x in own.items()} for width, own in losses.items()},
        "verdicts": [asdict(v) for v in found],
        "tables": [asdict(t) for t in tables],
    }


def _best(losses: Mapping[float, float]) -> float:
    return min(losses, key=losses.__getitem__)


def loss(args: argparse.Namespace, width: int, rate: float) -> float:
    """Return the loss at the end of training, averaged over seeds; infinite if a run fails."""
    own = rate * (args.widths[0] / width) ** RULES[args.rule]
    found = []
    for seed in range(args.seeds):
        record = train(
            text_task("shakespeare", width), lambda m: Spectral(m.parameters(), lr=own), steps=args.steps, seed=seed
        )
        tail = record.losses[-max(1, args.steps // 10) :]
        found.append(sum(tail) / len(tail))
    mean = sum(found) / len(found)
    print(f"width {width}, rate {rate:g}: {mean:.4f}", flush=True)
    return mean if math.isfinite(mean) else math.inf
