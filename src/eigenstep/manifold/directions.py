"""Which way to go: rules that turn gradients into steps. All vectors are flat, in coordinates that are carried along.

A rule sees the gradient at each point and, after each step, the step and the change of the gradient along it.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from .metric import Metric
from .point import Point


class Direction(Protocol):
    """What the rules have in common.

    Attributes:
        window: a step must improve on the largest of this many last values; one means on the current value.
    """

    window: int

    def propose(self, point: Point, gradient: Tensor) -> Tensor:
        """Return the step to try first."""

    def learn(self, point: Point, step: Tensor, change: Tensor) -> None:
        """Take note of the step that led to the point, and of the change of the gradient along it."""


class Gradient:
    """Go down the gradient; try to go twice as far, relative to the gradient, as last time."""

    window = 1

    def __init__(self) -> None:
        """Start with the gradient itself."""
        self._rate = 1.0
        self._tried: Tensor | None = None

    def propose(self, point: Point, gradient: Tensor) -> Tensor:
        """Return a multiple of the negative gradient."""
        self._tried = -self._rate * gradient
        return self._tried

    def learn(self, point: Point, step: Tensor, change: Tensor) -> None:
        """Find out which part of the proposal, if there was one, was accepted."""
        if self._tried is not None:
            self._rate *= 2 * (step.norm() / self._tried.norm()).item()


class BarzilaiBorwein:
    """Go down the gradient by the inverse curvature along the previous step, its long and short estimate in turn."""

    window = 10

    def __init__(self) -> None:
        """Start with the gradient itself."""
        self._rate, self._long = 1.0, False

    def propose(self, point: Point, gradient: Tensor) -> Tensor:
        """Return a multiple of the negative gradient."""
        return -self._rate * gradient

    def learn(self, point: Point, step: Tensor, change: Tensor) -> None:
        """Estimate the curvature along the step; where it is not positive, try to go further next time."""
        curvature = step.dot(change).item()
        self._long = not self._long
        if curvature <= 0:
            self._rate *= 2
        elif self._long:
            self._rate = step.dot(step).item() / curvature
        else:
            self._rate = curvature / change.dot(change).item()


class LBFGS:
    """Quasi-Newton: a Hessian that fits the last few steps, and is close to a metric that fits many (L-BFGS)."""

    window = 1

    def __init__(self, memory: int = 10) -> None:
        """Start without any memory."""
        self._pairs: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=memory)
        self._metric = Metric()

    def propose(self, point: Point, gradient: Tensor) -> Tensor:
        """Return minus the inverse Hessian times the gradient (Nocedal's two-loop recursion)."""
        direction, weights = -gradient, []
        for step, change, curvature in reversed(self._pairs):
            weights.append(step.dot(direction) / curvature)
            direction = direction - weights[-1] * change
        direction = self._metric.solve(point, direction)
        for (step, change, curvature), weight in zip(self._pairs, reversed(weights), strict=True):
            direction = direction + (weight - change.dot(direction) / curvature) * step
        return direction

    def learn(self, point: Point, step: Tensor, change: Tensor) -> None:
        """Remember the step, if the curvature along it is safely positive."""
        curvature, size = step.dot(change).item(), change.dot(change).item()
        if curvature > 1e-10 * (size * step.dot(step).item()) ** 0.5:
            self._pairs.append((step, change, curvature))
            self._metric.learn(point, step, change)


METHODS: dict[str, Callable[[], Direction]] = {
    "lbfgs": LBFGS,
    "barzilai-borwein": BarzilaiBorwein,
    "gradient": Gradient,
}  # Rules by name
