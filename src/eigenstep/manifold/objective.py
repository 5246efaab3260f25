"""The function to minimize, at points, with its gradient and a count of how often it was asked for."""

import math
from collections.abc import Callable
from dataclasses import dataclass

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
            output = self.fun(self._matrix(point, leaves), *point.split_others(leaves))
        self.nfev += 1
        if not isinstance(output, Tensor) or output.numel() != 1 or not output.requires_grad or output.is_complex():
            found = describe(output) + (f" of shape {tuple(output.shape)}" if isinstance(output, Tensor) else "")
            wanted = "one real number as a tensor that depends differentiably on S"
            raise TypeError(f"fun must return {wanted}, got {found}")
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

    def _matrix(self, point: Point, leaves: list[Tensor]) -> TangentView | Tensor:
        if self._direct(point):
            return leaves[0]
        view = point.view(leaves)
        return view if self.factored else view.dense()
