"""How tensors become matrices with one curvature factor per side, written out for the oracle."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .formulas import Array


class Side(NamedTuple):
    """One side of a tensor.

    Attributes:
        size: its length.
        blocks: parts with a basis each, which cover it; none if its factor is diagonal.
    """

    size: int
    blocks: list[slice]


def views_of(x: Array, options: dict[str, Any]) -> tuple[list[Array], list[list[Side]]]:
    """Return the independent tensors that a parameter falls into, as views of it, and the sides of each.

    Args:
        x: a contiguous array of the parameter's shape.
        options: those of the optimizer.
    """
    longest, structure = options["max_dim"] or x.size, options["structure"]
    if structure == "full" and x.size <= longest:
        return [x.reshape(-1)], [[Side(x.size, whole(x.size))]]
    matrix = x.reshape(x.shape[0], -1) if x.ndim > 1 else x.reshape(1, -1)
    if structure == "diagonal" or min(matrix.shape) == 1:
        return [x.reshape(-1)], [[Side(x.size, [])]]
    if structure == "axes" and x.ndim > 2:
        return [x], [[Side(n, whole(n) if 1 < n <= longest else []) for n in x.shape]]
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.T  # the longer side comes first
    length, breadth = matrix.shape
    pieces = parts(breadth, longest)
    width = breadth // pieces
    limit = longest if options["max_ratio"] is None else min(longest, math.ceil(options["max_ratio"] * width))
    height = length // parts(length, limit)
    rows = [slice(at, at + height) for at in range(0, length, height)] if height <= limit else []
    sides = [Side(length, rows), Side(width, whole(width) if width <= longest else [])]
    return [matrix[:, at : at + width] for at in range(0, breadth, width)], [sides] * pieces


def whole(n: int) -> list[slice]:
    return [slice(0, n)]


def parts(length: int, limit: int) -> int:
    """Return into how many equal parts a side is cut: the fewest that are short enough, at most twice the least."""
    least = -(-length // limit)
    fitting = [count for count in range(least, 2 * least + 1) if length % count == 0]
    return fitting[0] if fitting else 1
