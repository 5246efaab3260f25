"""Train small transformers on real data with every optimizer, and compare the held-out loss.

The study has two parts. Grid: 500 steps with three learning rates, the same for all, and three
seeds for the main optimizers; one seed for the others. Long: 2000 steps with each main optimizer's
two best learning rates of the grid, since the best of short runs need not be the best of long ones;
two seeds. Every run is a file of its own, so an interrupted study goes on where it stopped; --jobs
runs side by side. Time is CPU time on one thread, of the whole step and of the optimizer's part.
Other optimizers need not run again because ours have changed: --keep takes their losses from
figures that were made before, without their times, and the pictures are without them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ..console import UserError, track, write_json
from ..lines import look
from ..plotting import figure, save
from ..problems.tasks import TASKS, Task, train
from ..registry import OPTIMIZERS, build
from ..results import Table, Verdict, verdict_table
from . import commit

MAIN = ("spectral", "spectral_fast", "adamw", "muon", "soap", "klsoap")
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Run:
    """One training run, and what it is called on disk."""

    task: str
    optimizer: str
    lr: float
    seed: int
    steps: int
    interval: int = 2

    @property
    def file(self) -> str:
        """Name of the file that holds the result."""
        return (
            f"{self.task}-{self.optimizer}-lr{self.lr:g}-seed{self.seed}-steps{self.steps}"
            f"-every{self.interval}.json"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to train."""
    tasks = ["fashion-mnist", "cifar-10", "shakespeare"]
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=tasks, help="tasks (default: %(default)s)"
    )
    others = [name for name in OPTIMIZERS if name != "soap_reference"]  # one SOAP is enough
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=OPTIMIZERS,
        default=others,
        help="optimizers (default: %(default)s)",
    )
    parser.add_argument(
        "--lrs", nargs="+", type=float, default=[3e-3, 1e-2, 3e-2], help="learning rates"
    )
    parser.add_argument(
        "--steps", type=int, default=500, help="steps of the grid (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="seeds of the main optimizers (default: %(default)s)"
    )
    parser.add_argument(
        "--long-steps", type=int, default=2000, help="steps of the long runs; 0 for none"
    )
    parser.add_argument(
        "--long-lrs",
        type=int,
        default=2,
        help="how many of the grid's best rates long runs try (default: %(default)s)",
    )
    parser.add_argument(
        "--long-seeds", type=int, default=2, help="seeds of the long runs (default: %(default)s)"
    )
    parser.add_argument(
        "--interval", type=int, default=2, help="steps between two turns (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs side by side (default: %(default)s)"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="figures of before (--json) with losses of those that do not run now",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("runs/bench/training"),
        help="where runs go (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run what is missing, then print the tables and draw the pictures."""
    before = kept_rows(args.keep, args.tasks, args.optimizers) if args.keep else {}
    grid = [
        Run(task, optimizer, lr, seed, args.steps, args.interval)
        for task in args.tasks
        for optimizer in args.optimizers
        for seed in range(args.seeds if optimizer in MAIN else 1)
        for lr in args.lrs
    ]
    results = execute(grid, args.directory, args.jobs, "Grid")
    summary = {"grid": summarize(results)}
    if args.long_steps:
        long = [
            Run(row["task"], row["optimizer"], lr, seed, args.long_steps, args.interval)
            for row in summary["grid"]
            if row["optimizer"] in MAIN
            for lr in best_rates(row, args.long_lrs)
            for seed in range(args.long_seeds)
        ]
        long_results = execute(long, args.directory, args.jobs, "Long")
        summary["long"] = summarize(long_results)
        results = {**results, **long_results}
    for steps in sorted({r.steps for r in results}):
        draw(
            {r: x for r, x in results.items() if r.steps == steps},
            args.directory / f"loss-{steps}.png",
        )
    for part, rows in summary.items():
        summary[part] = sorted(
            rows + before.get(part, []), key=lambda row: (row["task"], row["loss"])
        )
    found = [verdict for part, rows in summary.items() for verdict in verdicts(part, rows)]
    tables = [loss_table(part, rows) for part, rows in summary.items()]
    tables += [verdict_table("Against other optimizers", found)] if found else []
    commits = sorted({x.get("commit", "unknown") for x in results.values()})
    kept = {
        "verdicts": [asdict(v) for v in found],
        "tables": [asdict(t) for t in tables],
        "commits": commits,
    }
    return {**summary, **kept}


def kept_rows(
    path: Path, tasks: Sequence[str], optimizers: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return rows of both parts of figures that --json wrote before, of optimizers that do not run
    now.
    """
    try:
        parts = json.loads(path.read_text())["result"]
        return {
            part: [
                {**row, "loss": float(row["loss"]), "optimizer_ms": None, "step_ms": None}
                for row in parts.get(part, [])
                if row["task"] in tasks and row["optimizer"] not in optimizers
            ]
            for part in ("grid", "long")
        }
    except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} does not hold figures that `eigenstep bench training --json` wrote: {error}"
        ) from error


def execute(runs: list[Run], directory: Path, jobs: int, title: str) -> dict[Run, dict[str, Any]]:
    """Return the result of every run, reading those that are on disk and computing the others."""
    missing = [r for r in runs if not (directory / r.file).exists()]
    if missing and jobs == 1:
        for item in track(missing, title):
            _run(item, directory)
    elif missing:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(_run, item, directory) for item in missing]
            for future in track(as_completed(futures), title, total=len(futures)):
                future.result()
    return {r: _read(directory / r.file) for r in runs}


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not a result of this benchmark ({error}); delete it to compute it anew"
        ) from error


@lru_cache(maxsize=1)
def _task(name: str) -> Task:
    return TASKS[name]()


def _run(item: Run, directory: Path) -> None:
    torch.set_num_threads(1)
    record = train(
        _task(item.task),
        lambda model: build(item.optimizer, model, item.lr, WEIGHT_DECAY, interval=item.interval),
        steps=item.steps,
        seed=item.seed,
    )
    write_json(directory / item.file, {"commit": commit(), **asdict(item), **asdict(record)})


def summarize(results: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each task's optimizers in the order of their best mean held-out loss over the learning
    rates.
    """
    rows = []
    for task, optimizer in dict.fromkeys((r.task, r.optimizer) for r in results):
        mine = {r: x for r, x in results.items() if (r.task, r.optimizer) == (task, optimizer)}
        by_lr = {
            lr: [x for r, x in mine.items() if r.lr == lr] for lr in sorted({r.lr for r in mine})
        }
        means = {lr: _mean(x["test_loss"] for x in found) for lr, found in by_lr.items()}
        lr = min(means, key=means.__getitem__)
        losses = [x["test_loss"] for x in by_lr[lr]]
        rows.append(
            {
                "task": task,
                "optimizer": optimizer,
                "lr": lr,
                "loss": means[lr],
                "spread": statistics.stdev(losses) if len(losses) > 1 else None,
                "error": _mean(x["test_error"] for x in by_lr[lr]),
                "seeds": len(losses),
                "loss_by_lr": {f"{rate:g}": mean for rate, mean in means.items()},
                "optimizer_ms": _per_step(mine, "optimizer_seconds"),
                "step_ms": _per_step(mine, "total_seconds"),
            }
        )
    return sorted(rows, key=lambda row: (row["task"], row["loss"]))


def best_rates(row: dict[str, Any], count: int) -> list[float]:
    """Return the learning rates with the smallest losses in a row of `summarize`, the
    best first.
    """
    losses: dict[str, float] = row["loss_by_lr"]
    return [float(lr) for lr in sorted(losses, key=losses.__getitem__)[:count]]


def _per_step(results: dict[Run, dict[str, Any]], what: str) -> float:
    """Return the median time of a step in milliseconds."""
    return statistics.median(1e3 * x[what] / len(x["losses"]) for x in results.values())


def _mean(values: Iterable[float | None]) -> float:
    """Return the mean; runs that diverged make it infinite."""
    found = [float("inf") if value is None else value for value in values]
    return sum(found) / len(found)


def loss_table(part: str, rows: list[dict[str, Any]]) -> Table:
    """Show one part of the study."""
    columns = (
        "task",
        "optimizer",
        "best lr",
        "loss",
        "± over seeds",
        "error",
        "optimizer ms",
        "step ms",
    )
    cells = [
        (
            row["task"],
            row["optimizer"],
            f"{row['lr']:g}",
            f"{row['loss']:.4f}",
            "" if row["spread"] is None else f"{row['spread']:.4f}",
            f"{row['error']:.1%}",
            *(
                "" if row[name] is None else f"{row[name]:.1f}"
                for name in ("optimizer_ms", "step_ms")
            ),
        )
        for row in rows
    ]
    return Table(
        f"{part.capitalize()}: held-out loss at the best learning rate", columns, cells, timed=True
    )


def verdicts(part: str, rows: list[dict[str, Any]]) -> Iterator[Verdict]:
    """Judge our optimizers by their ratio of held-out losses to others', over all tasks.

    Args:
        part: Which part of the study.
        rows: What `summarize` gave.
    """
    losses = {(row["task"], row["optimizer"]): row for row in rows}
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    present = {row["optimizer"] for row in rows}

    def ratios(ours: str, rivals: Sequence[str]) -> list[float]:
        return [
            losses[t, ours]["loss"] / min(losses[t, rival]["loss"] for rival in rivals)
            for t in tasks
        ]

    good = ("soap", "klsoap")
    if {"spectral", *good} <= present:
        found = ratios("spectral", good)
        wanted = -(-2 * len(tasks) // 3)
        count = float(sum(ratio <= 1 for ratio in found))
        claim = "as good as SOAP and KL-SOAP on two tasks of three"
        yield Verdict(
            claim, "spectral", f"{part}: tasks of {len(tasks)}", count, wanted, at_least=True
        )
        claim = "never more than 1 % behind the better of SOAP and KL-SOAP"
        yield Verdict(claim, "spectral", f"{part}: largest ratio of losses", max(found), 1.01)
    for ours, rival in (("spectral", "muon"), ("spectral", "adamw"), ("spectral_fast", "muon")):
        if {ours, rival} <= present:
            claim = f"at least as good as {rival} on every task"
            yield Verdict(
                claim, ours, f"{part}: largest ratio of losses", max(ratios(ours, [rival])), 1.0
            )
    best = (
        {task: losses[task, "adamw"] for task in tasks} if {"spectral", "adamw"} <= present else {}
    )
    if best and all(
        f"{row['lr']:g}" in losses[t, "spectral"]["loss_by_lr"] for t, row in best.items()
    ):
        claim = "better than AdamW at the learning rate that suits AdamW best"
        at = [
            losses[t, "spectral"]["loss_by_lr"][f"{row['lr']:g}"] / row["loss"]
            for t, row in best.items()
        ]
        yield Verdict(claim, "spectral", f"{part}: largest ratio of losses", max(at), 1.0)


def draw(results: dict[Run, dict[str, Any]], path: Path) -> None:
    """Draw training loss against steps and against time, at each optimizer's best learning rate."""
    rows = summarize(results)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    names = sorted({row["optimizer"] for row in rows})
    drawn, axes = figure(columns=len(tasks), rows=2)
    for row in rows:
        chosen = (row["task"], row["optimizer"], row["lr"])
        runs = [x for r, x in results.items() if (r.task, r.optimizer, r.lr) == chosen]
        length = min(len(x["losses"]) for x in runs)
        curve = torch.tensor(
            [[float(v or "nan") for v in x["losses"][:length]] for x in runs]
        ).mean(0)
        window = max(1, length // 25)
        smooth = curve.unfold(0, window, 1).mean(-1)
        steps = torch.arange(len(smooth)) + window
        column = tasks.index(row["task"])
        style = look(row["optimizer"], names.index(row["optimizer"]))
        for line, scale, label in ((0, 1.0, "step"), (1, row["step_ms"] / 1e3, "CPU seconds")):
            ax = axes[line, column]
            ax.plot(steps * scale, smooth, label=row["optimizer"], **style)
            ax.set(title=row["task"], xlabel=label, ylabel="training loss")
            ax.legend(fontsize=7)
    save(drawn, path)
