"""Two ways downhill: with a search for the step size, or with step sizes fixed beforehand.

Each is a generator of the points on the way, with value and gradient, that returns an
``eigenstep.core.result.Ending`` when it cannot go on.
"""

import math
from collections import deque
from collections.abc import Callable, Generator
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.checks import check_number
from ..core.result import Ending
from .directions import Direction
from .objective import Evaluation, Objective, Prospect, look_ahead
from .point import Point

ARMIJO = 1e-4  # A step must win at least this part of the decrease that the gradient promises
PATIENCE = 30  # How many steps in a row may bring no better value than rounding could
# How many steps along directions without positive curvature may bring no more than was asked for
PATIENCE_FLAT = 5


class Visit(NamedTuple):
    """A point on the way."""

    evaluation: Evaluation  # the objective there
    gradient: Tensor  # its gradient, a flat vector
    last: bool = False  # whether the descent ends here, because this is a minimum


Descent = Generator[Visit, None, Ending]


class LineSearch:
    """Goes where a rule says, with an Armijo search that compares with the largest of the last
    values.

    Where the gradient is short, or no step of the rule helps, a look at the curvature decides
    whether this is a minimum. If there is more to gain, the descent goes on from there.
    """

    def __init__(
        self,
        objective: Objective,
        start: Evaluation,
        rule: Callable[[], Direction],
        max_step: float,
        gtol: float,
    ) -> None:
        """Begin at a point."""
        self.objective, self.rule, self.max_step, self.gtol = objective, rule, max_step, gtol
        self.current, self.gradient = start, objective.gradient(start)
        self.direction = rule()
        if not all(hasattr(self.direction, name) for name in ("window", "propose", "learn")):
            found = type(self.direction).__name__
            raise TypeError(f"method must give a rule with window, propose and learn, got {found}")
        self.values = deque([start.value], maxlen=self.direction.window)
        self.fresh = True

    def descend(self) -> Descent:
        """Yield the points on the way."""
        least, stalled, flat = self.current.value, 0, 0
        while True:
            norm = self.gradient.norm().item()
            ahead = self._look(self.gtol) if norm <= self.gtol else None
            minimum = ahead is not None and ahead.is_at_most(self.gtol)
            yield Visit(self.current, self.gradient, minimum)
            if ahead is not None and minimum:
                return Ending(
                    "gtol", f"the gradient norm {norm:.3g} is at most gtol, {ahead}", success=True
                )
            if ahead is not None or stalled >= PATIENCE or not self._follow_rule():
                least_visible, before = (
                    max(self.gtol, 10 * self.current.rounding),
                    self.current.value,
                )
                ahead = ahead or self._look(least_visible)
                if ahead.is_at_most(least_visible):
                    message = f"the objective cannot decrease further within rounding, {ahead}"
                    return Ending("rounding", message, success=True)
                moved = self._attempt(ahead.step)
                flat += math.isinf(ahead.gain) and before - self.current.value <= self.gtol
                if not moved or flat >= PATIENCE_FLAT:
                    return _dead_end(norm, self.gtol, ahead)
            stalled = 0 if self.current.value < least - self.current.rounding else stalled + 1
            least = min(least, self.current.value)

    def _follow_rule(self) -> bool:
        """Take a step by the rule, or by a fresh one where that leads nowhere."""
        if self._attempt(self.direction.propose(self.current.point, self.gradient)):
            return True
        if self.fresh:
            return False
        before, self.direction = self.direction, self.rule()
        if self._attempt(self.direction.propose(self.current.point, self.gradient)):
            return True
        self.direction = before  # what it has learned is of use for a look ahead
        return False

    def _attempt(self, step: Tensor) -> bool:
        """Try a step, or a part of it, and go there if it leads downhill."""
        step = _cut(self.current.point, step, self.max_step)
        slope = step.dot(self.gradient).item()
        found = (
            _armijo(self.objective, self.current, step, slope, max(self.values))
            if slope < 0
            else None
        )
        if found is None:
            return False
        before, (self.current, step) = self.gradient, found
        self.gradient = self.objective.gradient(self.current)
        self.direction.learn(self.current.point, step, self.gradient - before)
        self.values.append(self.current.value)
        self.fresh = False
        return True

    def _look(self, enough: float) -> Prospect:
        """Estimate what is left to gain, with what the rule knows about the Hessian."""
        # A copy, because rules may take notes
        model, point = (copy(self.direction), self.current.point)
        return look_ahead(
            self.objective, self.current, self.gradient, lambda v: -model.propose(point, v), enough
        )


def _cut(point: Point, step: Tensor, max_step: float) -> Tensor:
    """Shorten a step that changes the logarithm of an eigenvalue by more than ``max_step``."""
    if step.norm() <= max_step:  # a cheap bound, good enough for the last steps of a search
        return step
    return step * (max_step / max(max_step, point.length(step)))


def _armijo(
    objective: Objective, current: Evaluation, step: Tensor, slope: float, reference: float
) -> tuple[Evaluation, Tensor] | None:
    """Shorten a step until it wins enough; each time to where a parabola through what is known has
    its minimum.
    """
    rounding, smallest = current.rounding, torch.finfo(step.dtype).eps
    part = 1.0
    while part == 1 or (-part * slope > rounding and part > smallest):
        found = objective.attempt(current.point, part * step)
        if found is None:
            part *= 0.1
            continue
        wanted = reference + ARMIJO * part * slope
        if (found.value <= wanted and found.value < reference) or (
            part == 1 and found.value <= wanted + rounding
        ):
            return found, part * step
        lowest = -slope * part**2 / (2 * (found.value - current.value - slope * part))
        part = min(max(lowest, 0.1 * part), 0.5 * part)
    return None


def _dead_end(norm: float, gtol: float, ahead: Prospect) -> Ending:
    if norm <= gtol:
        why = f"at most gtol, but it is not known how far the minimum is: {ahead}"
        return Ending("flat", f"the gradient norm {norm:.3g} is {why}")
    why = "is it differentiable, finite near this point, and exact enough?"
    return Ending(
        "stuck", f"no step along the gradient, of norm {norm:.3g}, decreases the objective: {why}"
    )


def fixed_steps(
    objective: Objective,
    start: Evaluation,
    lr: Callable[[int], float],
    momentum: float,
    max_step: float,
    gtol: float,
) -> Descent:
    """Go down the gradient with fixed step sizes and momentum."""
    current, gradient = start, objective.gradient(start)
    velocity = torch.zeros_like(gradient)
    iteration = 0
    while True:
        norm = gradient.norm().item()
        yield Visit(current, gradient, norm <= gtol)
        if norm <= gtol:
            message = (
                f"the gradient norm {norm:.3g} is at most gtol; nothing is known of the "
                "curvature with a fixed lr"
            )
            return Ending("gtol", message, success=True)
        velocity = momentum * velocity + gradient
        beta = lr(iteration)
        check_number(beta, f"lr({iteration})", 0.0)
        rate = 2 * beta  # S - 2 beta S grad S, in coordinates in which S is the identity
        step = _cut(current.point, -rate * velocity, max_step)
        # What was cut off is not kept, or it would come back
        velocity = step / -rate if rate else velocity
        found = objective.attempt(current.point, step)
        if found is None:
            message = (
                f"the objective or the matrix is not finite after step {iteration + 1}: lower lr"
            )
            return Ending("nonfinite", message)
        current, gradient = found, objective.gradient(found)
        iteration += 1
