"""How an optimizer's learning rate, weight decay and momentum are chosen: the same number of short
runs for all.

Coordinate by coordinate: learning rates on a grid, which grows beyond its edge while the best is
there; then the other weight decay, the other momenta; what is left of the trials goes to learning
rates beside the best one. Trials are half as long as full runs and have a seed of their own, so
that no full run is judged by the seed that chose its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ...rivals import OURS, RIVALS
from ...tasks import Outcome
from .catalog import task_of
from .runs import Results, Row, Run, code_version, read, result, written

TRIAL_SEED = 1000
TRIALS = 8
WEIGHT_DECAYS = (0.01, 0.1)
FACTOR = 10**0.5


@dataclass(frozen=True)
class Settings:
    """What a search chooses."""

    lr: float
    weight_decay: float
    momentum: tuple[str, ...]


def search(
    loss: Callable[[Settings], float],
    lrs: Sequence[float],
    momenta: Sequence[tuple[str, ...]],
    trials: int = TRIALS,
) -> Settings:
    """Return the best settings that exactly `trials` calls of `loss` find (or as many as the first
    grid, if more).

    Args:
        loss: Trains with some settings and returns the held-out loss.
        lrs: The first grid, ascending.
        momenta: Momenta to choose from, the usual one first.
        trials: How often `loss` may be called.
    """
    found: dict[Settings, float] = {}

    def attempt(settings: Settings) -> None:
        if settings not in found:
            found[settings] = loss(settings)

    def best() -> Settings:
        return min(found, key=found.__getitem__)

    for lr in lrs:
        attempt(Settings(lr, WEIGHT_DECAYS[0], momenta[0]))
    others = len(WEIGHT_DECAYS) + len(momenta) - 2
    while len(found) < trials - others:
        rates = sorted(settings.lr for settings in found)
        if best().lr not in (rates[0], rates[-1]):
            break
        lr = best().lr * (FACTOR if best().lr == rates[-1] else 1 / FACTOR)
        attempt(replace(best(), lr=_rounded(lr)))
    for weight_decay in WEIGHT_DECAYS[1:]:
        if len(found) < trials:
            attempt(replace(best(), weight_decay=weight_decay))
    for momentum in momenta[1:]:
        if len(found) < trials:
            attempt(replace(best(), momentum=momentum))
    step = FACTOR
    while len(found) < trials:
        step **= 0.5
        center = best()
        for lr in (center.lr * step, center.lr / step):
            if len(found) < trials:
                attempt(replace(center, lr=_rounded(lr)))
    return best()


def _rounded(lr: float) -> float:
    """Return two digits, so that 3e-3 · √10 is 9.5e-3 in all places."""
    return float(f"{lr:.1e}")


@dataclass(frozen=True)
class Study:
    """What is kept where, and how thorough it is.

    Attributes: path: File of results. seeds: Full runs of each row on each task. trials: Short runs
        of each search. code: Behavior of our optimizers, if not the present one; such runs can
        be read but not made.
    """

    path: Path
    seeds: int = 4
    trials: int = TRIALS
    code: str | None = None

    def run_of(
        self,
        task: str,
        row: Row,
        settings: Settings,
        seed: int | None = None,
        steps: int | None = None,
    ) -> Run:
        """Return a run of a row with some settings: a trial, or the run of a seed, full if no
        length is given.
        """
        code = (self.code if row.optimizer in OURS else None) or code_version(row)
        whole = task_of(task).steps
        steps = steps or (whole if seed is not None else whole // 2)
        seed = TRIAL_SEED if seed is None else seed
        return Run(
            task, row, settings.lr, settings.weight_decay, settings.momentum, seed, steps, code
        )

    def choose(self, task: str, row: Row, record: Callable[[Run], Outcome]) -> Settings:
        """Search the settings of a row on a task, with the trials that `record` makes
        or looks up.
        """
        peer = RIVALS[row.optimizer]
        momenta = [written(options) for options in peer.momenta]
        return search(
            lambda s: record(self.run_of(task, row, s)).loss, peer.lrs, momenta, self.trials
        )

    def make(self, task: str, row: Row, settings: Settings | None = None) -> None:
        """Make the runs of a row on a task that are missing; the search as well, if no settings are
        given.

        Ours also run at the learning rate that suits AdamW best, if AdamW has been searched.
        """
        record = partial(result, self.path)
        settings = settings or self.choose(task, row, record)
        chosen = [settings]
        if row.optimizer in OURS:
            rate = self.known(task, Row("adamw"), read(self.path))
            chosen += [replace(settings, lr=rate.lr)] if rate else []
        for each in chosen:
            for seed in range(self.seeds):
                record(self.run_of(task, row, each, seed))

    def known(self, task: str, row: Row, results: Results) -> Settings | None:
        """Return the settings that a search has chosen, or None if it is not finished."""
        try:
            return self.choose(task, row, results.__getitem__)
        except KeyError:
            return None
