"""What a task of the suite is, and how one optimizer is run on it.

The seed decides initial weights and batches, so that optimizers can be compared seed by seed. Every
task has the same
schedule: a warm-up over the first twentieth of the steps, then a cosine down to 0, which also takes
the noise out of the last loss. A run that diverges has an infinite loss.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from ...problems.tasks import learning_rate_factor

TEST_SEED = 1_000_003
"""Whatever is random in held-out data is the same for all optimizers and seeds."""


@dataclass(frozen=True)
class Problem:
    """A task for one seed.

    Attributes: model: What is trained; frozen parameters do not require gradients. loss: Draws a
        batch and returns the training loss. held_out: Returns the held-out loss; the model is in
        evaluation mode then, and gradients are off.
    """

    model: nn.Module
    loss: Callable[[Generator], Tensor]
    held_out: Callable[[], float]


@dataclass(frozen=True)
class Task:
    """What is trained, and for how long.

    Attributes: summary: One line: network, data, batch. build: Builds the problem for a seed; the
        global random state is seeded before, so torch's own initializations are reproducible.
        steps: Length of a full run.
    """

    summary: str
    build: Callable[[int], Problem]
    steps: int


@dataclass(frozen=True)
class Record:
    """What one run gave.

    Attributes: loss: Held-out loss after the last step. train_loss: Mean training loss of the last
        tenth of the steps. optimizer_ms: CPU time of one step of the optimizer in milliseconds, the
        mean of the second half of the steps. seconds: CPU time of the run.
    """

    loss: float
    train_loss: float
    optimizer_ms: float
    seconds: float


def run_one(
    task: Task,
    make_optimizer: Callable[[nn.Module], Optimizer],
    *,
    seed: int = 0,
    steps: int | None = None,
) -> Record:
    """Train a task once.

    Args: task: What to train. make_optimizer: Builds the optimizer for the model; its learning
        rates are the highest of the schedule. seed: Decides initial weights, batches and dropout.
        steps: Number of steps, if not the task's own.
    """
    steps = steps or task.steps
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        problem = task.build(seed)
        start = time.process_time()
        losses, times = _train(
            problem, make_optimizer(problem.model), Generator().manual_seed(seed), steps
        )
        seconds = time.process_time() - start
    loss = _held_out(problem) if len(losses) == steps else math.inf
    tail = losses[-max(1, steps // 10) :]
    train_loss = sum(tail) / len(tail) if len(losses) == steps else math.inf
    return Record(loss, train_loss, 1e3 * statistics.fmean(times[steps // 2 :] or [0.0]), seconds)


def _train(
    problem: Problem, optimizer: Optimizer, generator: Generator, steps: int
) -> tuple[list[float], list[float]]:
    """Return the training loss and the optimizer's time of each step; both end early where the loss
    is not finite.
    """
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses: list[float] = []
    times: list[float] = []
    problem.model.train()
    for step in range(steps):
        # Optimizers may hold views of its parameters instead
        problem.model.zero_grad(set_to_none=True)
        loss = problem.loss(generator)
        if not math.isfinite(loss.item()):
            break
        losses.append(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * learning_rate_factor(step, steps)
        start = time.process_time()
        if not _stepped(problem.model, optimizer):
            break
        times.append(time.process_time() - start)
    return losses[: len(times)], times


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
