"""How a parameter becomes matrices: what counts as a matrix of its own, which sides get a basis,
where they are cut.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from .stacks import Layout, Plan, Range

STRUCTURES = ("auto", "kronecker", "axes", "full", "diagonal")
MOST_AXES = 8
"""As many axes as the arithmetic has letters for."""
SMALLEST_EXPERT, FEW, LONGEST_KERNEL = 16, 4, 128
"""Three axes are a stack of matrices if both sides are longer than a kernel, or so long at least,
and so many times the number of matrices: a convolution with so few outputs loses nothing by
stepping each alone.
"""
MANY_ROWS, SLENDER, LEAST_WIDTH = 1024, 16, 32
"""A matrix with so many rows, so many times its columns, of which it has so many or more, is an
embedding: its rows are seen too rarely, and are too many, for a basis. Low-rank adapters are
narrower.
"""
MOST_SLICES = 64
"""A diagonal parameter is cut into at most so many slices, which ranks may share."""


def plan(
    shape: tuple[int, ...],
    *,
    structure: str = "auto",
    max_dim: int | None,
    max_ratio: float | None,
    batch_dims: int | None = None,
    split_sizes: Sequence[int] | None = None,
    num_heads: int | Sequence[int] | None = None,
    split_dim: int = 0,
    elementwise: bool = True,
) -> Plan:
    """Choose the layout of a parameter.

    Args: shape: its shape, without empty axes. structure: "kronecker" lays tensors out as matrices
        (first axis against the rest) with one factor per side; "auto" does so, too, but recognizes
        stacks of matrices and gives embeddings no basis; "axes" gives each axis of a tensor its own
        factor; "full" one factor for the whole tensor; "diagonal" no basis at all. max_dim: a side
        longer than this is cut into blocks with a basis each; ``None`` for no limit. max_ratio: so
        is a side more than this many times longer than the other. batch_dims: how many of the first
        axes count tensors of their own; by default what "auto" recognizes. split_sizes: lengths of
        the parts of an axis that are matrices of their own. num_heads: into how many equal parts
        each of these is cut again. split_dim: the axis that is cut into parts, 0 or 1, after those
        that count. elementwise: whether entries of a parameter without basis are independent, so
        that ranks may share them.
    """
    count = _recognized(shape) if batch_dims is None and structure == "auto" else batch_dims or 0
    outer, inner = shape[:count], shape[count:]
    units, size = math.prod(outer), math.prod(inner)
    grain = units // shape[0] if outer else 1
    matrix = (inner[0], size // inner[0]) if inner else (1, 1)
    max_dim = max_dim or size
    ranges = [[(0, n)] for n in matrix]
    if (split_sizes or num_heads not in (None, 1)) and min(matrix) > 1 and structure != "diagonal":
        if structure == "full" or (structure == "axes" and len(inner) > 2):
            raise ValueError(
                f'split_sizes and num_heads need structure="auto" or "kronecker", got "{structure}"'
            )
        ranges[split_dim] = _parts(inner, split_sizes, num_heads, split_dim)
    parts = list(itertools.product(ranges[0], ranges[1]))
    embedding = (
        structure == "auto" and len(inner) == 2 and all(_is_embedding(*part) for part in parts)
    )
    if structure == "full" and inner and size <= max_dim:
        return _whole(shape, units, grain, (size,), (True,))
    if structure == "diagonal" or embedding or min(matrix) == 1:
        most = min(MOST_SLICES, shape[0]) if elementwise and len(shape) > 1 else 1
        units = next(n for n in range(most, 0, -1) if n == 1 or shape[0] % n == 0)
        return _whole(shape, units, 1, (math.prod(shape) // units,), (False,))
    if structure == "axes" and len(inner) > MOST_AXES:
        raise ValueError(
            f'structure="axes" takes at most {MOST_AXES} axes, got a parameter of shape {shape}: '
            "give it a group of "
            'its own with structure="kronecker"'
        )
    if structure == "axes" and len(inner) > 2:
        return _whole(shape, units, grain, inner, tuple(1 < n <= max_dim for n in inner))
    found = [layout for part in parts for layout in _rectangles(*part, max_dim, max_ratio)]
    # Blocks hold the longest of the other axes whole: channels of a convolution, one place of its
    # kernel after another.
    last = shape.index(max(inner[1:]), count + 1) if max(inner[1:]) > inner[-1] else None
    whole = Plan(shape, units, 0, grain, matrix, tuple(found), last)
    return whole if outer else _as_units(whole)


def _recognized(shape: tuple[int, ...]) -> int:
    """Tell how many of the first axes count matrices: one for stacks, also of one, none for
    convolutions and others.
    """
    if len(shape) != 3:
        return 0
    least = min(shape[1:])
    return int(least > LONGEST_KERNEL or least >= max(SMALLEST_EXPERT, FEW * shape[0]))


def _is_embedding(rows: Range, cols: Range) -> bool:
    width = cols[1] - cols[0]
    return width >= LEAST_WIDTH and rows[1] - rows[0] >= max(MANY_ROWS, SLENDER * width)


def _whole(
    shape: tuple[int, ...], units: int, grain: int, sizes: tuple[int, ...], full: tuple[bool, ...]
) -> Plan:
    """Return a plan in which every unit is laid out as it is."""
    size = math.prod(sizes)
    return Plan(
        shape, units, 0, grain, (size, 1), (Layout((0, size), (0, 1), False, 1, sizes, full),)
    )


def _parts(
    shape: tuple[int, ...],
    split_sizes: Sequence[int] | None,
    num_heads: int | Sequence[int] | None,
    axis: int,
) -> list[Range]:
    """Return where the parts of an axis begin and end that are matrices of their own."""
    if axis == 1 and len(shape) != 2:
        raise ValueError(
            f"split_dim=1 needs matrices, got a parameter of shape {shape}: give it a group of its "
            "own"
        )
    sizes = [shape[axis]] if split_sizes is None else list(split_sizes)
    heads = list(num_heads) if isinstance(num_heads, Sequence) else [num_heads or 1] * len(sizes)
    if sum(sizes) != shape[axis]:
        raise ValueError(
            f"split_sizes must add up to the length {shape[axis]} of axis {axis} of a parameter of "
            f"shape {shape}, got "
            f"{sizes}: give the fused weights a group of their own"
        )
    if len(heads) != len(sizes) or any(
        size % count for size, count in zip(sizes, heads, strict=True)
    ):
        raise ValueError(
            f"num_heads must divide each of the parts {sizes} of an axis, got {num_heads}"
        )
    lengths = [
        size // count for size, count in zip(sizes, heads, strict=True) for _ in range(count)
    ]
    return _ranges(0, lengths)


def _ranges(start: int, lengths: Iterable[int]) -> list[Range]:
    """Return where parts of given lengths begin and end."""
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=start)))


def _rectangles(
    rows: Range, cols: Range, max_dim: int, max_ratio: float | None
) -> Iterator[Layout]:
    """Cut a rectangle of a matrix into layouts: parts of the shorter side, and blocks of each of
    their longer sides.

    Blocks of one layout are equally long. Sides that cannot be divided evenly have two, whose
    blocks differ by one.
    """
    height, width = rows[1] - rows[0], cols[1] - cols[0]
    if min(height, width) == 1:  # a vector
        yield Layout(rows, cols, False, 1, (height * width,), (False,))
        return
    transposed = height < width
    long, short = (cols, rows) if transposed else (rows, cols)
    for part in _ranges(short[0], _cut(short[1] - short[0], max_dim)):
        width = part[1] - part[0]
        limit = max_dim if max_ratio is None else min(max_dim, math.ceil(max_ratio * width))
        lengths = _cut(long[1] - long[0], limit)
        counts = [(lengths.count(length), length) for length in sorted(set(lengths), reverse=True)]
        spans = _ranges(long[0], [count * length for count, length in counts])
        for span, (count, length) in zip(spans, counts, strict=True):
            place = (part, span) if transposed else (span, part)
            yield Layout(*place, transposed, count, (length, width), (True, True))


def _cut(length: int, limit: int) -> list[int]:
    """Return the lengths of the fewest parts of at most ``limit`` that make up a side; they differ
    by at most one.
    """
    parts = math.ceil(length / limit)
    base, longer = divmod(length, parts)
    return [base + 1] * longer + [base] * (parts - longer)


def _as_units(plan: Plan) -> Plan:
    """Return the same plan, with rectangles of one kind that lie side by side along an axis as
    units.
    """
    first, count = plan.layouts[0], len(plan.layouts)
    if count == 1 or any(
        (x.key, x.transposed) != (first.key, first.transposed) for x in plan.layouts
    ):
        return plan
    for axis, across in enumerate(({x.cols for x in plan.layouts}, {x.rows for x in plan.layouts})):
        if len(across) == 1 and (axis == 0 or len(plan.shape) == 2):
            rows, cols = first.rows[1] - first.rows[0], first.cols[1] - first.cols[0]
            layout = replace(first, rows=(0, rows), cols=(0, cols))
            return Plan(plan.shape, count, axis, 1, (rows, cols), (layout,), plan.last)
    return plan
