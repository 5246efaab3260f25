"""Small training tasks on real data that every optimizer meets in the same way.

A task fixes model, data, batch size and schedule; `train` runs it with one optimizer and seed, and
records the loss. The seed decides the initial weights and the order of the data, so optimizers can
be compared seed by seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..data.datasets import load_images, load_text
from ..models.hiera import Hiera
from ..models.transformers import GPT, ViT

Batch = tuple[Tensor, Tensor]
TEST_SEED = 1_000_003
"""Held-out batches are the same for all optimizers and seeds."""


@dataclass(frozen=True)
class Task:
    """What is trained, on what.

    Attributes:
        name: Name on the command line.
        model: Builds the network for a seed.
        batch: Draws a batch, for training or held out.
        test_batches: How many held-out batches the final loss is averaged over.
    """

    name: str
    model: Callable[[int], nn.Module]
    batch: Callable[[Generator, bool], Batch]
    test_batches: int = 16


@dataclass
class Record:
    """What one run gave.

    Attributes:
        losses: Training loss of each step.
        test_loss: Held-out loss after the last step.
        test_error: Held-out fraction of wrong predictions.
        optimizer_seconds: CPU time spent in the optimizer.
        total_seconds: CPU time of all steps.
    """

    losses: list[float] = field(default_factory=list)
    test_loss: float = math.nan
    test_error: float = math.nan
    optimizer_seconds: float = 0.0
    total_seconds: float = 0.0


def picture_task(name: str, patch: int, width: int = 64, depth: int = 2) -> Task:
    """Classify pictures of a dataset with a small vision transformer."""
    return _classification(name, name, partial(ViT, patch=patch, width=width, depth=depth))


def hiera_task(name: str, patch: int, depths: tuple[int, ...]) -> Task:
    """Classify pictures of a dataset with a small hierarchical vision transformer."""
    return _classification(
        name, f"{name}-hiera", partial(Hiera, patch=patch, width=16, depths=depths)
    )


def _classification(dataset: str, name: str, network: Callable[..., nn.Module]) -> Task:
    images = load_images(dataset)

    def model(seed: int) -> nn.Module:
        return network(images.shape, len(images.classes), seed=seed)

    return Task(name, model, lambda generator, train: images.batch(32, generator, train=train), 256)


def text_task(name: str, width: int = 64, depth: int = 2) -> Task:
    """Predict the next character of a text with a small GPT."""
    text, length = load_text(name), 64

    def model(seed: int) -> nn.Module:
        return GPT(len(text.alphabet), length=length, width=width, depth=depth, seed=seed)

    return Task(
        name, model, lambda generator, train: text.batch(8, length, generator, train=train), 256
    )


TASKS: Mapping[str, Callable[[], Task]] = {
    "fashion-mnist": lambda: picture_task("fashion-mnist", patch=7),
    "cifar-10": lambda: picture_task("cifar-10", patch=8),
    "shakespeare": lambda: text_task("shakespeare"),
    "digits": lambda: picture_task("digits", patch=2),
    "digits-hiera": lambda: hiera_task("digits", patch=2, depths=(1, 1)),
    "fashion-mnist-hiera": lambda: hiera_task("fashion-mnist", patch=7, depths=(1, 2)),
    "cifar-10-hiera": lambda: hiera_task("cifar-10", patch=4, depths=(1, 1, 2)),
}
"""The tasks by name; digits needs no download."""


def learning_rate_factor(step: int, steps: int, warmup: float = 0.05, floor: float = 0.0) -> float:
    """Return the factor of the learning rate: linear warm-up, then a cosine down to `floor`."""
    ramp = max(1, round(warmup * steps))
    if step < ramp:
        return (step + 1) / ramp
    progress = (step - ramp) / max(1, steps - ramp)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2).float(), targets.flatten())


def train(
    task: Task,
    make_optimizer: Callable[[nn.Module], Optimizer],
    *,
    steps: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    on_step: Callable[[int, float], None] | None = None,
) -> Record:
    """Train a task's model once.

    Args: task: What to train. make_optimizer: Builds the optimizer for the model; its learning rate
        is the highest of the schedule. steps: Number of steps. seed: Decides initial weights and
        batches. dtype: Number format of the weights. on_step: Called with the step's number and
        loss.
    """
    model = task.model(seed).to(dtype)
    optimizer = make_optimizer(model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    generator, record = Generator().manual_seed(seed), Record()
    for step in range(steps):
        inputs, targets = task.batch(generator, True)
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        start = time.process_time()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, (inputs, targets))
        loss.backward()  # type: ignore[no-untyped-call]
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * learning_rate_factor(step, steps)
        middle = time.process_time()
        optimizer.step()
        end = time.process_time()
        record.optimizer_seconds += end - middle
        record.total_seconds += end - start
        record.losses.append(loss.item())
        if on_step is not None:
            on_step(step, record.losses[-1])
        if not math.isfinite(record.losses[-1]):
            return record
    record.test_loss, record.test_error = evaluate(task, model, dtype)
    return record


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, dtype: torch.dtype = torch.float32
) -> tuple[float, float]:
    """Return held-out loss and error rate."""
    generator = Generator().manual_seed(TEST_SEED)
    losses, errors = [], []
    for _ in range(task.test_batches):
        inputs, targets = task.batch(generator, False)
        logits = model(inputs.to(dtype) if inputs.is_floating_point() else inputs).float()
        losses.append(F.cross_entropy(logits.flatten(0, -2), targets.flatten()).item())
        errors.append((logits.argmax(-1) != targets).float().mean().item())
    return sum(losses) / len(losses), sum(errors) / len(errors)
