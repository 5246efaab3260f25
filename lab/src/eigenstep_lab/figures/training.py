"""What both training figures share: schemes train the same networks and weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call

from ..behavior import behavior_of
from ..console import UserError, progress
from ..data.datasets import find
from ..results import Curve, Panel
from ..rivals import build
from ..store import Cells
from ..tasks import CLASSIFICATIONS, Batch, Classification, Record, train

WEIGHT_DECAY = 0.1
TEST_BATCHES = 64
MOST_EXTENSIONS = 6
"""How often a grid of learning rates is extended at most."""
TUNING_SEED = 1_000_000
"""Added to the seed of the runs that choose learning rates, so that no seed is used for both."""


@dataclass(frozen=True)
class Scheme:
    """A way to train.

    Attributes:
        optimizer: Name among the rivals.
        options: Passed on to its constructor.
        dtype: Number format of the weights.
    """

    optimizer: str
    options: Mapping[str, Any]
    dtype: torch.dtype = torch.float32


class RoundedWeights(nn.Module):
    """A network with weights and gradients in half precision, products in float32.

    Accelerators accumulate half-precision products in float32, too. Many CPUs can do no
    half-precision products, or only very slowly; this way they get the same rounding of all that an
    optimizer sees.
    """

    def __init__(self, model: nn.Module) -> None:
        """Wrap a network; cast it afterwards, as any other module."""
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the network."""
        weights = {name: weight.float() for name, weight in self.model.named_parameters()}
        outputs: Tensor = functional_call(self.model, weights, (inputs.float(),))
        return outputs


def load_task(name: str, device: torch.device) -> Classification:
    """Return a task on a device; digits stand in for a dataset that is not here.

    The network stays of the same kind, and the task's name says what it is.
    """
    dataset, hiera, _ = name.partition("-hiera")
    task = CLASSIFICATIONS[name if find(dataset) else f"digits{hiera}"]()

    def batch(generator: Generator, train: bool) -> Batch:
        inputs, targets = task.batch(generator, train)
        return inputs.to(device), targets.to(device)

    return replace(
        task,
        model=lambda seed: RoundedWeights(task.model(seed)).to(device),
        batch=batch,
        test_batches=TEST_BATCHES,
    )


def train_all(
    task: Classification,
    schemes: Mapping[str, Scheme],
    lrs: Mapping[str, Sequence[float]],
    *,
    steps: int,
    seeds: range,
    tuning_steps: int | None = None,
    trainings: Path | None = None,
) -> tuple[dict[str, float], dict[str, list[Record]]]:
    """Choose each scheme's learning rate with one seed, then train with the others.

    Args:
        task: What to train.
        schemes: The schemes by name.
        lrs: Learning rates that each scheme may choose from, see ``choose_lr``; a single one is
            taken as it is.
        steps: Length of the runs that count.
        seeds: Seeds of these runs.
        tuning_steps: Length of the runs that choose the learning rate; by default the same.
        trainings: File in which runs are kept, so that they need not be done again.

    Returns:
        The chosen learning rates, and one record for each seed.
    """
    chosen: dict[str, float] = {}
    records: dict[str, list[Record]] = {}
    cells = Cells(trainings)
    tuning = tuning_steps or steps
    with progress() as bar:
        for name, scheme in schemes.items():
            total = steps * len(seeds) + (tuning * len(lrs[name]) if len(lrs[name]) > 1 else 0)
            line = bar.add_task(f"{task.name}: {name}", total=total)

            def one(
                lr: float, seed: int, length: int, scheme: Scheme = scheme, line: Any = line
            ) -> Record:
                def compute() -> dict[str, Any]:
                    return asdict(_train(task, scheme, lr, length, seed))

                record = _read(cells.get(_cell(task, scheme, lr, length, seed), compute), trainings)
                bar.advance(line, length)
                return record

            def tuned(lr: float, one: Callable[..., Record] = one) -> float:
                return _finite(one(lr, TUNING_SEED + seeds.start, tuning).test_loss)

            chosen[name] = choose_lr(lrs[name], tuned) if len(lrs[name]) > 1 else lrs[name][0]
            records[name] = [one(chosen[name], seed, steps) for seed in seeds]
    return chosen, records


