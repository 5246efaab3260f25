"""Runs of the suite, each a line in a file of results."""

from __future__ import annotations

import math
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ... import store
from ...behavior import behavior_of
from ...console import UserError
from ...rivals import build_in_suite
from ...tasks import Outcome, run_one
from .catalog import task_of

Results = dict["Run", Outcome]


@dataclass(frozen=True)
class Row:
    """An optimizer with options of its own: a row of the tables.

    Attributes:
        optimizer: Name among the peers.
        options: Options that are not searched, as `key=value` with values in Python's notation.
    """

    optimizer: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the row is called in tables."""
        return " ".join((self.optimizer, *self.options))


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        task: Name of the task.
        row: The optimizer and its options.
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        momentum: Options that the search chose, as in `Row.options`.
        seed: Decides initial weights and batches.
        steps: Number of steps.
        code: The behavior of our optimizers (`eigenstep_lab.behavior`); others do not change.
    """

    task: str
    row: Row
    lr: float
    weight_decay: float
    momentum: tuple[str, ...]
    seed: int
    steps: int
    code: str = field(default="")

    def compute(self) -> Outcome:
        """Train."""
        options = {**parsed(self.row.options), **parsed(self.momentum)}
        return run_one(
            task_of(self.task),
            lambda model: build_in_suite(
                self.row.optimizer, model, self.lr, self.weight_decay, options
            ),
            seed=self.seed,
            steps=self.steps,
        )


def parsed(options: tuple[str, ...]) -> dict[str, Any]:
    """Turn `key=value` into keyword arguments."""
    found = {}
    for option in options:
        key, _, value = option.partition("=")
        try:
            found[key] = literal_eval(value)
        except (ValueError, SyntaxError) as error:
            raise UserError(
                "options are written key=value, with a value such as 0.9, 'rms' or (0.9, 0.95): "
                f"{option!r}"
            ) from error
    return found


def written(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Turn keyword arguments into `key=value`."""
    return tuple(f"{key}={value!r}".replace(" ", "") for key, value in sorted(options.items()))


def code_version(row: Row) -> str:
    """Return the behavior of our optimizers, and nothing for others."""
    return behavior_of(row.optimizer, bool(row.options))


def read(path: Path) -> Results:
    """Read all results of a file; one that is not there has none."""
    results: Results = {}
    for number, plain in store.lines(path):
        try:
            values = {f.name: plain[f.name] for f in fields(Run)}
            values["row"] = Row(plain["row"]["optimizer"], tuple(plain["row"]["options"]))
            values["momentum"] = tuple(plain["momentum"])
            numbers = {
                f.name: math.inf if plain[f.name] is None else float(plain[f.name])
                for f in fields(Outcome)
            }
            results[Run(**values)] = Outcome(**numbers)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}, line {number} is not a result of this benchmark ({error!r}): delete it"
            ) from error
    return results


def add(path: Path, run: Run, record: Outcome) -> None:
    """Add one result to a file; infinity, unknown to JSON, becomes null."""
    numbers = {
        key: value if math.isfinite(value) else None for key, value in asdict(record).items()
    }
    store.add(path, {**asdict(run), **numbers})


def result(path: Path, run: Run) -> Outcome:
    """Return the result of a run, computing it only if no process has."""
    known = read(path).get(run)
    if known is None:
        known = run.compute()
        add(path, run, known)
    return known
