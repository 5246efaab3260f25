"""What the suite's runs say: losses by task, geometric means by half, and our losses at AdamW's
learning rates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ...results import Table
from ...rivals import OURS
from .catalog import HALVES, TASKS
from .runs import Results, Row
from .search import Settings, Study

Line = dict[str, Any]


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive numbers; with an infinite one it is infinite."""
    return math.exp(statistics.fmean(math.log(max(value, 1e-300)) for value in values))


def summarize(
    study: Study, units: Iterable[tuple[str, Row]], results: Results, *, reuse: bool = False
) -> list[Line]:
    """Return a line for each finished unit: its settings, mean loss over seeds, ratios and times.

    The loss is the geometric mean over the seeds, as relative errors of equations differ by
    factors. "ratio" is to the best rival's loss, where ours are no rivals; "to_adamw" and "to_soap"
    are to theirs.
    """
    lines = []
    for task, row in units:
        borrowed = reuse and row.optimizer in OURS and row.options
        settings = study.known(task, Row(row.optimizer) if borrowed else row, results)
        if settings is None:
            continue
        runs = [study.run_of(task, row, settings, seed) for seed in range(study.seeds)]
        if all(run in results for run in runs):
            lines.append(_line(study, task, row, settings, results))
    for line in lines:
        others = {other["row"]: other for other in lines if other["task"] == line["task"]}
        rivals = [other["loss"] for other in others.values() if other["optimizer"] not in OURS]
        line["ratio"] = line["loss"] / min(rivals) if rivals else None
        for name in ("adamw", "soap"):
            line[f"to_{name}"] = line["loss"] / others[name]["loss"] if name in others else None
        if "adamw" in others:
            _at_rate_of(others["adamw"], line, study, results)
    return lines


def _line(study: Study, task: str, row: Row, settings: Settings, results: Results) -> Line:
    records = [results[study.run_of(task, row, settings, seed)] for seed in range(study.seeds)]
    losses = [record.loss for record in records]
    spread = (
        statistics.stdev(losses)
        if len(losses) > 1 and all(map(math.isfinite, losses))
        else math.nan
    )
    return {
        "task": task,
        "half": next(half for half, tasks in HALVES.items() if task in tasks),
        "row": row.name,
        "optimizer": row.optimizer,
        "options": row.options,
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        "momentum": " ".join(settings.momentum),
        "loss": geometric_mean(losses),
        "spread": spread,
        "losses": losses,
        "optimizer_ms": statistics.median(record.optimizer_ms for record in records),
        "seconds": statistics.median(record.seconds for record in records),
    }


def _at_rate_of(adamw: Line, line: Line, study: Study, results: Results) -> None:
    """Add to a line of ours the loss at the learning rate that suits AdamW best, over AdamW's, if
    it was run.
    """
    if line["optimizer"] not in OURS:
        return
    settings = Settings(line["lr"], line["weight_decay"], tuple(line["momentum"].split()))
    row, at = Row(line["optimizer"], line["options"]), replace(settings, lr=adamw["lr"])
    runs = [study.run_of(line["task"], row, at, seed) for seed in range(study.seeds)]
    if all(run in results for run in runs):
        loss = geometric_mean(results[run].loss for run in runs)
        line["at_adamw_lr"], line["at_adamw_ratio"] = loss, loss / adamw["loss"]


def loss_table(half: str, lines: Sequence[Line]) -> Table:
    """Show the losses of one half, a row for each optimizer, a star beside the best of
    each task.
    """
    tasks = [task for task in TASKS if any(line["task"] == task for line in lines)]
    losses = {(line["row"], line["task"]): line["loss"] for line in lines}
    best = {task: min(loss for (_, at), loss in losses.items() if at == task) for task in tasks}

    def cell(row: str, task: str) -> str:
        loss = losses.get((row, task))
        return "" if loss is None else f"{loss:.4g} *" if loss == best[task] else f"{loss:.4g}"

    rows = dict.fromkeys(line["row"] for line in lines)
    cells = [(row, *(cell(row, task) for task in tasks)) for row in rows]
    return Table(f"The {half} half: held-out loss (* the best)", ("optimizer", *tasks), cells)


def task_table(half: str, lines: Sequence[Line]) -> Table:
    """Show the lines of one half with their settings, each task's best first."""
    columns = (
        "task",
        "optimizer",
        "lr",
        "decay",
        "momentum",
        "loss",
        "± over seeds",
        "to best rival",
        "ms a step",
    )
    order = {task: number for number, task in enumerate(TASKS)}
    cells = [
        (
            line["task"],
            line["row"],
            f"{line['lr']:g}",
            f"{line['weight_decay']:g}",
            line["momentum"],
            f"{line['loss']:.5g}",
            f"{line['spread']:.2g}",
            _ratio(line["ratio"]),
            f"{line['optimizer_ms']:.1f}",
        )
        for line in sorted(lines, key=lambda line: (order[line["task"]], line["loss"]))
    ]
    return Table(f"The {half} half: settings", columns, cells, timed=True)


def summary_table(lines: Sequence[Line]) -> Table:
    """Show geometric means of ratios over the tasks of each half, for rows that have all of that
    half or a sample.
    """
    columns = (
        "optimizer",
        "half",
        "tasks",
        "to best rival",
        "to SOAP",
        "to AdamW",
        "worst to AdamW",
    )
    cells = []
    for row in dict.fromkeys(line["row"] for line in lines):
        for half in HALVES:
            mine = [line for line in lines if (line["row"], line["half"]) == (row, half)]
            if mine:
                means = [_mean(mine, key) for key in ("ratio", "to_soap", "to_adamw")]
                worst = [line["to_adamw"] for line in mine if line["to_adamw"] is not None]
                found = (*means, max(worst, default=None))
                cells.append((row, half, str(len(mine)), *map(_ratio, found)))
    return Table("Geometric means of ratios of held-out losses", columns, cells)


def rate_table(lines: Sequence[Line]) -> Table:
    """Show our losses at AdamW's best learning rates."""
    columns = ("task", "optimizer", "AdamW's best lr", "own best lr", "loss", "to AdamW's")
    rates = {line["task"]: line["lr"] for line in lines if line["row"] == "adamw"}
    cells = [
        (
            line["task"],
            line["row"],
            f"{rates[line['task']]:g}",
            f"{line['lr']:g}",
            f"{line['at_adamw_lr']:.5g}",
            _ratio(line["at_adamw_ratio"]),
        )
        for line in lines
        if "at_adamw_lr" in line
    ]
    return Table("At the learning rate that suits AdamW best", columns, cells)


def _mean(lines: Sequence[Line], key: str) -> float | None:
    values = [line[key] for line in lines if line[key] is not None]
    return geometric_mean(values) if values else None


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