def _cell(task: Classification, scheme: Scheme, lr: float, steps: int, seed: int) -> dict[str, Any]:
    """Return all that decides a run; rivals do not depend on our code."""
    return {
        "task": [task.name, task.test_batches],
        "optimizer": scheme.optimizer,
        "options": {
            key: getattr(value, "__qualname__", str(value)) for key, value in scheme.options.items()
        },
        "dtype": str(scheme.dtype),
        "lr": lr,
        "steps": steps,
        "seed": seed,
        "torch": torch.__version__,
        "code": behavior_of(scheme.optimizer, bool(scheme.options)),
    }


def _read(plain: Any, path: Path | None) -> Record:
    try:
        record = Record(**plain)
        numbers = [
            *record.losses,
            record.test_loss,
            record.test_error,
            record.optimizer_seconds,
            record.total_seconds,
        ]
        if not (record.losses and all(isinstance(number, float) for number in numbers)):
            raise TypeError("no losses, or not numbers")
    except TypeError as error:
        raise UserError(
            f"{path} holds something that is no training run ({error}): delete it"
        ) from error
    return record


def choose_lr(lrs: Sequence[float], loss: Callable[[float], float]) -> float:
    """Return the best learning rate, from a grid that grows until it is inside.

    Args:
        lrs: the first grid, in rising order; it goes on as it ends, in ratios of its last and its
            first two.
        loss: gives the loss after training with a learning rate.
    """
    tried = {lr: loss(lr) for lr in lrs}
    for _ in range(MOST_EXTENSIONS):
        grid = sorted(tried)
        best = min(grid, key=tried.__getitem__)
        if best == grid[-1]:
            new = grid[-1] ** 2 / grid[-2]
        elif best == grid[0]:
            new = grid[0] ** 2 / grid[1]
        else:
            break
        tried[new] = loss(new)
    return min(tried, key=tried.__getitem__)


def _train(task: Classification, scheme: Scheme, lr: float, steps: int, seed: int) -> Record:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return build(scheme.optimizer, model.named_parameters(), lr, WEIGHT_DECAY, **scheme.options)

    torch.manual_seed(seed)
    return train(task, make, steps=steps, seed=seed, dtype=scheme.dtype)


def _finite(loss: float) -> float:
    """Return the loss; runs that diverged count as infinitely bad."""
    return loss if loss == loss else float("inf")


def mean_loss(records: Sequence[Record]) -> float:
    """Return the mean held-out loss; infinite if a run diverged."""
    return statistics.fmean(_finite(record.test_loss) for record in records)


def spread(records: Sequence[Record]) -> float:
    """Return the standard deviation of the held-out loss over the seeds."""
    return statistics.stdev(_finite(r.test_loss) for r in records) if len(records) > 1 else 0.0


def step_ms(records: Sequence[Record], what: str = "optimizer_seconds") -> float:
    """Return the median time of a step over the seeds, in milliseconds."""
    return statistics.median(
        1e3 * getattr(record, what) / max(1, len(record.losses)) for record in records
    )


def loss_panels(task: Classification, records: Mapping[str, Sequence[Record]]) -> list[Panel]:
    """Return the training loss per step and per second, smoothed over a twentieth of the run."""
    by_step, by_second = {}, {}
    for name, runs in records.items():
        length = max(len(record.losses) for record in runs)
        window = max(1, length // 20)
        # A run that diverged is shorter: its curve goes to infinity where it ended.
        losses = torch.full((len(runs), length), torch.inf, dtype=torch.float64)
        for row, record in zip(losses, runs, strict=True):
            row[: len(record.losses)] = torch.tensor(record.losses, dtype=torch.float64)
        smooth = losses.unfold(1, window, max(1, window // 4)).mean(-1).T
        steps = [window + at * max(1, window // 4) for at in range(len(smooth))]
        by_step[name] = Curve.of(steps, smooth)
        by_second[name] = Curve.of(
            [at * step_ms(runs, "total_seconds") / 1e3 for at in steps], smooth
        )
    return [
        Panel(f"{task.name}, per iteration", "iteration", "training loss", by_step),
        Panel(f"{task.name}, per second", "CPU seconds", "training loss", by_second, timed=True),
    ]
