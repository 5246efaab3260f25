"""The function to minimize, at points, with its gradient; and how much is left to gain.

A small gradient alone proves little. Where the objective is flat, it may go on to fall for a long
way: by ``g^2 / 2h`` along a direction with slope ``g`` and curvature ``h``. A quasi-Newton model
does not know directions in which it has never gone. So the equation ``H x = -g`` is solved by
conjugate gradients, whose products with the Hessian are differences of gradients; ``-g.x / 2`` is
what a step to the minimum would gain if the objective were quadratic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..core.checks import describe
from .point import Point
from .tangent_view import TangentView

PRODUCTS = 10
"""A look ahead takes at most this many products with the Hessian; for most problems one or two."""


@dataclass
class Objective:
    """A user's function, with counts of how often it was evaluated."""

    fun: Callable[..., Tensor]
    factored: bool  # whether it takes the matrix by its factors
    nfev: int = 0
    ngrad: int = 0

    def at(self, point: Point) -> Evaluation:
        """Compute the value, in a way that the gradient can follow."""
        # It is cheapest to differentiate with respect to the dense matrix itself.
        dense = point.plain and not self.factored
        leaves = point.leaves(dense)
        with torch.enable_grad():
            S = leaves[0] if dense else point.view(leaves)
            if isinstance(S, TangentView) and not self.factored:
                S = S.dense()
            output = self.fun(S, *leaves[len(leaves) - len(point.others) :])
        self.nfev += 1
        _check_output(output)
        return Evaluation(self, point, output, leaves, dense)


def _check_output(output: object) -> None:
    if isinstance(output, Tensor):
        if output.numel() == 1 and output.requires_grad and not output.is_complex():
            return
        got = f"{describe(output)} of shape {tuple(output.shape)}"
    else:
        got = describe(output)
    wanted = "one real number as a tensor that depends differentiably on S"
    raise TypeError(f"fun must return {wanted}, got {got}")


@dataclass(frozen=True)
class Evaluation:
    """The objective at a point; its gradient is computed when somebody asks for it."""

    objective: Objective
    point: Point
    output: Tensor
    leaves: list[Tensor]
    dense: bool  # whether the first leaf is the dense matrix

    @cached_property
    def value(self) -> float:
        """The value."""
        return self.output.item()

    @cached_property
    def gradient(self) -> Tensor:
        """The gradient, a flat vector."""
        self.objective.ngrad += 1
        gradients = torch.autograd.grad(self.output, self.leaves, materialize_grads=True)
        return self.point.flat(gradients, self.dense)

    @property
    def rounding(self) -> float:
        """How far the computed value may be off, a rough guess."""
        return 10 * torch.finfo(self.output.dtype).eps * max(abs(self.value), 1e-300)

    def after(self, step: Tensor) -> Evaluation | None:
        """Return what is after a step; ``None`` if step or value leave the finite numbers."""
        try:
            there = self.objective.at(self.point.move(step))
        except (FloatingPointError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            return None
        return there if math.isfinite(there.value) else None


@dataclass(frozen=True)
class Prospect:
    """What is left to gain."""

    gain: float
    """How far the objective is expected to fall; infinite where it is not convex, or flat to
    rounding.
    """
    step: Tensor
    """How to get there; where the gain is infinite, a step of length one downhill."""
    certain: bool
    """Whether all directions that the gradient has a part in were looked at."""

    def is_at_most(self, bound: float) -> bool:
        """Tell whether it is certain that no more than this is left."""
        return self.certain and self.gain <= bound

    def __str__(self) -> str:
        """Say it in words."""
        if math.isinf(self.gain):
            return (
                "the objective is flat here, or falls on along a direction in which the matrix is "
                "nearly singular"
            )
        more = "" if self.certain else " or more"
        return f"and its curvature promises a further decrease by {self.gain:.2g}{more}"


def look_ahead(at: Evaluation, solve: Callable[[Tensor], Tensor], enough: float) -> Prospect:
    """Estimate how far the objective will fall.

    Args:
        at: where.
        solve: approximates the inverse Hessian times a vector.
        enough: a gain that is more than this need not be known more exactly.
    """
    ahead = _conjugate_gradients(at, solve, enough)
    return _at_the_boundary(at, ahead, enough) if ahead.is_at_most(enough) else ahead


def _conjugate_gradients(
    at: Evaluation, solve: Callable[[Tensor], Tensor], enough: float
) -> Prospect:
    short = max(enough / 10, at.gradient.norm().item() / 1000)
    residual = -at.gradient
    step = direction = torch.zeros_like(residual)
    gain = 0.0
    before = 1.0
    for _ in range(PRODUCTS):
        toward = solve(residual)
        product = residual.dot(toward).item()
        direction = toward + product / before * direction
        if not direction.norm() > 0:
            return Prospect(gain, step, certain=True)
        bent = _hessian_times(at, direction)
        if bent is None:
            break
        curvature = direction.dot(bent).item()
        if not curvature > 0:
            return Prospect(math.inf, direction / direction.norm(), certain=False)
        rate = product / curvature
        step = step + rate * direction
        residual = residual - rate * bent
        gain += rate * product / 2
        before = product
        if gain > enough or residual.norm() <= short:
            return Prospect(gain, step, certain=True)
    return Prospect(gain, step, certain=False)


def _hessian_times(at: Evaluation, direction: Tensor) -> Tensor | None:
    """Return the Hessian times a vector, by the difference to the gradient a little further on."""
    size = direction.norm().item() / torch.finfo(direction.dtype).eps ** (1 / 3)
    there = at.after(direction / size)
    return None if there is None else (there.gradient - at.gradient) * size


def _at_the_boundary(at: Evaluation, ahead: Prospect, enough: float) -> Prospect:
    """Look whether a nearly singular matrix should grow where it has shrunk.

    Short gradients hide this. The slope along ``v v^T`` may be steep, ``v^T G v < 0``, and the
    gradient short all the same: a step of length one multiplies what there is of ``S`` along ``v``,
    and that is next to nothing.
    """
    slope, direction = at.point.steepest_growth(at.gradient)
    if -slope <= enough:
        return ahead
    bent = _hessian_times(at, direction)
    if bent is None:
        return replace(ahead, certain=False)
    along = at.gradient.dot(direction).item()
    curvature = direction.dot(bent).item()
    if curvature > 0 and along**2 <= 2 * curvature * enough:
        resolved = at.point.S.condition().max().item() < 1 / torch.finfo(bent.dtype).eps
        return replace(ahead, certain=resolved)
    return Prospect(math.inf, direction, certain=False)
