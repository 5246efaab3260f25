"""Train sixteen tasks of different families with every optimizer, and compare the held-out loss.

Half of the tasks (first) is there to choose defaults on, the other half (second) to report on.
Every optimizer gets the same number of short runs to find its learning rate, weight decay and
momentum, ours without momentum; then full runs with several seeds, which are the same for all.
Every run is a line in the file of results as soon as it is done: an interrupted study goes on where
it stopped, also with more tasks, optimizers or seeds, and a finished one is only read.

Variants of Spectral are rows of their own: --option "betas=(0.9,0.95)" start=1 --option interval=10
adds two. They are searched like others, or take the settings of plain Spectral with --reuse. When
the code of Spectral has changed, its runs are made anew; --code shows those of a version before.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ...console import UserError, track
from ...rivals import EVERYWHERE, OURS, SAMPLE, SUITE
from .catalog import HALVES, TASKS
from .runs import Row, parsed, read
from .search import TRIALS, Study
from .tables import loss_table, rate_table, summarize, summary_table, task_table

Unit = tuple[str, Row]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to train, and where results are."""
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, metavar="TASK", help=f"of {', '.join(TASKS)}"
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
        "--jobs", type=int, default=1, help="processes of one thread each (default: %(default)s)"
    )
    parser.add_argument(
        "--code", help="show the runs of our optimizers of this version, and make none"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("lab/results/suite/results.jsonl"),
        help="file of results (default: %(default)s)",
    )
    parser.add_argument("--show", action="store_true", help="make no runs, show what is there")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make the runs that are missing, then return the tables."""
    if args.seeds < 1 or args.jobs < 1:
        raise UserError("--seeds and --jobs must be at least 1")
    study = Study(args.results, args.seeds, args.trials, args.code)
    units = units_of(args.tasks or list(HALVES.get(args.half, TASKS)), args.optimizers, args.option)
    if not args.show and args.code is None:
        execute(study, units, args.jobs, reuse=args.reuse)
    lines = summarize(study, units, read(args.results), reuse=args.reuse)
    halves = {half: [line for line in lines if line["half"] == half] for half in HALVES}
    tables = [loss_table(half, each) for half, each in halves.items()] + [
        summary_table(lines),
        rate_table(lines),
    ]
    tables += [task_table(half, each) for half, each in halves.items()]
    return {"lines": lines, "tables": [asdict(table) for table in tables if table.rows]}


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


def execute(study: Study, units: list[Unit], jobs: int, *, reuse: bool) -> None:
    """Make the missing runs of all units, so many side by side; a unit that fails does not stop the
    others.
    """
    failed = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {
            pool.submit(make, study, task, row, reuse): f"{row.name} on {task}"
            for task, row in units
        }
        for future in track(as_completed(futures), "Suite", total=len(futures)):
            error = future.exception()
            if error is not None:
                failed.append(f"{futures[future]}: {type(error).__name__}: {error}")
    if failed:
        raise UserError("these failed, all others are kept:\n" + "\n".join(failed))


def make(study: Study, task: str, row: Row, reuse: bool) -> None:
    """Make the missing runs of one unit, on one thread."""
    torch.set_num_threads(1)
    settings = None
    if reuse and row.optimizer in OURS and row.options:
        settings = study.known(task, Row(row.optimizer), read(study.path))
        if settings is None:
            raise UserError(
                f"--reuse needs a finished search of {row.optimizer} on {task}: run it first"
            )
    study.make(task, row, settings)
