"""Metrics and rules that turn gradients into steps. All vectors are flat, in coordinates that are
carried along.

A rule sees the gradient at each point and, after each step, the step and the change of the gradient
along it. A quasi-Newton rule needs a first guess of the Hessian. In tangent coordinates
(``eigenstep.manifold.tangent_view``) the guesses here are diagonal, ``h_ij = (d_i d_j)^a (d_i /
d_j)^c`` made symmetric. They are Hessians of typical problems:

- ``a = 0, c = 0``: log-likelihoods, whose natural metric is the affine-invariant one;
- ``a = 1, c = 0``: least squares in the entries of ``S``, as in metric learning; ``a = -1`` in
  those of its inverse;
- ``a = 0, c = 1``: residuals of products with ``S``, such as ``||S Q - I||``.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .point import Point

# Exponents to choose from
FAMILY = torch.tensor([(a, c) for a in (0.0, -0.5, 0.5, -1.0, 1.0) for c in (0.0, 1.0)])
FORGET = 0.8  # How much of what was learned remains after another step
# While the affine-invariant metric fits this well, no other is looked for: that would take an
# eigenbasis
GOOD = 0.1


class Metric:
    """The member of the family that explains best how gradients changed along the last steps."""

    def __init__(self) -> None:
        """Start with the affine-invariant metric."""
        self.exponents = FAMILY[0]
        self._misfits = torch.zeros(())
        self._rate = 1.0

    def learn(self, point: Point, step: Tensor, change: Tensor) -> None:
        """Compare the members on one step.

        A Hessian ``h`` explains ``change = h step`` up to a constant if the inequality of Cauchy
        and Schwarz, ``(step . change)^2 <= (step . h step)(change . change / h)``, is an equality.
        Its sides' ratio is the misfit.
        """
        curvature = step.dot(change).item()
        lengths = change.dot(change).item()
        misfit = math.log(step.dot(step).item() * lengths / curvature**2)
        if misfit < GOOD and not self.exponents.any():
            self._misfits = FORGET * self._misfits  # none can be better by more than this misfit
            self._rate = curvature / lengths
            return
        family = point.metrics(FAMILY.to(step))
        s, y = point.to_eigenbasis(step), point.to_eigenbasis(change)
        inverses = family.reciprocal() @ y.square()
        self._misfits = (
            FORGET * self._misfits + ((family @ s.square()) * inverses / curvature**2).log()
        )
        best = int(self._misfits.argmin())
        self.exponents = FAMILY[best]
        self._rate = curvature / inverses[best].item()

    def solve(self, point: Point, vector: Tensor) -> Tensor:
        """Return the inverse of the guessed Hessian times a vector of flat coordinates."""
        if not self.exponents.any():
            return self._rate * vector
        (metric,) = point.metrics(self.exponents[None].to(vector))
        return self._rate * point.to_eigenbasis(point.to_eigenbasis(vector) / metric, back=True)


class Direction(Protocol):
    """What the rules have in common.

    Attributes: window: a step must improve on the largest of this many last values; one means on
        the current value.
    """

    window: int

    def propose(self, point: Point, gradient: Tensor) -> Tensor:
        """Return the step to try first."""

    def learn(self, point: Point, step: Tensor, change: Tensor) -> None:
        """Take note of the step that led to the point, and of the change of the
        gradient along it.
        """


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


class LBFGS:
    """Quasi-Newton: a Hessian that fits the last few steps, and is close to a metric that fits many
    (L-BFGS).
    """

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


# Rules by name
METHODS: dict[str, Callable[[], Direction]] = {"lbfgs": LBFGS, "gradient": Gradient}
