"""Ways downhill: rules that turn gradients into steps, a search along them, and fixed steps.

All vectors are flat, in coordinates that are carried along. A rule sees the gradient at each point
and, after each step, the step and the change of the gradient along it.

A quasi-Newton rule needs a first guess of the Hessian. In tangent coordinates
(``eigenstep.manifold.tangent_view``) the guesses here are diagonal, ``h_ij = (d_i d_j)^a (d_i /
d_j)^c`` made symmetric. They are Hessians of typical problems:

- ``a = 0, c = 0``: log-likelihoods, whose natural metric is the affine-invariant one;
- ``a = 1, c = 0``: least squares in the entries of ``S``, as in metric learning; ``a = -1`` in
  those of its inverse;
- ``a = 0, c = 1``: residuals of products with ``S``, such as ``||S Q - I||``.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from typing import Protocol

import torch
from torch import Tensor

from ..core.checks import check_number
from ..core.result import Ending
from .objective import Evaluation, Prospect, look_ahead
from .point import Point

FAMILY = torch.tensor([(a, c) for a in (0.0, -0.5, 0.5, -1.0, 1.0) for c in (0.0, 1.0)])
"""Exponents ``(a, c)`` to choose from."""
FORGET = 0.8
"""This much of what was learned about metrics remains after another step."""
GOOD = 0.1
"""While the misfit of the affine-invariant metric is below this, no other is looked for: that would
take an eigenbasis.
"""
ARMIJO = 1e-4
"""A step must win at least this part of the decrease that the gradient promises."""
PATIENCE = 30
"""This many steps in a row may bring no better value than rounding could."""
PATIENCE_FLAT = 5
"""This many steps along directions without positive curvature may win no more than ``gtol``."""

Way = Iterator[tuple[Evaluation, Ending | None]]
"""The points on the way downhill; with the last one, why it ends there."""


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
        squares = point.to_eigenbasis(step).square()
        inverses = family.reciprocal() @ point.to_eigenbasis(change).square()
        misfits = ((family @ squares) * inverses / curvature**2).log()
        self._misfits = FORGET * self._misfits + misfits
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

    Attributes:
        window: a step must improve on the largest of this many last values; one means on the
            current value.
    """

    window: int

    def propose(self, point: Point, gradient: Tensor) -> Tensor:
        """Return the step to try first."""

    def learn(self, point: Point, step: Tensor, change: Tensor) -> None:
        """Take note of the step that led to the point, and of the change of the gradient."""


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
    """L-BFGS: a Hessian that fits the last few steps and is close to a metric that fits many."""

    window = 1

    def __init__(self, memory: int = 10) -> None:
        """Start without any memory."""
        self._pairs: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=memory)
        self._metric = Metric()

    def propose(self, point: Point, gradient: Tensor) -> Tensor:
        """Return minus the inverse Hessian times the gradient (Nocedal's two-loop recursion)."""
        direction = -gradient
        weights = []
        for step, change, curvature in reversed(self._pairs):
            weights.append(step.dot(direction) / curvature)
            direction = direction - weights[-1] * change
        direction = self._metric.solve(point, direction)
        for step, change, curvature in self._pairs:
            direction = direction + (weights.pop() - change.dot(direction) / curvature) * step
        return direction

    def learn(self, point: Point, step: Tensor, change: Tensor) -> None:
        """Remember the step, if the curvature along it is safely positive."""
        curvature = step.dot(change).item()
        size = change.dot(change).item()
        if curvature > 1e-10 * (size * step.dot(step).item()) ** 0.5:
            self._pairs.append((step, change, curvature))
            self._metric.learn(point, step, change)


METHODS: dict[str, Callable[[], Direction]] = {"lbfgs": LBFGS, "gradient": Gradient}
"""Rules by name."""


