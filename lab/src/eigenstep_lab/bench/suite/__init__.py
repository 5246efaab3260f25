"""Train sixteen tasks of different families with every optimizer, and compare the held-out loss.

Half of the tasks (first) is there to choose defaults on, the other half (second) to report on.
Every optimizer gets the same number of short runs to find its learning rate, weight decay and
momentum, ours without momentum; then full runs with several seeds, which are the same for all.
Every run is a line in the file of results as soon as it is done: an interrupted study goes on where
it stopped, also with more tasks, optimizers or seeds, and a finished one is only read.

Variants of Spectral are rows of their own: --option "betas=(0.9,0.95)" start=1 --option interval=10
adds two. They are searched like others, or take the settings of plain Spectral with --reuse. When
the behavior of Spectral has changed, its runs are made anew; --code shows those of one before.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...console import UserError
from ...rivals import EVERYWHERE, OURS, SAMPLE, SUITE
from ...study import Cell, Plans
from ...tasks import Outcome
from .catalog import EXTRA, HALVES, TASKS
from .search import TRIALS, Row, Settings, Study, parsed
from .tables import report_of

RESULTS = Path("lab/results/suite/results.jsonl")
PARTIAL = True
ADAMW = Row("adamw")
Unit = tuple[str, Row]


@dataclass(frozen=True)
class Runs:
    """The settings of a row on a task, and what its full runs gave."""

    settings: Settings
    outcomes: list[Outcome]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to train, and where results are."""
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=(*TASKS, *EXTRA),
        metavar="TASK",
        help=f"of {', '.join((*TASKS, *EXTRA))}",
    )
    parser.add_argument("--half", choices=HALVES, help="only the tasks of one half")
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=SUITE,
        metavar="NAME",
        help=f"of {', '.join(SUITE)}; without it {', '.join(EVERYWHERE)} on all tasks, the others "
        "on "
        f"{', '.join(SAMPLE)}",
    )
    parser.add_argument(
        "--option",
        nargs="+",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="add a variant of Spectral",
    )
    parser.add_argument(
        "--reuse", action="store_true", help="variants take the settings of plain Spectral"
    )
    parser.add_argument(
        "--seeds", type=int, default=4, help="full runs of each (default: %(default)s)"
    )
    parser.add_argument(
        "--trials", type=int, default=TRIALS, help="short runs of each (default: %(default)s)"
    )
    parser.add_argument(
        "--code", help="show the runs of our optimizers of this behavior, and make none"
    )


def cells(args: argparse.Namespace, found: Mapping[Any, Any]) -> Plans:
    """List the runs of all rows and, once AdamW's rate is known, those of ours at that rate."""
    if args.seeds < 1:
        raise UserError("--seeds must be at least 1")
    study = Study(args.seeds, args.trials, args.code, lookup=args.code is not None)
    units = units_of(args.tasks or list(HALVES.get(args.half, TASKS)), args.optimizers, args.option)
    plans: dict[Any, Any] = {}
    for task, row in units:
        plans[task, row] = partial(runs, study, task, row, args.reuse)
        if row.optimizer in OURS:
            plans["rate", task] = partial(replace(study, lookup=True).choose, task, ADAMW)
    for task, row in units:
        adamw = found.get(("rate", task))
        own = found.get((task, row))
        if row.optimizer in OURS and adamw is not None and own is not None:
            settings = replace(own.settings, lr=adamw.lr)
            plans["at rate", task, row] = partial(runs_with, study, task, row, settings)
    return plans


def runs(study: Study, task: str, row: Row, reuse: bool) -> Generator[Cell, Any, Runs]:
    """Search the settings of a row on a task, or take those of plain Spectral, and make its full
    runs.
    """
    borrowed = reuse and row.optimizer in OURS and row.options
    settings = yield from study.choose(task, Row(row.optimizer) if borrowed else row)
    return (yield from runs_with(study, task, row, settings))


def runs_with(study: Study, task: str, row: Row, settings: Settings) -> Generator[Cell, Any, Runs]:
    """Make the full runs of a row with given settings."""
    return Runs(settings, (yield from study.losses(task, row, settings)))


def report(args: argparse.Namespace, found: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the lines of all finished units, and the tables."""
    finished = {
        name: value for name, value in found.items() if isinstance(value, Runs) and len(name) == 2
    }
    at_rate = {name[1:]: value for name, value in found.items() if name[0] == "at rate" and value}
    return report_of(finished, at_rate)


def units_of(
    tasks: Sequence[str], optimizers: Sequence[str] | None, variants: Sequence[Sequence[str]]
) -> list[Unit]:
    """List tasks with the rows to run on them, in the order in which they are wanted."""
    for options in variants:
        parsed(tuple(options))
    rows = [
        Row(name)
        for name in optimizers or (*EVERYWHERE, *(n for n in SUITE if n not in EVERYWHERE))
    ]
    if variants and not optimizers:
        rows = [Row("spectral")]
    rows += [Row("spectral", tuple(options)) for options in variants]
    named = optimizers is not None or bool(variants)
    return [
        (task, row)
        for row in rows
        for task in tasks
        if named or row.optimizer in EVERYWHERE or task in SAMPLE
    ]
