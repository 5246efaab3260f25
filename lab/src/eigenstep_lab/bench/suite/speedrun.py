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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ...console import UserError
from ...results import Table
from ...rivals import EVERYWHERE, SUITE
from ...study import Cell, Plans
from . import RESULTS as RESULTS
from .catalog import SPEEDRUN
from .search import Row, Study

STRIDE = 80
SHORTEST, LONGEST = 240, 1280
FAR = 1.01
"""Who ends this much above the target at Muon's length is unlikely to need one stride more."""
SURE = 2.326
"""The normal distribution's 99th percentile."""

Losses = Mapping[int, Sequence[float]]


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


def cells(args: argparse.Namespace, found: Mapping[str, Any]) -> Plans:
    """List Muon's runs, and those of all once its loss is known."""
    if args.seeds < 2:
        raise UserError("--seeds must be at least 2, for the z-test")
    study = Study(args.seeds)
    plans = {"target": partial(target_of, study)}
    if found.get("target") is not None:
        names = dict.fromkeys(("muon", *args.optimizers))
        plans |= {name: partial(race, study, name, found["target"]) for name in names}
    return plans


def report(args: argparse.Namespace, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table."""
    lines = [line for name, line in found.items() if name != "target"]
    target = found["target"]
    return {"target": target, "lines": lines, "tables": [asdict(table(found["muon"], lines))]}


def target_of(study: Study) -> Generator[Cell, Any, float]:
    """Return the mean loss of tuned Muon's full runs."""
    settings = yield from study.choose("speedrun", Row("muon"))
    outcomes = yield from study.losses("speedrun", Row("muon"), settings)
    return statistics.fmean(outcome.loss for outcome in outcomes)


def race(study: Study, name: str, target: float) -> Generator[Cell, Any, dict[str, Any]]:
    """Search an optimizer's settings and count its steps to the target."""
    settings = yield from study.choose("speedrun", Row(name))
    seen: dict[int, Sequence[float]] = {}
    for length in lengths(seen, target, SPEEDRUN.steps):
        outcomes = yield from study.losses("speedrun", Row(name), settings, length)
        seen[length] = [outcome.loss for outcome in outcomes]
    return {
        "optimizer": name,
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        "momentum": " ".join(settings.momentum),
        **count(seen, target, SPEEDRUN.steps),
    }


def lengths(seen: Losses, target: float, start: int) -> Iterator[int]:
    """Give lengths of schedules to try, the losses of which are in `seen` before the next one.

    Args:
        seen: Losses of all seeds by length.
        target: The loss to reach.
        start: Length of the first schedule.
    """
    yield start
    if _mean(seen, start) <= target:
        shorter = range(start - STRIDE, SHORTEST - 1, -STRIDE)
        yield from _until(shorter, seen, lambda loss: loss > target)
        return
    # Who is far behind tries the longest schedule next: if that is too short, all others are.
    if _mean(seen, start) > FAR * target:
        yield LONGEST
        if _mean(seen, LONGEST) > target:
            return
    longer = range(start + STRIDE, LONGEST + 1, STRIDE)
    yield from _until(longer, seen, lambda loss: loss <= target)


def _until(some: Iterable[int], seen: Losses, ends: Callable[[float], bool]) -> Iterator[int]:
    """Give lengths that were not tried until the mean loss of one is the end."""
    for length in some:
        if length not in seen:
            yield length
        if ends(_mean(seen, length)):
            return


def _mean(seen: Losses, length: int) -> float:
    return statistics.fmean(seen[length])


def count(seen: Losses, target: float, start: int) -> dict[str, Any]:
    """Interpolate the number of steps to a mean loss."""
    good = [length for length in seen if _mean(seen, length) <= target]
    sure = [length for length, losses in seen.items() if z_score(losses, target) >= SURE]
    steps = float(min(good)) if good else math.inf
    if good and min(good) - STRIDE in seen:
        low = min(good) - STRIDE
        gained = _mean(seen, low) - _mean(seen, min(good))
        steps = low + STRIDE * (_mean(seen, low) - target) / gained
    return {
        "target": target,
        "steps": steps,
        "sure": min(sure, default=None),
        "loss": _mean(seen, start),
    }


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
