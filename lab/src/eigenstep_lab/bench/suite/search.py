"""Runs of the suite, and how an optimizer's learning rate, weight decay and momentum are chosen: by
the same number of short runs for all.

Coordinate by coordinate: learning rates on a grid, which grows beyond its edge while the best is
there; then the other weight decay, the other momenta; what is left of the trials goes to learning
rates beside the best one. Trials are half as long as full runs and have a seed of their own, so
that no full run is judged by the seed that chose its settings.
"""

from __future__ import annotations

import math
from ast import literal_eval
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from ...behavior import behavior_of
from ...console import UserError
from ...rivals import OURS, RIVALS, build_in_suite
from ...study import Cell
from ...tasks import Outcome, run_one
from .catalog import task_of

TRIAL_SEED = 1000
TRIALS = 8
WEIGHT_DECAYS = (0.01, 0.1)
FACTOR = 10**0.5


@dataclass(frozen=True)
class Row:
    """An optimizer with options of its own: a row of the tables.

    Attributes:
        optimizer: Name among the rivals.
        options: Options that are not searched, as `key=value` with values in Python's notation.
    """

    optimizer: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the row is called in tables."""
        return " ".join((self.optimizer, *self.options))


@dataclass(frozen=True)
class Settings:
    """What a search chooses; momentum as `key=value`."""

    lr: float
    weight_decay: float
    momentum: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """How thorough a study is.

    Attributes:
        seeds: Full runs of each row on each task.
        trials: Short runs of each search.
        code: Behavior of our optimizers, if not the present one; such runs can be read but not
            made.
        lookup: Whether nothing is computed.
    """

    seeds: int = 4
    trials: int = TRIALS
    code: str | None = None
    lookup: bool = False

    def cell(
        self, task: str, row: Row, settings: Settings, seed: int, steps: int | None = None
    ) -> Cell:
        """Return a run of a row with some settings, full if no length is given."""
        key = {
            "task": task,
            "optimizer": row.optimizer,
            "options": list(row.options),
            **asdict(settings),
            "momentum": list(settings.momentum),
            "seed": seed,
            "steps": steps or task_of(task).steps,
        }
        if row.optimizer in OURS and self.code is not None:
            return Cell(key, None, self.code)
        compute = None if self.lookup else partial(train, key)
        return Cell(key, compute, behavior_of(row.optimizer, bool(row.options)))

    def losses(
        self, task: str, row: Row, settings: Settings, steps: int | None = None
    ) -> Generator[Cell, Any, list[Outcome]]:
        """Return what the runs of all seeds give."""
        found = []
        for seed in range(self.seeds):
            found.append(outcome((yield self.cell(task, row, settings, seed, steps))))
        return found

    def choose(self, task: str, row: Row) -> Generator[Cell, Any, Settings]:
        """Search the settings of a row on a task."""
        rival = RIVALS[row.optimizer]
        searching = Search(rival.lrs, [written(each) for each in rival.momenta], self.trials)
        trials = searching.run()
        steps = task_of(task).steps // 2
        settings = next(trials)
        try:
            while True:
                result = yield self.cell(task, row, settings, TRIAL_SEED, steps)
                settings = trials.send(outcome(result).loss)
        except StopIteration:
            return searching.best


def train(key: Mapping[str, Any]) -> dict[str, float | None]:
    """Make a run; infinity, unknown to JSON, becomes null."""
    torch.set_num_threads(1)
    options = {**parsed(key["options"]), **parsed(key["momentum"])}
    make = partial(_build, key["optimizer"], key["lr"], key["weight_decay"], options)
    found = run_one(task_of(key["task"]), make, seed=key["seed"], steps=key["steps"])
    return {name: x if math.isfinite(x) else None for name, x in asdict(found).items()}


def _build(name: str, lr: float, weight_decay: float, options: dict[str, Any], model: Any) -> Any:
    return build_in_suite(name, model, lr, weight_decay, options)


def outcome(plain: Mapping[str, float | None]) -> Outcome:
    """Return what `train` wrote."""
    return Outcome(**{name: math.inf if x is None else x for name, x in plain.items()})


def parsed(options: Sequence[str]) -> dict[str, Any]:
    """Turn `key=value` into keyword arguments; number formats are named as in torch."""
    arguments = {}
    for option in options:
        key, _, value = option.partition("=")
        try:
            dtype = getattr(torch, value, None) if key.endswith("dtype") else None
            arguments[key] = literal_eval(value) if dtype is None else dtype
        except (ValueError, SyntaxError) as error:
            raise UserError(
                "options are written key=value, with a value such as 0.9, 'rms' or (0.9, 0.95): "
                f"{option!r}"
            ) from error
    return arguments


def written(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Turn keyword arguments into `key=value`."""
    return tuple(f"{key}={value!r}".replace(" ", "") for key, value in sorted(options.items()))


Trials = Generator[Settings, float, None]
"""Yields settings to try, and takes their held-out losses."""


class Search:
    """A search for settings in a given number of trials.

    Attributes:
        losses: Held-out losses of what was tried.
    """

    def __init__(
        self, lrs: Sequence[float], momenta: Sequence[tuple[str, ...]], trials: int = TRIALS
    ) -> None:
        """Plan a search.

        Args:
            lrs: The first grid, ascending.
            momenta: Momenta to choose from, the usual one first.
            trials: How many settings are tried (or as many as the first grid has, if more).
        """
        self.losses: dict[Settings, float] = {}
        self._lrs = lrs
        self._momenta = momenta
        self._trials = trials

    @property
    def best(self) -> Settings:
        """The settings with the least loss so far."""
        return min(self.losses, key=self.losses.__getitem__)

    def run(self) -> Trials:
        """Try the grid, then the other coordinates one by one, then rates beside the best."""
        yield from self._grid()
        for decay in WEIGHT_DECAYS[1:]:
            yield from self._attempt(replace(self.best, weight_decay=decay))
        for momentum in self._momenta[1:]:
            yield from self._attempt(replace(self.best, momentum=momentum))
        step = FACTOR
        while len(self.losses) < self._trials:
            step **= 0.5
            center = self.best
            for lr in (center.lr * step, center.lr / step):
                yield from self._attempt(replace(center, lr=_rounded(lr)))

    def _grid(self) -> Trials:
        """Try a grid of rates, which grows beyond its edge while the best is there."""
        for lr in self._lrs:
            yield from self._attempt(Settings(lr, WEIGHT_DECAYS[0], self._momenta[0]))
        later = len(WEIGHT_DECAYS) + len(self._momenta) - 2
        while len(self.losses) < self._trials - later:
            rates = sorted(settings.lr for settings in self.losses)
            best = self.best
            if best.lr not in (rates[0], rates[-1]):
                return
            lr = best.lr * (FACTOR if best.lr == rates[-1] else 1 / FACTOR)
            yield from self._attempt(replace(best, lr=_rounded(lr)))

    def _attempt(self, settings: Settings) -> Trials:
        """Try settings if they are new and there is a trial left, or the grid is not done."""
        room = len(self.losses) < max(self._trials, len(self._lrs))
        if room and settings not in self.losses:
            self.losses[settings] = yield settings


def _rounded(lr: float) -> float:
    """Return two digits, so that 3e-3 · √10 is 9.5e-3 in all places."""
    return float(f"{lr:.1e}")
