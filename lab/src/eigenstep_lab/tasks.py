"""What is trained, and the loop in which every optimizer trains it.

The seed decides initial weights and batches, so that optimizers can be compared seed by seed. The
learning rate warms up over the first twentieth of the steps, then follows a cosine down to 0, which
also takes the noise out of the last loss.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from .data.datasets import load_images, load_text
from .models.hiera import Hiera
from .models.transformers import GPT, ViT

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[nn.Module], Optimizer]
TEST_SEED = 1_000_003
"""Whatever is random in held-out data is the same for all optimizers and seeds."""


@dataclass(frozen=True)
class Problem:
    """A task for one seed.

    Attributes:
        model: What is trained; frozen parameters do not require gradients.
        loss: Draws a batch and returns the training loss.
        held_out: Returns the held-out loss; the model is in evaluation mode then, and gradients
            are off.
    """

    model: nn.Module
    loss: Callable[[Generator], Tensor]
    held_out: Callable[[], float]


@dataclass(frozen=True)
class Task:
    """What is trained, and for how long.

    Attributes:
        summary: One line: network, data, batch.
        build: Builds the problem for a seed; the global random state is seeded before, so torch's
            own initializations are reproducible.
        steps: Length of a full run.
    """

    summary: str
    build: Callable[[int], Problem]
    steps: int


@dataclass(frozen=True)
class Outcome:
    """What one run of a task gave.

    Attributes:
        loss: Held-out loss after the last step, infinite if the run diverged.
        train_loss: Mean training loss of the last tenth of the steps.
        optimizer_ms: CPU time of one step of the optimizer in milliseconds, the mean of the second
            half of the steps.
        seconds: CPU time of the run.
    """

    loss: float
    train_loss: float
    optimizer_ms: float
    seconds: float


@dataclass(frozen=True)
class Classification:
    """A task whose batches are inputs and classes, for those who need more than its losses.

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
    """What one run of a classification gave.

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


def picture_task(name: str, patch: int, width: int = 64, depth: int = 2) -> Classification:
    """Classify pictures of a dataset with a small vision transformer."""
    return _pictures(name, name, partial(ViT, patch=patch, width=width, depth=depth))


def hiera_task(name: str, patch: int, depths: tuple[int, ...]) -> Classification:
    """Classify pictures of a dataset with a small hierarchical vision transformer."""
    return _pictures(name, f"{name}-hiera", partial(Hiera, patch=patch, width=16, depths=depths))


def _pictures(dataset: str, name: str, network: Callable[..., nn.Module]) -> Classification:
    images = load_images(dataset)

    def model(seed: int) -> nn.Module:
        return network(images.shape, len(images.classes), seed=seed)

    def batch(generator: Generator, train: bool) -> Batch:
        return images.batch(32, generator, train=train)

    return Classification(name, model, batch, 256)


def text_task(name: str, width: int = 64, depth: int = 2) -> Classification:
    """Predict the next character of a text with a small GPT."""
    text = load_text(name)
    length = 64

    def model(seed: int) -> nn.Module:
        return GPT(len(text.alphabet), length=length, width=width, depth=depth, seed=seed)

    def batch(generator: Generator, train: bool) -> Batch:
        return text.batch(8, length, generator, train=train)

    return Classification(name, model, batch, 256)


CLASSIFICATIONS: Mapping[str, Callable[[], Classification]] = {
    "fashion-mnist": partial(picture_task, "fashion-mnist", patch=7),
    "cifar-10": partial(picture_task, "cifar-10", patch=8),
    "shakespeare": partial(text_task, "shakespeare"),
    "digits": partial(picture_task, "digits", patch=2),
    "digits-hiera": partial(hiera_task, "digits", patch=2, depths=(1, 1)),
    "fashion-mnist-hiera": partial(hiera_task, "fashion-mnist", patch=7, depths=(1, 2)),
    "cifar-10-hiera": partial(hiera_task, "cifar-10", patch=4, depths=(1, 1, 2)),
}
"""Classifications by name; digits needs no download."""


def learning_rate_factor(step: int, steps: int, warmup: float = 0.05, floor: float = 0.0) -> float:
    """Return the factor of the learning rate: linear warm-up, then a cosine down to `floor`."""
    ramp = max(1, round(warmup * steps))
    if step < ramp:
        return (step + 1) / ramp
    progress = (step - ramp) / max(1, steps - ramp)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def run_one(
    task: Task, make_optimizer: MakeOptimizer, *, seed: int = 0, steps: int | None = None
) -> Outcome:
    """Train a task once.

    Args:
        task: What to train.
        make_optimizer: Builds the optimizer for the model; its learning rates are the highest of
            the schedule.
        seed: Decides initial weights, batches and dropout.
        steps: Number of steps, if not the task's own.
    """
    steps = steps or task.steps
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        problem = task.build(seed)
        start = time.process_time()
        optimizer = make_optimizer(problem.model)
        losses, times = descend(problem, optimizer, Generator().manual_seed(seed), steps)
        seconds = time.process_time() - start
    if len(times) < steps:
        loss = train_loss = math.inf
    else:
        loss = _held_out(problem)
        train_loss = statistics.fmean(losses[-max(1, steps // 10) :])
    later = times[steps // 2 :] or [0.0]
    return Outcome(loss, train_loss, 1e3 * statistics.fmean(later), seconds)


def train(
    task: Classification,
    make_optimizer: MakeOptimizer,
    *,
    steps: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    on_step: Callable[[int, float], None] | None = None,
) -> Record:
    """Train a classification once.

    Args:
        task: What to train.
        make_optimizer: Builds the optimizer for the model; its learning rate is the highest of the
            schedule.
        steps: Number of steps.
        seed: Decides initial weights and batches.
        dtype: Number format of the weights.
        on_step: Called with the step's number and loss.
    """
    model = task.model(seed).to(dtype)

    def loss(generator: Generator) -> Tensor:
        inputs, targets = task.batch(generator, True)
        return loss_of(model, (_cast(inputs, dtype), targets))

    problem = Problem(model, loss, lambda: evaluate(task, model, dtype)[0])
    record = Record()
    optimizer = make_optimizer(model)
    start = time.process_time()
    generator = Generator().manual_seed(seed)
    record.losses, times = descend(problem, optimizer, generator, steps, on_step)
    record.total_seconds = time.process_time() - start
    record.optimizer_seconds = sum(times)
    if len(times) == steps:
        record.test_loss, record.test_error = evaluate(task, model, dtype)
    return record


def descend(
    problem: Problem,
    optimizer: Optimizer,
    generator: Generator,
    steps: int,
    on_step: Callable[[int, float], None] | None = None,
) -> tuple[list[float], list[float]]:
    """Train, and return the training losses and the optimizer's CPU time of each step.

    A run that diverges ends early: there are fewer times than steps.
    """
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses: list[float] = []
    times: list[float] = []
    problem.model.train()
    for step in range(steps):
        # Optimizers may hold views of the model's parameters instead of these.
        problem.model.zero_grad(set_to_none=True)
        loss = problem.loss(generator)
        losses.append(loss.item())
        if on_step is not None:
            on_step(step, losses[-1])
        if not math.isfinite(losses[-1]):
            break
        loss.backward()  # type: ignore[no-untyped-call]
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * learning_rate_factor(step, steps)
        start = time.process_time()
        if not _stepped(problem.model, optimizer):
            break
        times.append(time.process_time() - start)
    return losses, times


def _stepped(model: nn.Module, optimizer: Optimizer) -> bool:
    """Take a step, and tell whether the optimizer could: some raise errors when a run
    has diverged.
    """
    try:
        optimizer.step()
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return False
    except ValueError:
        if all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()):
            raise
        return False
    return True


def _held_out(problem: Problem) -> float:
    problem.model.eval()
    with torch.no_grad():
        loss = problem.held_out()
    return loss if math.isfinite(loss) else math.inf


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2).float(), targets.flatten())


def _cast(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


@torch.no_grad()
def evaluate(
    task: Classification, model: nn.Module, dtype: torch.dtype = torch.float32
) -> tuple[float, float]:
    """Return held-out loss and error rate."""
    generator = Generator().manual_seed(TEST_SEED)
    losses = []
    errors = []
    for _ in range(task.test_batches):
        inputs, targets = task.batch(generator, False)
        logits = model(_cast(inputs, dtype)).float()
        losses.append(F.cross_entropy(logits.flatten(0, -2), targets.flatten()).item())
        errors.append((logits.argmax(-1) != targets).float().mean().item())
    return statistics.fmean(losses), statistics.fmean(errors)
