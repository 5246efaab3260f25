"""What a step costs: products of matrices, and memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .batches import EARLY, mends_at
from .layout import Layout, Plan
from .options import Options, interval_at

PRODUCTS_OF_A_MAP = {"quadratic": 1.0, "truncated_cayley": 4.0, "cayley": 4 / 3}
"""Matrix products that a map takes, by name; at least one of a user's own."""


def matmul_flops(plan: Plan, options: Options, count: int = 0) -> float:
    """Return the matrix-product operations of one step, averaged over the interval.

    ``count`` says at which step, if the interval follows a schedule.
    """
    interval = interval_at(options.interval, count)
    return plan.units * sum(_layout_flops(layout, options, interval) for layout in plan.layouts)


def _layout_flops(layout: Layout, options: Options, interval: int) -> float:
    total = 0.0
    if len(layout.sizes) > 1:  # diag(W) of each side, at every step
        total = 2.0 * layout.entries * len(layout.sizes)
    if not layout.has_basis:
        return total
    for axis, n in enumerate(layout.sizes):
        rotation = 2 * layout.entries * n  # the gradient, or anything of its size, times a basis
        blocks = layout.blocks if axis == 0 else 1
        cube = 2 * blocks * n**3
        # The gradient turns at every step, and the direction turns back. When bases turn: W and
        # the momentum; then the map, B Q, and mending B.
        large = 1 + (options.betas[0] > 0)
        small = _products_of_map(options) + 1 + mends_at(options, EARLY, 1)
        small += mends_at(options, EARLY, 2)
        total += 2 * rotation + (large * rotation + small * cube) / interval
    return total


def _products_of_map(options: Options) -> float:
    kind = options.turning.map
    return PRODUCTS_OF_A_MAP.get(kind, 1.0) if isinstance(kind, str) else 1.0


def state_bytes(state: Mapping[str, Tensor]) -> int:
    """Return the memory of a parameter's state."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
