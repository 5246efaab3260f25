"""How much is left to gain: a look at the curvature, before a search says that it has found a minimum.

A small gradient alone proves little. Where the objective is flat, it may go on to fall for a long way: by ``g^2 / 2h``
along a direction with slope ``g`` and curvature ``h``. A quasi-Newton model does not know directions in which it has
never gone. So the equation ``H x = -g`` is solved by conjugate gradients, whose products with the Hessian are
differences of gradients; ``-g.x / 2`` is what a step to the minimum would gain if the objective were quadratic.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .objective import Evaluation, Objective

PRODUCTS = 10
"""Products with the Hessian, and so gradients, that a look may take; one or two are enough for most problems."""


@dataclass(frozen=True)
class Prospect:
    """What is left."""

    gain: float  # how far the objective is expected to fall; infinite where it is not convex, or flat to rounding
    step: Tensor  # how to get there; where the gain is infinite, a step of length one downhill
    certain: bool  # whether all directions that the gradient has a part in were looked at

    def is_at_most(self, bound: float) -> bool:
        """Tell whether it is certain that no more than this is left."""
        return self.certain and self.gain <= bound

    def __str__(self) -> str:
        """Say it in words."""
        if math.isinf(self.gain):
            return "the objective is flat here, or falls on along a direction in which the matrix is nearly singular"
        more = "" if self.certain else " or more"
        return f"and its curvature promises a further decrease by {self.gain:.2g}{more}"


def look_ahead(
    objective: Objective, at: Evaluation, gradient: Tensor, solve: Callable[[Tensor], Tensor], enough: float
) -> Prospect:
    """Estimate how far the objective will fall."""
    ahead = _conjugate_gradients(objective, at, gradient, solve, enough)
    return _at_the_boundary(objective, at, gradient, ahead, enough) if ahead.is_at_most(enough) else ahead


def _conjugate_gradients(
    objective: Objective, at: Evaluation, gradient: Tensor, solve: Callable[[Tensor], Tensor], enough: float
) -> Prospect:
    short = max(enough / 10, gradient.norm().item() / 1000)
    step, gain, residual = torch.zeros_like(gradient), 0.0, -gradient
    direction, before = torch.zeros_like(gradient), 1.0
    for _ in range(PRODUCTS):
        toward = solve(residual)
        product = residual.dot(toward).item()
        direction = toward + product / before * direction
        if not direction.norm() > 0:
            return Prospect(gain, step, certain=True)
        bent = _hessian_times(objective, at, gradient, direction)
        if bent is None:
            return Prospect(gain, step, certain=False)
        curvature = direction.dot(bent).item()
        if not curvature > 0:
            return Prospect(math.inf, direction / direction.norm(), certain=False)
        rate = product / curvature
        step, residual = step + rate * direction, residual - rate * bent
        gain, before = gain + rate * product / 2, product
        if gain > enough or residual.norm() <= short:
            return Prospect(gain, step, certain=True)
    return Prospect(gain, step, certain=False)


def _hessian_times(objective: Objective, at: Evaluation, gradient: Tensor, direction: Tensor) -> Tensor | None:
    """Return the Hessian times a vector, by the difference to the gradient a little further on."""
    size = direction.norm().item() / torch.finfo(gradient.dtype).eps ** (1 / 3)
    found = objective.attempt(at.point, direction / size)
    return None if found is None else (objective.gradient(found) - gradient) * size


def _at_the_boundary(
    objective: Objective, at: Evaluation, gradient: Tensor, ahead: Prospect, enough: float
) -> Prospect:
    """Look whether a matrix that is nearly singular should grow where it has shrunk, which short gradients hide.

    The slope along ``v v^T`` may be steep, ``v^T G v < 0``, and the gradient short all the same: a step of length one
    multiplies what there is of ``S`` along ``v``, and that is next to nothing.
    """
    slope, direction = at.point.steepest_growth(gradient)
    if -slope <= enough:
        return ahead
    bent = _hessian_times(objective, at, gradient, direction)
    if bent is None:
        return replace(ahead, certain=False)
    along, curvature = gradient.dot(direction).item(), direction.dot(bent).item()
    if curvature > 0 and along**2 <= 2 * curvature * enough:
        resolved = at.point.S.condition().max().item() < 1 / torch.finfo(bent.dtype).eps
        return replace(ahead, certain=resolved)
    return Prospect(math.inf, direction, certain=False)
