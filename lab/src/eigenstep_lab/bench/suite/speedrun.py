"""Count the steps to a fixed held-out loss, as the public speed run of optimizers does, on its
network shrunk.

The target is the mean loss that tuned Muon reaches in 800 steps. Every optimizer is searched as in
the suite, with 400 steps; then it trains with ever shorter schedules until the mean loss over the
seeds misses the target, or, if it is behind, with longer ones until the target is met, and the
number of steps is interpolated. "Sure" is the shortest schedule whose losses are below the target
by a one-sided z-test with p < 0.01, the public rule. Every run is kept, as in `bench suite`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ...console import UserError
from ...results import Table
from ...rivals import EVERYWHERE, SUITE
from .catalog import SPEEDRUN
from .runs import Row, result
from .search import Settings, Study

STRIDE = 80
SHORTEST, LONGEST = 240, 1280
FAR = 1.01
"""Who ends this much above the target at Muon's length is unlikely to need one stride more."""
SURE = 2.326
"""The normal distribution's 99th percentile."""

Losses = Callable[[int], Sequence[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add who runs, and where results are."""
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=SUITE,
        default=EVERYWHERE,
        metavar="NAME",
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--seeds", type=int, default=4, help="runs of each length (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes of one thread each (default: %(default)s)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("lab/results/suite/results.jsonl"),
        help="file of results (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make the runs that are missing, then return the table."""
    if args.seeds < 2 or args.jobs < 1:
        raise UserError("--seeds must be at least 2, for the z-test, and --jobs at least 1")
    study = Study(args.results, args.seeds)
    muon = race(study, "muon", None)
    names = ["muon", *(name for name in args.optimizers if name != "muon")]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        lines = list(pool.map(partial(race, study, target=muon["target"]), names))
    return {"target": muon["target"], "lines": lines, "tables": [asdict(table(muon, lines))]}


def race(study: Study, name: str, target: float | None) -> dict[str, Any]:
    """Search an optimizer's settings and count its steps to the target; without one, its own full
    runs are it.
    """
    torch.set_num_threads(1)
    row, record = Row(name), partial(result, study.path)
    settings = study.choose("speedrun", row, record)

    def losses(steps: int) -> list[float]:
        return [
            record(study.run_of("speedrun", row, settings, seed, steps)).loss
            for seed in range(study.seeds)
        ]

    target = statistics.fmean(losses(SPEEDRUN.steps)) if target is None else target
    return {"optimizer": name, **_plain(settings), **count(losses, target, SPEEDRUN.steps)}


def _plain(settings: Settings) -> dict[str, Any]:
    return {
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        "momentum": " ".join(settings.momentum),
    }


def count(losses: Losses, target: float, start: int) -> dict[str, Any]:
    """Count steps to a mean loss.

    Args:
        losses: Returns the losses of all seeds with a schedule of so many steps.
        target: The loss to reach.
        start: Length of the first schedule.
    """
    seen: dict[int, Sequence[float]] = {}

    def mean(length: int) -> float:
        return statistics.fmean(seen[length])

    def reached(length: int) -> bool:
        seen[length] = losses(length)
        return mean(length) <= target

    if reached(start):
        all(map(reached, range(start - STRIDE, SHORTEST - 1, -STRIDE)))
    else:
        longer = range(start + STRIDE, LONGEST, STRIDE)
        # Who is far behind tries the longest schedule next: if that is too short, all others are.
        if mean(start) <= FAR * target or reached(LONGEST):
            any(map(reached, (*longer, LONGEST)))
    good = [length for length in seen if mean(length) <= target]
    sure = [length for length, found in seen.items() if z_score(found, target) >= SURE]
    steps = float(min(good)) if good else math.inf
    if good and min(good) - STRIDE in seen:
        low = min(good) - STRIDE
        steps = low + STRIDE * (mean(low) - target) / (mean(low) - mean(min(good)))
    return {"target": target, "steps": steps, "sure": min(sure, default=None), "loss": mean(start)}


def z_score(losses: Sequence[float], target: float) -> float:
    """Return by how many standard errors the mean loss is below the target."""
    if not all(map(math.isfinite, losses)):
        return -math.inf
    error = statistics.stdev(losses) / math.sqrt(len(losses))
    return (target - statistics.fmean(losses)) / max(error, 1e-12)


def table(muon: dict[str, Any], lines: Sequence[dict[str, Any]]) -> Table:
    """Show the steps of all, the fewest first."""

    def shown(steps: float, form: str, unit: float = 1.0) -> str:
        return (
            format(steps / unit, form)
            if math.isfinite(steps)
            else f"> {format(LONGEST / unit, form)}"
        )

    columns = (
        "optimizer",
        "lr",
        "decay",
        "momentum",
        f"loss at {SPEEDRUN.steps}",
        "steps",
        "to Muon's",
        "sure at",
    )
    cells = [
        (
            line["optimizer"],
            f"{line['lr']:g}",
            f"{line['weight_decay']:g}",
            line["momentum"],
            f"{line['loss']:.4f}",
            shown(line["steps"], ".0f"),
            shown(line["steps"], ".3f", muon["steps"]),
            str(line["sure"] or ""),
        )
        for line in sorted(lines, key=lambda line: float(line["steps"]))
    ]
    return Table(f"Steps to a held-out loss of {muon['target']:.4f}", columns, cells)