class LineSearch:
    """Goes where a rule says, and compares with the largest of the last values (Armijo).

    Where the gradient is short, or no step of the rule helps, a look at the curvature decides
    whether this is a minimum. If there is more to gain, the descent goes on from there.
    """

    def __init__(
        self, start: Evaluation, rule: Callable[[], Direction], max_step: float, gtol: float
    ) -> None:
        """Begin at a point."""
        self.current = start
        self.rule = rule
        self.max_step = max_step
        self.gtol = gtol
        self.direction = rule()
        if not all(hasattr(self.direction, name) for name in ("window", "propose", "learn")):
            got = type(self.direction).__name__
            raise TypeError(f"method must give a rule with window, propose and learn, got {got}")
        self.values = deque([start.value], maxlen=self.direction.window)
        self.fresh = True
        self.least = start.value
        self.stalled = 0
        self.flat = 0

    def descend(self) -> Way:
        """Yield the points on the way."""
        ending = None
        while ending is None:
            at = self.current
            ahead = None
            norm = at.gradient.norm().item()
            if norm <= self.gtol:
                ahead = self._look(self.gtol)
                if ahead.is_at_most(self.gtol):
                    message = f"the gradient norm {norm:.3g} is at most gtol, {ahead}"
                    ending = Ending("gtol", message, success=True)
            yield at, ending
            if ahead is not None or self.stalled >= PATIENCE or not self._follow_rule():
                ending = self._leave(ahead)
            self.stalled += 1
            if self.current.value < self.least - self.current.rounding:
                self.stalled = 0
            self.least = min(self.least, self.current.value)
        yield at, ending

    def _follow_rule(self) -> bool:
        """Take a step by the rule, or by a fresh one where that leads nowhere."""
        if self._attempt(self.direction.propose(self.current.point, self.current.gradient)):
            return True
        if self.fresh:
            return False
        before = self.direction
        self.direction = self.rule()
        if self._attempt(self.direction.propose(self.current.point, self.current.gradient)):
            return True
        self.direction = before  # what it has learned is of use for a look ahead
        return False

    def _leave(self, ahead: Prospect | None) -> Ending | None:
        """Take the step of a look ahead, or say why the descent ends here."""
        at = self.current
        least_visible = max(self.gtol, 10 * at.rounding)
        ahead = ahead or self._look(least_visible)
        if ahead.is_at_most(least_visible):
            message = f"the objective cannot decrease further within rounding, {ahead}"
            return Ending("rounding", message, success=True)
        moved = self._attempt(ahead.step)
        self.flat += math.isinf(ahead.gain) and at.value - self.current.value <= self.gtol
        if moved and self.flat < PATIENCE_FLAT:
            return None
        norm = at.gradient.norm().item()
        if norm <= self.gtol:
            why = f"at most gtol, but it is not known how far the minimum is: {ahead}"
            return Ending("flat", f"the gradient norm {norm:.3g} is {why}")
        why = "is it differentiable, finite near this point, and exact enough?"
        message = f"no step along the gradient, of norm {norm:.3g}, decreases the objective: {why}"
        return Ending("stuck", message)

    def _attempt(self, step: Tensor) -> bool:
        """Try a step, or a part of it, and go there if it leads downhill."""
        before = self.current
        step = _cut(before.point, step, self.max_step)
        slope = step.dot(before.gradient).item()
        if not slope < 0:
            return False
        accepted = _armijo(before, step, slope, max(self.values))
        if accepted is None:
            return False
        self.current, step = accepted
        change = self.current.gradient - before.gradient
        self.direction.learn(self.current.point, step, change)
        self.values.append(self.current.value)
        self.fresh = False
        return True

    def _look(self, enough: float) -> Prospect:
        """Estimate what is left to gain, with what the rule knows about the Hessian."""
        model = copy(self.direction)  # because rules may take notes
        at = self.current
        return look_ahead(at, lambda vector: -model.propose(at.point, vector), enough)


def _cut(point: Point, step: Tensor, max_step: float) -> Tensor:
    """Shorten a step that changes the logarithm of an eigenvalue by more than ``max_step``."""
    if step.norm() <= max_step:  # a cheap bound, good enough for the last steps of a search
        return step
    return step * (max_step / max(max_step, point.length(step)))


def _armijo(
    at: Evaluation, step: Tensor, slope: float, reference: float
) -> tuple[Evaluation, Tensor] | None:
    """Shorten a step until it wins enough.

    Each time it ends where a parabola through what is known has its minimum.
    """
    smallest = torch.finfo(step.dtype).eps
    part = 1.0
    while part == 1 or (-part * slope > at.rounding and part > smallest):
        there = at.after(part * step)
        if there is None:
            part *= 0.1
            continue
        wanted = reference + ARMIJO * part * slope
        if there.value <= wanted and there.value < reference:
            return there, part * step
        if part == 1 and there.value <= wanted + at.rounding:
            return there, step
        lowest = -slope * part**2 / (2 * (there.value - at.value - slope * part))
        part = min(max(lowest, 0.1 * part), 0.5 * part)
    return None


def fixed_steps(
    start: Evaluation, lr: Callable[[int], float], momentum: float, max_step: float, gtol: float
) -> Way:
    """Go down the gradient with fixed step sizes and momentum."""
    at = start
    velocity = torch.zeros_like(at.gradient)
    iteration = 0
    while not (norm := at.gradient.norm().item()) <= gtol:
        yield at, None
        velocity = momentum * velocity + at.gradient
        beta = lr(iteration)
        check_number(beta, f"lr({iteration})", 0.0)
        rate = 2 * beta  # S - 2 beta S grad S, in coordinates in which S is the identity
        step = _cut(at.point, -rate * velocity, max_step)
        # What was cut off is not kept, or it would come back.
        velocity = step / -rate if rate else velocity
        iteration += 1
        there = at.after(step)
        if there is None:
            message = f"the objective or the matrix is not finite after step {iteration}: lower lr"
            yield at, Ending("nonfinite", message)
            return
        at = there
    message = (
        f"the gradient norm {norm:.3g} is at most gtol; nothing is known of the curvature with a "
        "fixed lr"
    )
    yield at, Ending("gtol", message, success=True)
