"""The function to minimize, at points, with its gradient; and how much is left to gain, from a look
at its curvature.

A small gradient alone proves little. Where the objective is flat, it may go on to fall for a long
way: by ``g^2 / 2h`` along a direction with slope ``g`` and curvature ``h``. A quasi-Newton model
does not know directions in which it has never gone. So the equation ``H x = -g`` is solved by
conjugate gradients, whose products with the Hessian are differences of gradients; ``-g.x / 2`` is
what a step to the minimum would gain if the objective were quadratic.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.checks import describe
from .point import Point
from .tangent_view import TangentView


@dataclass(frozen=True)
class Evaluation:
    """The objective at a point; its gradient is computed only if somebody asks for it."""

    point: Point
    value: float
    output: Tensor
    leaves: list[Tensor]

    @property
    def rounding(self) -> float:
        """How far the computed value may be off, a rough guess."""
        return 10 * torch.finfo(self.output.dtype).eps * max(abs(self.value), 1e-300)


class Objective:
    """A user's function, evaluated at points, with counts of how often."""

    def __init__(self, fun: Callable[..., Tensor], factored: bool) -> None:
        """Wrap a function."""
        self.fun, self.factored = fun, factored
        self.nfev = self.ngrad = 0

    def evaluate(self, point: Point) -> Evaluation:
        """Compute the value, in a way that the gradient can follow."""
        leaves = point.leaves(self._direct(point))
        with torch.enable_grad():
            output = self.fun(
                self._matrix(point, leaves), *leaves[len(leaves) - len(point.others) :]
            )
        self.nfev += 1
        if (
            not isinstance(output, Tensor)
            or output.numel() != 1
            or not output.requires_grad
            or output.is_complex()
        ):
            found = describe(output) + (
                f" of shape {tuple(output.shape)}" if isinstance(output, Tensor) else ""
            )
            wanted = "one real number as a tensor that depends differentiably on S"
            raise TypeError(f"fun must return {wanted}, got {found}")
        return Evaluation(point, output.item(), output, leaves)

    def attempt(self, point: Point, step: Tensor) -> Evaluation | None:
        """Compute the value after a step; ``None`` if the step, or the function there, leaves the
        finite numbers.
        """
        try:
            found = self.evaluate(point.move(step))
        except (FloatingPointError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            return None
        return found if math.isfinite(found.value) else None

    def gradient(self, evaluation: Evaluation) -> Tensor:
        """Compute the gradient as a flat vector."""
        self.ngrad += 1
        gradients = torch.autograd.grad(
            evaluation.output, evaluation.leaves, materialize_grads=True
        )
        return evaluation.point.flat(gradients, self._direct(evaluation.point))

    def _direct(self, point: Point) -> bool:
        """Whether to differentiate with respect to the dense matrix itself, which is cheapest where
        possible.
        """
        return point.plain and not self.factored

    def _matrix(self, point: Point, leaves: list[Tensor]) -> TangentView | Tensor:
        if self._direct(point):
            return leaves[0]
        view = point.view(leaves)
        return view if self.factored else view.dense()


# With the Hessian, and so gradients, that a look may take; one or two are enough for most problems
PRODUCTS = 10


@dataclass(frozen=True)
class Prospect:
    """What is left."""

    # how far the objective is expected to fall; infinite where it is not convex, or flat to
    # rounding
    gain: float
    step: Tensor  # how to get there; where the gain is infinite, a step of length one downhill
    certain: bool  # whether all directions that the gradient has a part in were looked at

    def is_at_most(self, bound: float) -> bool:
        """Tell whether it is certain that no more than this is left."""
        return self.certain and self.gain <= bound

    def __str__(self) -> str:
        """Say it in words."""
        if math.isinf(self.gain):
            return (
                "the objective is flat here, or falls on along a direction in which the "
                "matrix is nearly singular"
            )
        more = "" if self.certain else " or more"
        return f"and its curvature promises a further decrease by {self.gain:.2g}{more}"


def look_ahead(
    objective: Objective,
    at: Evaluation,
    gradient: Tensor,
    solve: Callable[[Tensor], Tensor],
    enough: float,
) -> Prospect:
    """Estimate how far the objective will fall."""
    ahead = _conjugate_gradients(objective, at, gradient, solve, enough)
    return (
        _at_the_boundary(objective, at, gradient, ahead, enough)
        if ahead.is_at_most(enough)
        else ahead
    )


def _conjugate_gradients(
    objective: Objective,
    at: Evaluation,
    gradient: Tensor,
    solve: Callable[[Tensor], Tensor],
    enough: float,
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


def _hessian_times(
    objective: Objective, at: Evaluation, gradient: Tensor, direction: Tensor
) -> Tensor | None:
    """Return the Hessian times a vector, by the difference to the gradient a little further on."""
    size = direction.norm().item() / torch.finfo(gradient.dtype).eps ** (1 / 3)
    found = objective.attempt(at.point, direction / size)
    return None if found is None else (objective.gradient(found) - gradient) * size


def _at_the_boundary(
    objective: Objective, at: Evaluation, gradient: Tensor, ahead: Prospect, enough: float
) -> Prospect:
    """Look whether a matrix that is nearly singular should grow where it has shrunk, which short
    gradients hide.

    The slope along ``v v^T`` may be steep, ``v^T G v < 0``, and the gradient short all the same: a
    step of length one multiplies what there is of ``S`` along ``v``, and that is next to nothing.
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
