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
    """Return the independent tensors that a parameter falls into, as views of it, and the sides of
    each.

    Args:
        x: a contiguous array of the parameter's shape.
        options: those of the optimizer.
    """
    views, sides = [], []
    for tensor in counted(x, options):
        for view, own in own_views(tensor, options):
            views.append(view)
            sides.append(own)
    return views, sides


def order(x: Array, options: dict[str, Any]) -> list[int]:
    """Return the order of axes in which a parameter is a matrix: of all but the first, the longest
    comes last.
    """
    first, axes = counting(x, options), list(range(x.ndim))
    if x.ndim - first > 2 and options["structure"] in ("auto", "kronecker"):
        last = axes[-1]
        for axis in axes[first + 1 :]:
            last = axis if x.shape[axis] > x.shape[last] else last
        axes = [axis for axis in axes if axis != last] + [last]
    return axes


def counting(x: Array, options: dict[str, Any]) -> int:
    """Return how many of the first axes count tensors of their own."""
    if options["batch_dims"] is not None:
        return options["batch_dims"]
    least = min(x.shape[1:]) if x.ndim == 3 else 0
    large = least > 128 or (least >= 16 and least >= 4 * x.shape[0])
    return 1 if large and options["structure"] == "auto" else 0


def counted(x: Array, options: dict[str, Any]) -> list[Array]:
    """Return the tensors that the first axes count."""
    axes = counting(x, options)
    return list(x.reshape(-1, *x.shape[axes:])) if 0 < axes < x.ndim else [x]


def own_views(x: Array, options: dict[str, Any]) -> list[tuple[Array, list[Side]]]:
    structure = options["structure"]
    if structure == "full" and x.size <= (options["max_dim"] or x.size):
        return [(x.reshape(-1), [Side(x.size, whole(x.size))])]
    matrix = x.reshape(x.shape[0], -1) if x.ndim > 1 else x.reshape(1, -1)
    parts = fused(matrix if options["axis"] == 0 else matrix.T, options)
    embeddings = x.ndim == 2 and structure == "auto" and all(map(is_embedding, parts))
    if structure == "diagonal" or embeddings or min(matrix.shape) == 1:
        return [(x.reshape(-1), [Side(x.size, [])])]
    return [piece for part in parts for piece in cut(part, options)]


def is_embedding(part: Array) -> bool:
    rows, columns = part.shape
    return rows >= 1024 and rows >= 16 * columns and columns >= 32


def fused(matrix: Array, options: dict[str, Any]) -> list[Array]:
    """Return the matrices whose rows were put together."""
    sizes = options["sizes"] or [len(matrix)]
    heads = options["heads"] or 1
    heads = [heads] * len(sizes) if isinstance(heads, int) else heads
    lengths: list[int] = []
    for size, count in zip(sizes, heads, strict=True):
        lengths += [size // count] * count
    return rows_of(matrix, lengths)


def cut(matrix: Array, options: dict[str, Any]) -> list[tuple[Array, list[Side]]]:
    """Cut a matrix whose sides are too long: the shorter into parts, then the longer into blocks of
    two lengths.
    """
    longest = options["max_dim"] or matrix.size
    if min(matrix.shape) == 1:  # a vector
        return [(matrix.reshape(-1), [Side(matrix.size, [])])]
    if matrix.shape[0] < matrix.shape[1]:
        matrix = matrix.T  # the longer side comes first
    found = []
    for part in rows_of(matrix.T, even(matrix.shape[1], longest)):
        width = len(part)
        limit = longest
        if options["max_ratio"] is not None:
            limit = min(longest, math.ceil(options["max_ratio"] * width))
        heights = even(matrix.shape[0], limit)
        for height in sorted(set(heights), reverse=True):
            alike = part[:, : height * heights.count(height)]
            part = part[:, alike.shape[1] :]
            length = alike.shape[1]
            rows = [slice(at, at + height) for at in range(0, length, height)]
            found.append((alike.T, [Side(length, rows), Side(width, whole(width))]))
    return found


def whole(n: int) -> list[slice]:
    return [slice(0, n)]


def rows_of(matrix: Array, lengths: list[int]) -> list[Array]:
    """Return so many rows after each other."""
    ends = [sum(lengths[: at + 1]) for at in range(len(lengths))]
    return [matrix[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def even(length: int, limit: int) -> list[int]:
    """Return the lengths of the fewest parts that are short enough, the longer ones first."""
    count = max(1, math.ceil(length / limit))
    return [length // count + (at < length % count) for at in range(count)]
