"""What the suite's runs say: losses by task, geometric means by half, and our losses at AdamW's
learning rates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...results import Table
from ...rivals import OURS
from .catalog import EXTRA, HALVES, TASKS
from .search import Row

Unit = tuple[str, Row]
Line = dict[str, Any]


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive numbers; with an infinite one it is infinite."""
    return math.exp(statistics.fmean(math.log(max(value, 1e-300)) for value in values))


def report_of(finished: Mapping[Unit, Any], at_rate: Mapping[Unit, Any]) -> dict[str, Any]:
    """Return lines and tables.

    Args:
        finished: Settings and outcomes of rows on tasks.
        at_rate: The same of ours at the learning rate that suits AdamW best.
    """
    lines = summarize(finished, at_rate)
    halves = {half: [line for line in lines if line["half"] == half] for half in (*HALVES, "other")}
    tables = [loss_table(half, inside) for half, inside in halves.items()]
    tables += [summary_table(lines), rate_table(lines)]
    tables += [task_table(half, inside) for half, inside in halves.items()]
    return {"lines": lines, "tables": [asdict(table) for table in tables if table.rows]}


def summarize(finished: Mapping[Unit, Any], at_rate: Mapping[Unit, Any]) -> list[Line]:
    """Return a line for each finished unit: its settings, mean loss over seeds, ratios and times.

    The loss is the geometric mean over the seeds, as relative errors of equations differ by
    factors. "ratio" is to the best rival's loss, where ours are no rivals; "to_adamw" and "to_soap"
    are to theirs.
    """
    lines = []
    for (task, row), runs in finished.items():
        line = _line(task, row, runs)
        lines.append(line)
        if (task, row) in at_rate:
            losses = [outcome.loss for outcome in at_rate[task, row].outcomes]
            line["at_adamw_lr"] = geometric_mean(losses)
            line["adamw_lr"] = at_rate[task, row].settings.lr
    for line in lines:
        others = {other["row"]: other for other in lines if other["task"] == line["task"]}
        rivals = [other["loss"] for other in others.values() if other["optimizer"] not in OURS]
        line["ratio"] = line["loss"] / min(rivals) if rivals else None
        for name in ("adamw", "soap"):
            line[f"to_{name}"] = line["loss"] / others[name]["loss"] if name in others else None
        if "at_adamw_lr" in line and "adamw" in others:
            line["at_adamw_ratio"] = line["at_adamw_lr"] / others["adamw"]["loss"]
    return lines


def _line(task: str, row: Row, runs: Any) -> Line:
    losses = [outcome.loss for outcome in runs.outcomes]
    finite = len(losses) > 1 and all(map(math.isfinite, losses))
    return {
        "task": task,
        "half": next((half for half, tasks in HALVES.items() if task in tasks), "other"),
        "row": row.name,
        "optimizer": row.optimizer,
        "options": row.options,
        "lr": runs.settings.lr,
        "weight_decay": runs.settings.weight_decay,
        "momentum": " ".join(runs.settings.momentum),
        "loss": geometric_mean(losses),
        "spread": statistics.stdev(losses) if finite else math.nan,
        "losses": losses,
        "optimizer_ms": statistics.median(outcome.optimizer_ms for outcome in runs.outcomes),
        "seconds": statistics.median(outcome.seconds for outcome in runs.outcomes),
    }


def loss_table(half: str, lines: Sequence[Line]) -> Table:
    """Show the losses of one half, a row for each optimizer, a star beside the best of
    each task.
    """
    tasks = [task for task in (*TASKS, *EXTRA) if any(line["task"] == task for line in lines)]
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
    order = {task: number for number, task in enumerate((*TASKS, *EXTRA))}
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
        for half in (*HALVES, "other"):
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
    cells = [
        (
            line["task"],
            line["row"],
            f"{line['adamw_lr']:g}",
            f"{line['lr']:g}",
            f"{line['at_adamw_lr']:.5g}",
            _ratio(line["at_adamw_ratio"]),
        )
        for line in lines
        if "at_adamw_ratio" in line
    ]
    return Table("At the learning rate that suits AdamW best", columns, cells)


def _mean(lines: Sequence[Line], key: str) -> float | None:
    values = [line[key] for line in lines if line[key] is not None]
    return geometric_mean(values) if values else None


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
