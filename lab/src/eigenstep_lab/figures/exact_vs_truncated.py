"""The exact Cayley map against its truncation, while training a small vision transformer.

The Cayley map needs a matrix inverse; its truncation, (I + N)² (I + N²)(I + N⁴), needs products
only. Both train the same network from the same weights with the same hyperparameters (p = 2,
rotations normalized to a constant norm), as in the paper; nothing but the Cayley map is switched.
Ours is shown with both maps, too, and with its default, a quadratic map mended by a Newton–Schulz
step.

The time per step is CPU time in the optimizer, on one thread. The claim that the exact map is much
slower does not hold on a CPU: a linear solve takes a third of the operations of the products it
replaces, and both maps are a small part of a step. Wider networks do not change that: the second
table times both maps by themselves, and whole steps for one square matrix, for growing sides. The
last table counts what decides on a GPU: how many operations are matrix products, which run at full
speed and in half precision, and how many steps have to wait for the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Generator, Tensor

from eigenstep.core.step import cayley, truncated_cayley

from ..results import Result, Table, Verdict
from ..rivals import build
from .training import Scheme, load_task, loss_panels, mean_loss, step_ms, train_all


@dataclass(frozen=True)
class Settings:
    """Numbers of the experiment.

    Attributes:
        task: What is trained.
        steps: Length of a run.
        seeds: Number of runs of each scheme.
        lr: Learning rate, the same for all.
        sides: Sizes of the matrices for which the maps are timed.
    """

    task: str
    steps: int
    seeds: int
    lr: float = 0.01
    sides: tuple[int, ...] = (64, 128, 256)


QUICK = Settings("fashion-mnist", steps=150, seeds=2)
FULL = Settings("fashion-mnist", steps=500, seeds=3, sides=(64, 128, 256, 512, 1024))

SCHEMES = {
    "paper, exact": Scheme("spectral_paper", {"map": "cayley"}),
    "paper, truncated": Scheme("spectral_paper", {}),
    "ours, exact": Scheme("spectral", {"map": "cayley"}),
    "ours, truncated": Scheme("spectral", {"map": "truncated_cayley"}),
    "ours, quadratic": Scheme("spectral", {"map": "quadratic"}),
}


def run(
    settings: Settings, *, seed: int, device: torch.device, trainings: Path | None = None
) -> Result:
    """Train with both maps, and time them."""
    task = load_task(settings.task, device)
    lrs = dict.fromkeys(SCHEMES, (settings.lr,))
    _, records = train_all(
        task,
        SCHEMES,
        lrs,
        steps=settings.steps,
        seeds=range(seed, seed + settings.seeds),
        trainings=trainings,
    )
    verdicts = []
    for ours in ("paper", "ours"):
        exact, truncated = records[f"{ours}, exact"], records[f"{ours}, truncated"]
        ratio = mean_loss(truncated) / mean_loss(exact)
        quantity = "held-out loss with the worse map, divided by that with the better one"
        claim = "Both maps work equally well in terms of iterations."
        verdicts.append(Verdict(claim, ours, quantity, max(ratio, 1 / ratio), limit=1.05))
        claim = "The exact Cayley map is much slower, because it uses matrix inversion."
        quantity = (
            "optimizer time per step with the exact map, divided by that with the truncated one"
        )
        slower = step_ms(exact) / step_ms(truncated)
        verdicts.append(
            Verdict(claim, ours, quantity, slower, limit=1.5, at_least=True, timed=True)
        )
    rows = [
        (
            name,
            f"{mean_loss(runs):.4f}",
            f"{step_ms(runs):.1f}",
            f"{step_ms(runs, 'total_seconds'):.1f}",
        )
        for name, runs in records.items()
    ]
    columns = ("scheme", "held-out loss", "optimizer ms per step", "whole ms per step")
    training = Table("After training", columns, rows, timed=True)
    tables = [training, _map_times(settings.sides, seed, device), operations(settings.sides)]
    return Result(loss_panels(task, records), verdicts, tables)


def _map_times(sides: tuple[int, ...], seed: int, device: torch.device) -> Table:
    rows = []
    for side in sides:
        noise = torch.randn(side, side, generator=Generator().manual_seed(seed)).to(device)
        generator = 0.25 * (noise - noise.T) / torch.linalg.matrix_norm(noise - noise.T)
        maps = [_milliseconds(partial(map_, generator)) for map_ in (cayley, truncated_cayley)]
        steps = [_milliseconds(_stepper(noise, map_)) for map_ in ("cayley", None)]
        cells = [f"{number:.2f}" for a, b in (maps, steps) for number in (a, b, a / b)]
        rows.append((str(side), *cells))
    columns = ["side"]
    for what in ("map", "whole step"):
        columns += [f"{what}, exact, ms", f"{what}, truncated, ms", f"{what}, exact / truncated"]
    return Table(
        "Times by the side of a matrix, float32, least of seven", columns, rows, timed=True
    )


def _stepper(gradient: Tensor, map_: str | None) -> Callable[[], Tensor]:
    """Return a step of the paper's optimizer for one matrix, which turns its bases every time."""
    weights = torch.nn.Parameter(torch.zeros_like(gradient))
    optimizer = build("spectral_paper", [("weights", weights)], 1e-3, interval=1, map=map_)

    def step() -> Tensor:
        weights.grad = gradient
        optimizer.step()
        return weights

    return step


def operations(sides: tuple[int, ...]) -> Table:
    """Count what the maps consist of, for one matrix of each size.

    An LU decomposition takes 2/3 n³ operations, and both triangular solves for n columns 2 n³; each
    of their n columns has to wait for the one before. The truncated map is four products of 2 n³,
    which wait for each other, but within which nothing waits.
    """
    rows = [
        (
            str(n),
            f"{8 / 3 * n**3 / 1e6:.3g}",
            f"{8 * n**3 / 1e6:.3g}",
            "0 %",
            "100 %",
            str(3 * n),
            "4",
        )
        for n in sides
    ]
    columns = ["side"]
    for what in (
        "million operations",
        "of these in products, which half precision speeds up",
        "steps in sequence",
    ):
        columns += [f"{what}, {name}" for name in ("exact", "truncated")]
    return Table("What decides on a GPU", columns, rows)


def _milliseconds(function: Callable[[], Tensor]) -> float:
    """Return the least of seven times of a call; other programs only lengthen it."""
    clock = time.process_time if function().device.type == "cpu" else time.perf_counter
    times = []
    for _ in range(7):
        start = clock()
        function()[0, 0].item()
        times.append(1e3 * (clock() - start))
    return min(times)
