"""The five test functions of the paper's gradient-free experiments, for points of shape ``(...,
d)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Function:
    """A function to minimize; its least value is 0.

    Attributes:
        evaluate: Takes points ``(..., d)`` with ``d >= 2`` and returns values ``(...)``.
        coordinate: Every coordinate of the minimizer has this value.
        summary: What makes it hard.
    """

    evaluate: Callable[[Tensor], Tensor]
    coordinate: float
    summary: str

    def __call__(self, points: Tensor) -> Tensor:
        """Return the values at points of shape ``(..., d)``."""
        if not points.is_floating_point():
            raise TypeError(f"points must be floating-point numbers, got {points.dtype}")
        if points.ndim == 0 or points.shape[-1] < 2:
            raise ValueError(
                f"points must have shape (..., d) with d >= 2, got {tuple(points.shape)}"
            )
        return self.evaluate(points)


def ackley(w: Tensor) -> Tensor:
    """``20 - 20 exp(-0.2 sqrt(mean w^2)) + e - exp(mean cos 2 pi w)``."""
    distance = w.square().mean(-1).sqrt()
    ripple = (2 * math.pi * w).cos().mean(-1)
    # Written as differences from the minimum: values near 0 keep their digits.
    return -20 * torch.expm1(-0.2 * distance) - math.e * torch.expm1(ripple - 1)


def rosenbrock(w: Tensor) -> Tensor:
    """``sum_i 100 (w_{i+1} - w_i^2)^2 + (w_i - 1)^2``."""
    here, following = w[..., :-1], w[..., 1:]
    return (100 * (following - here.square()).square() + (here - 1).square()).sum(-1)


def bohachevsky(w: Tensor) -> Tensor:
    """``sum_i w_i^2 + 2 w_{i+1}^2 - 0.3 cos(3 pi w_i) - 0.4 cos(4 pi w_{i+1}) + 0.7``."""
    here, following = w[..., :-1], w[..., 1:]
    ripple = 0.3 * _one_minus_cos(3 * math.pi * here) + 0.4 * _one_minus_cos(
        4 * math.pi * following
    )
    return (here.square() + 2 * following.square() + ripple).sum(-1)


def schaffer(w: Tensor) -> Tensor:
    """``sum_i (w_i^2 + w_{i+1}^2)^0.25 (sin^2(50 (w_i^2 + w_{i+1}^2)^0.1) + 1)``."""
    squares = w[..., :-1].square() + w[..., 1:].square()
    return (squares**0.25 * ((50 * squares**0.1).sin().square() + 1)).sum(-1)


def griewank(w: Tensor) -> Tensor:
    """``sum_i w_i^2 / 4000 - prod_i cos(w_i / sqrt i) + 1``."""
    index = torch.arange(1, w.shape[-1] + 1, dtype=w.dtype, device=w.device)
    return w.square().sum(-1) / 4000 + (1 - (w / index.sqrt()).cos().prod(-1))


def _one_minus_cos(x: Tensor) -> Tensor:
    """Return ``1 - cos x`` without cancellation for small ``x``."""
    return 2 * (x / 2).sin().square()


FUNCTIONS: Mapping[str, Function] = {
    "Ackley": Function(ackley, 0.0, "many local minima around a funnel"),
    "Rosenbrock": Function(rosenbrock, 1.0, "a flat, curved valley"),
    "Bohachevsky": Function(bohachevsky, 0.0, "ripples on a bowl"),
    "Schaffer": Function(schaffer, 0.0, "ever finer ripples towards the minimum"),
    "Griewank": Function(griewank, 0.0, "many local minima on a wide bowl"),
}
"""The functions by name."""
