"""Two ways to walk downhill: with a search for the step size, or with step sizes fixed beforehand.

A walk is a generator of points, each with its value and gradient, that returns an :class:`Ending` when it cannot go on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.checks import check_number
from .directions import Direction
from .point import Point
from .tangent_view import Local

ARMIJO = 1e-4
"""A step must win at least this part of the decrease that the gradient promises."""


@dataclass(frozen=True)
class Evaluation:
    """The objective at a point; its gradient is computed only if somebody asks for it."""

    point: Point
    value: float
    output: Tensor
    leaves: list[Tensor]


@dataclass(frozen=True)
class Ending:
    """Why a walk is over."""

    message: str
    success: bool


PATIENCE = 30
"""How many steps in a row may bring no better value than rounding could."""

Walk = Generator[tuple[Evaluation, Tensor], None, Ending]


class Objective:
    """A user's function, evaluated at points, with counts of how often."""

    def __init__(self, fun: Callable[..., Tensor], factored: bool) -> None:
        """Wrap a function.

        Args:
            fun: ``fun(S, *x)``.
            factored: whether it takes the factored matrix instead of a dense tensor.
        """
        self.fun, self.factored = fun, factored
        self.nfev = self.ngrad = 0

    def evaluate(self, point: Point) -> Evaluation:
        """Compute the value, in a way that the gradient can follow."""
        leaves = point.leaves(self._direct(point))
        with torch.enable_grad():
            output = self.fun(self._matrix(point, leaves), *point.split_others(leaves))
        self.nfev += 1
        if not isinstance(output, Tensor) or output.numel() != 1 or not output.requires_grad:
            found = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise TypeError(f"fun must return one number as a tensor that depends differentiably on S, got {found}")
        return Evaluation(point, output.item(), output, leaves)

    def attempt(self, point: Point, step: Tensor) -> Evaluation | None:
        """Compute the value after a step; ``None`` if the step, or the function there, leaves the finite numbers."""
        try:
            found = self.evaluate(point.move(step))
        except (FloatingPointError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            return None
        return found if math.isfinite(found.value) else None

    def gradient(self, evaluation: Evaluation) -> Tensor:
        """Compute the gradient as a flat vector."""
        self.ngrad += 1
        gradients = torch.autograd.grad(evaluation.output, evaluation.leaves, materialize_grads=True)
        return evaluation.point.flat(gradients, self._direct(evaluation.point))

    def _direct(self, point: Point) -> bool:
        """Whether to differentiate with respect to the dense matrix itself, which is cheapest where possible."""
        return point.plain and not self.factored

    def _matrix(self, point: Point, leaves: list[Tensor]) -> Local | Tensor:
        if self._direct(point):
            return leaves[0]
        local = point.local(leaves)
        return local if self.factored else local.dense()


def search(objective: Objective, start: Evaluation, rule: Callable[[], Direction], max_step: float) -> Walk:
    """Walk by a rule, with an Armijo search that compares with the largest of the last values.

    Args:
        objective: the function.
        start: where to begin.
        rule: makes a fresh rule, at the start and whenever the old one has led into a dead end.
        max_step: largest change of the logarithm of an eigenvalue in one step.
    """
    current, gradient, direction, fresh = start, objective.gradient(start), rule(), True
    values = deque([start.value], maxlen=direction.window)
    least, stalled = start.value, 0
    while stalled < PATIENCE:
        yield current, gradient
        while True:
            step = direction.propose(current.point, gradient)
            step = _cut(current.point, step, max_step)
            slope = step.dot(gradient).item()
            found = _armijo(objective, current, step, slope, max(values)) if slope < 0 else None
            if found is not None:
                break
            if fresh:
                return _dead_end(current, slope)
            direction, fresh = rule(), True
        new, step = found
        new_gradient = objective.gradient(new)
        direction.learn(new.point, step, new_gradient - gradient)
        current, gradient, fresh = new, new_gradient, False
        values.append(current.value)
        stalled = 0 if current.value < least - _rounding(current) else stalled + 1
        least = min(least, current.value)
    return _dead_end(current, slope)


def _cut(point: Point, step: Tensor, max_step: float) -> Tensor:
    """Shorten a step that changes the logarithm of an eigenvalue by more than ``max_step``."""
    if step.norm() <= max_step:  # a cheap bound, good enough for the last steps of a search
        return step
    return step * min(1.0, max_step / point.length(step))


def _armijo(
    objective: Objective, current: Evaluation, step: Tensor, slope: float, reference: float
) -> tuple[Evaluation, Tensor] | None:
    """Shorten a step until it wins enough; each time to where a parabola through what is known has its minimum."""
    rounding, smallest = _rounding(current), torch.finfo(step.dtype).eps
    part = 1.0
    while part == 1 or (-part * slope > rounding and part > smallest):
        found = objective.attempt(current.point, part * step)
        if found is None:
            part *= 0.1
            continue
        wanted = reference + ARMIJO * part * slope
        if (found.value <= wanted and found.value < reference) or (part == 1 and found.value <= wanted + rounding):
            return found, part * step
        lowest = -slope * part**2 / (2 * (found.value - current.value - slope * part))
        part = min(max(lowest, 0.1 * part), 0.5 * part)
    return None


def _rounding(current: Evaluation) -> float:
    """Return how far the computed value may be off, a rough guess."""
    return 10 * torch.finfo(current.output.dtype).eps * max(abs(current.value), 1e-300)


def _dead_end(current: Evaluation, slope: float) -> Ending:
    if abs(slope) <= 100 * _rounding(current):
        return Ending("the objective cannot decrease further within rounding", success=True)
    return Ending(
        "no step along the gradient decreases the objective: is it differentiable, and finite near this point?",
        success=False,
    )


def follow(
    objective: Objective, start: Evaluation, lr: Callable[[int], float], momentum: float, max_step: float
) -> Walk:
    """Walk down the gradient with fixed step sizes and momentum.

    Args:
        objective: the function, which may differ from call to call.
        start: where to begin.
        lr: step size in each iteration.
        momentum: which part of the previous velocity to keep.
        max_step: largest change of the logarithm of an eigenvalue in one step.
    """
    current, gradient = start, objective.gradient(start)
    velocity = torch.zeros_like(gradient)
    iteration = 0
    while True:
        yield current, gradient
        velocity = momentum * velocity + gradient
        rate = lr(iteration)
        check_number(rate, f"lr({iteration})", 0.0)
        step = _cut(current.point, -rate * velocity, max_step)
        velocity = step / -rate if rate else velocity  # what was cut off is not kept, or it would come back
        found = objective.attempt(current.point, step)
        if found is None:
            return Ending(f"the objective or the matrix is not finite after step {iteration + 1}: lower lr", False)
        current, gradient = found, objective.gradient(found)
        iteration += 1
