"""Measure what it costs in loss to keep less: state in fewer bits, and checkpoints without bases.

Every task of the suite is trained by `Spectral` in each mode, at the learning rate that the suite's
search found, with the same seeds. What counts is the held-out loss of a mode divided by that of
float32, seed by seed: its mean on every task, and over the suite. Two runs that differ in a single
rounding end apart, too: the mode "other rounding", float32 with second moments changed by a
millionth, shows by how much.

A task on which float32 itself differs by more than a tenth from seed to seed cannot tell half a
percent: it has a row, but does not count in the mean. Runs are kept in a file: an interrupted study
goes on where it stopped.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eigenstep import Spectral

from ..behavior import behavior
from ..console import UserError, track
from ..results import Table, Verdict, verdict_table
from ..store import Cells
from .memory import MODES as FORMATS
from .suite.catalog import TASKS
from .suite.task import run_one

RATES: Mapping[str, float] = {
    "vit": 5.6e-3,
    "convnet": 1e-2,
    "gpt_characters": 1e-2,
    "lstm": 3e-2,
    "recommender": 3e-2,
    "pinn": 4e-3,
    "autoencoder": 1.7e-3,
    "lora": 1.3e-2,
    "hiera": 2.3e-3,
    "mixer": 1.7e-2,
    "gpt_tokens": 5.3e-3,
    "mixture": 1.8e-2,
    "bag_of_words": 1e-2,
    "graph": 1e-2,
    "diffusion": 3e-3,
    "photograph": 3e-3,
}
"""Learning rates: those that searches of `bench suite` found, or AdamW's usual ones where there was
none yet.
"""
FLOAT, ROUNDING, FORGETFUL = "float32", "other rounding", "bases anew"
MODES = (FLOAT, ROUNDING, "bf16 bases", "bf16", "int8", FORGETFUL)
CLAIMED = ("int8", FORGETFUL)
"""Modes of which we say that they cost at most so much more:"""
LIMIT = 1.005
RESTLESS = 0.1
"""A task with more than this relative deviation between seeds does not count."""
Losses = Mapping[str, Mapping[str, Sequence[float]]]  # by task and mode, one for each seed


class Forgetful(Spectral):
    """Writes a checkpoint without bases at a step, and goes on from it."""

    forgets_at = -1

    def step(self, closure: Callable[[], Any] | None = None, **more: Any) -> Any:
        """Take a step, maybe after learning is begun anew."""
        if self.param_groups[0]["count"] == self.forgets_at:
            self.load_state_dict(copy.deepcopy(self.state_dict(bases=False)))
        return super().step(closure, **more)


class Nudged(Spectral):
    """Changes what it has learned by a millionth after the first step."""

    def step(self, closure: Callable[[], Any] | None = None, **more: Any) -> Any:
        """Take a step."""
        loss = super().step(closure, **more)
        if self.param_groups[0]["count"] == 1:
            for name, value in (
                (name, value) for state in self.state.values() for name, value in state.items()
            ):
                if name.startswith("second_moment"):
                    value.mul_(1 + 1e-6)
        return loss


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to train, and where runs are kept."""
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=TASKS,
        default=list(TASKS),
        metavar="TASK",
        help="default: all",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES[1:], default=list(CLAIMED), help="beside float32"
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each (default: %(default)s)")
    parser.add_argument(
        "--length",
        type=float,
        default=1.0,
        help="of a run, by that of the task (default: %(default)s)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("runs/bench/modes.jsonl"),
        help="file of runs (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make the runs that are missing, and compare."""
    if args.seeds < 2:
        raise UserError(
            "--seeds must be at least 2: the spread between seeds says what a difference means"
        )
    torch.set_num_threads(1)
    cells, modes = Cells(args.results), (FLOAT, *args.modes)
    units = [
        (seed, task, mode) for seed in range(args.seeds) for task in args.tasks for mode in modes
    ]
    losses: dict[str, dict[str, list[float]]] = {
        task: {mode: [] for mode in modes} for task in args.tasks
    }
    for seed, task, mode in track(units, "Modes"):
        steps = max(1, round(args.length * TASKS[task].steps))
        cell = {
            "task": task,
            "mode": mode,
            "rate": RATES[task],
            "seed": seed,
            "steps": steps,
            "code": behavior("spectral", "options"),
        }
        loss = cells.get(cell, partial(loss_of, task, mode, seed, steps))
        losses[task][mode].append(math.inf if loss is None else loss)
    over = {mode: suite_ratio(losses, mode) for mode in args.modes}
    found = list(verdicts(over))
    shown = [task_table(losses, args.modes), over_table(over), verdict_table("What holds", found)]
    return {
        "losses": losses,
        "suite": {mode: {"ratio": ratio, "error": error} for mode, (ratio, error) in over.items()},
        "verdicts": [asdict(v) for v in found],
        "tables": [asdict(t) for t in shown],
    }


def loss_of(task: str, mode: str, seed: int, steps: int) -> float | None:
    """Train once, and return the held-out loss; nothing if it is infinite, which JSON does not
    know.
    """
    loss = run_one(
        TASKS[task], partial(optimizer_of, mode, RATES[task], steps), seed=seed, steps=steps
    ).loss
    return loss if math.isfinite(loss) else None


def optimizer_of(mode: str, rate: float, steps: int, model: nn.Module) -> Spectral:
    """Build the optimizer of a mode."""
    params = [param for param in model.parameters() if param.requires_grad]
    if mode == ROUNDING:
        return Nudged(params, lr=rate)
    if mode == FORGETFUL:
        optimizer = Forgetful(params, lr=rate)
        optimizer.forgets_at = steps // 2
        return optimizer
    return Spectral(params, lr=rate, **FORMATS.get(mode, {}))


def log_ratios(losses: Losses, task: str, mode: str) -> list[float]:
    """Return the logarithms of a mode's losses divided by those of float32, seed by seed."""
    pairs = zip(losses[task][mode], losses[task][FLOAT], strict=True)
    return [math.log(one / other) if math.isfinite(one) else math.inf for one, other in pairs]


def restless(losses: Losses, task: str) -> bool:
    """Tell whether seeds of a task differ too much for it to count."""
    found = losses[task][FLOAT]
    return not statistics.stdev(found) <= RESTLESS * statistics.fmean(found)


def suite_ratio(losses: Losses, mode: str) -> tuple[float, float]:
    """Return the geometric mean of the ratios over the tasks that count, and its standard error."""
    counted = [log_ratios(losses, task, mode) for task in losses if not restless(losses, task)]
    if not counted:
        return math.nan, math.nan
    mean = statistics.fmean(statistics.fmean(found) for found in counted)
    spread = math.sqrt(sum(statistics.variance(found) / len(found) for found in counted)) / len(
        counted
    )
    return math.exp(mean), spread


def verdicts(over: Mapping[str, tuple[float, float]]) -> Iterator[Verdict]:
    """Compare with what we promise."""
    for mode in CLAIMED:
        if mode in over:
            yield Verdict(
                "costs at most 0.5 % of the loss",
                mode,
                "loss by that of float32",
                over[mode][0],
                LIMIT,
            )


def task_table(losses: Losses, modes: Sequence[str]) -> Table:
    """Show every task: the loss in float32, and by how much each mode's is larger."""
    rows = []
    for task, own in losses.items():
        cells = [_difference(log_ratios(losses, task, mode)) for mode in modes]
        name = f"{task}, does not count" if restless(losses, task) else task
        rows.append((name, f"{statistics.fmean(own[FLOAT]):.4f}", *cells))
    return Table("Held-out loss, and that of other modes against it", ("task", FLOAT, *modes), rows)


def _difference(found: Sequence[float]) -> str:
    error = statistics.stdev(found) / math.sqrt(len(found))
    return f"{math.expm1(statistics.fmean(found)):+.2%} ± {error:.2%}"


def over_table(over: Mapping[str, tuple[float, float]]) -> Table:
    """Show the means over the suite, with standard errors."""
    rows = [(mode, f"{ratio - 1:+.2%} ± {error:.2%}") for mode, (ratio, error) in over.items()]
    return Table("Over the tasks that count", ("mode", "loss against float32"), rows)
