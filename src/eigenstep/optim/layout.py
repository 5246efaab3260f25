"""Which matrices a parameter holds, which sides get a basis, and where they are cut.

A parameter is ``units`` equal and independent matrices. Each of them is one rectangle, or several
if it is fused or does not divide evenly. A rectangle lies in a batch as ``(blocks, *sizes)``: the
longer side is cut into blocks, and the shorter one comes last.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .options import Fused, Options

Range = tuple[int, int]

LONGEST_KERNEL = 128
SMALLEST_EXPERT = 16
FEW_EXPERTS = 4
"""Three axes are a stack of matrices if both sides are longer than any kernel; or if they are at
least as long as the smallest expert, and this many times the number of matrices. A convolution
with so few outputs loses nothing by stepping each of them alone.
"""
MANY_ROWS = 1024
SLENDER = 16
LEAST_WIDTH = 32
"""A matrix with many rows, several times its columns, is an embedding: its rows are seen too
rarely, and are too many, for a basis. Low-rank adapters are narrower than the least width.
"""
MOST_SLICES = 64
"""A parameter without a basis is cut into at most this many slices, which ranks may share."""


@dataclass(frozen=True)
class Layout:
    """A rectangle of a matrix, as one element of a batch of shape ``(blocks, *sizes)``."""

    rows: Range  # first row and the one after the last
    cols: Range  # the same for columns
    transposed: bool  # whether it is laid out transposed, so that tall and wide ones share a batch
    blocks: int  # of the longer side; they share the factor of the shorter
    sizes: tuple[int, ...]  # of the sides of one block: two, or one for "full" and "diagonal"
    has_basis: bool

    @property
    def key(self) -> tuple[int, tuple[int, ...], bool]:
        """What must agree for two rectangles to lie in one batch."""
        return self.blocks, self.sizes, self.has_basis

    @property
    def entries(self) -> int:
        """Number of weights."""
        return self.blocks * math.prod(self.sizes)

    def describe(self) -> str:
        """Say what the structure is, for people."""
        names = [f"{n}" if self.has_basis else f"diag {n}" for n in self.sizes]
        if self.blocks > 1:
            names[0] = f"{self.blocks} blocks of {names[0]}"
        return " x ".join(names)


@dataclass(frozen=True)
class Plan:
    """A parameter as ``units`` equal and independent matrices, each made up of rectangles."""

    shape: tuple[int, ...]  # of the parameter
    units: int
    axis: int  # along which the units lie in the parameter
    grain: int  # how many lie at one index of this axis, if several axes count them; otherwise 1
    matrix: tuple[int, int]  # rows and columns of a unit
    layouts: tuple[Layout, ...]  # the rectangles that make up a unit
    last: int | None = None  # axis of the parameter that comes last in its matrix, if not its last

    @property
    def slices(self) -> int:
        """Into how many slices the parameter can be cut, so that no unit is cut."""
        return self.units // self.grain

    @property
    def key(self) -> tuple[object, ...]:
        """What agrees for parameters that can share all their batches."""
        return tuple(layout.key for layout in self.layouts)

    def part(self, start: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...], Plan]:
        """Return where slices begin and end in the parameter, and how they are laid out."""
        low = [0] * len(self.shape)
        high = list(self.shape)
        if self.shape and stop - start != self.slices:
            width = self.shape[self.axis] // self.slices
            low[self.axis] = start * width
            high[self.axis] = stop * width
        shape = tuple(b - a for a, b in zip(low, high, strict=True))
        plan = replace(self, shape=shape, units=(stop - start) * self.grain)
        return tuple(low), tuple(high), plan

    def describe(self) -> str:
        """Say what the structure is, for people."""
        if not self.layouts[0].has_basis and len(self.layouts) == 1:
            return f"diag {math.prod(self.shape)}"
        counts = Counter(layout.describe() for layout in self.layouts)
        texts = []
        for text, count in counts.items():
            times = count * self.units
            texts.append(text if times == 1 else f"{times} times ({text})")
        return " and ".join(texts)


def plan_of(options: Options, shape: Sequence[int]) -> Plan:
    """Choose the layout of a parameter, given its shape without empty axes."""
    shape = tuple(shape)
    fused = options.fused or Fused()
    count = fused.batch_dims
    if count is None:
        count = _stacked_axes(shape) if options.structure == "auto" else 0
    outer = shape[:count]
    inner = shape[count:]
    size = math.prod(inner)
    units = math.prod(outer)
    grain = units // shape[0] if outer else 1
    matrix = (inner[0], size // inner[0]) if inner else (1, 1)
    max_dim = options.max_dim or size
    parts = _parts_of(matrix, inner, fused, options)
    if options.structure == "full" and inner and size <= max_dim:
        return _flat(shape, units, grain, size, has_basis=True)
    if _has_no_basis(matrix, inner, parts, options):
        return _elementwise(shape, options)
    layouts = tuple(
        layout for part in parts for layout in _rectangles(*part, max_dim, options.max_ratio)
    )
    # A block holds the longest of the other axes whole: the channels of a convolution, one place
    # of its kernel after another.
    longest = max(inner[1:])
    last = shape.index(longest, count + 1) if longest > inner[-1] else None
    plan = Plan(shape, units, 0, grain, matrix, layouts, last)
    return plan if outer else _as_units(plan)


def _stacked_axes(shape: tuple[int, ...]) -> int:
    """Return how many of the first axes count matrices: one for stacks, else none."""
    if len(shape) != 3:
        return 0
    least = min(shape[1:])
    long_enough = max(SMALLEST_EXPERT, FEW_EXPERTS * shape[0])
    return int(least > LONGEST_KERNEL or least >= long_enough)


def is_embedding(rows: int, cols: int, *, looked_up: bool = False) -> bool:
    """Tell whether a matrix has too many rows, too rarely seen, for a basis.

    Of a module that looks rows up that is so if there are more than twice as many as columns. Of
    other matrices nobody knows what they do: they must be far more slender than any layer.
    """
    if looked_up:
        return rows > 2 * cols
    return cols >= LEAST_WIDTH and rows >= max(MANY_ROWS, SLENDER * cols)


def _has_no_basis(
    matrix: tuple[int, int],
    inner: tuple[int, ...],
    parts: Sequence[tuple[Range, Range]],
    options: Options,
) -> bool:
    """Tell whether a parameter is a vector, an embedding, or meant to have no basis."""
    if options.structure == "diagonal" or min(matrix) == 1:
        return True
    if options.structure != "auto" or len(inner) != 2:
        return False
    return all(is_embedding(_length(rows), _length(cols)) for rows, cols in parts)


def _length(interval: Range) -> int:
    return interval[1] - interval[0]


def _elementwise(shape: tuple[int, ...], options: Options) -> Plan:
    """Return the plan of a parameter without basis, in slices if its entries are independent."""
    units = 1
    if options.eigenvalues == "corrected" and len(shape) > 1:
        divisors = (n for n in range(min(MOST_SLICES, shape[0]), 0, -1) if shape[0] % n == 0)
        units = next(divisors)
    return _flat(shape, units, 1, math.prod(shape) // units, has_basis=False)


def _flat(shape: tuple[int, ...], units: int, grain: int, size: int, *, has_basis: bool) -> Plan:
    """Return a plan in which every unit is a vector with a single factor."""
    layout = Layout((0, size), (0, 1), False, 1, (size,), has_basis)
    return Plan(shape, units, 0, grain, (size, 1), (layout,))


def _parts_of(
    matrix: tuple[int, int], inner: tuple[int, ...], fused: Fused, options: Options
) -> list[tuple[Range, Range]]:
    """Return the rows and columns of each matrix that was fused into one."""
    rows = [(0, matrix[0])]
    cols = [(0, matrix[1])]
    if not fused.cuts or min(matrix) == 1 or options.structure == "diagonal":
        return [(rows[0], cols[0])]
    if options.structure == "full":
        raise ValueError(
            'sizes and heads of Fused need structure="auto" or "kronecker", got "full"'
        )
    if fused.axis == 0:
        rows = _fused_ranges(inner, fused)
    else:
        cols = _fused_ranges(inner, fused)
    return list(itertools.product(rows, cols))


def _fused_ranges(shape: tuple[int, ...], fused: Fused) -> list[Range]:
    """Return where the parts of an axis begin and end that are matrices of their own."""
    if fused.axis == 1 and len(shape) != 2:
        raise ValueError(
            f"Fused(axis=1) needs matrices, got a parameter of shape {shape}: give it a group of "
            "its own"
        )
    length = shape[fused.axis]
    sizes = [length] if fused.sizes is None else list(fused.sizes)
    if sum(sizes) != length:
        raise ValueError(
            f"sizes of Fused must add up to the length {length} of axis {fused.axis} of a "
            f"parameter of shape {shape}, got {sizes}: give the fused weights a group of their own"
        )
    heads = fused.heads_of(len(sizes))
    if len(heads) != len(sizes) or any(n % k for n, k in zip(sizes, heads, strict=True)):
        raise ValueError(
            f"heads of Fused must divide each of the parts {sizes} of an axis, got {fused.heads}"
        )
    lengths: list[int] = []
    for size, number in zip(sizes, heads, strict=True):
        lengths += [size // number] * number
    return _ranges(0, lengths)


def _ranges(start: int, lengths: Iterable[int]) -> list[Range]:
    """Return where parts of given lengths begin and end."""
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=start)))


def _rectangles(
    rows: Range, cols: Range, max_dim: int, max_ratio: float | None
) -> Iterator[Layout]:
    """Cut a rectangle into parts of its shorter side, and each part's longer side into blocks.

    Blocks of one layout are equally long. A side that cannot be divided evenly gets two layouts,
    whose blocks differ by one.
    """
    height = _length(rows)
    width = _length(cols)
    if min(height, width) == 1:
        yield Layout(rows, cols, False, 1, (height * width,), False)
        return
    transposed = height < width
    long, short = (cols, rows) if transposed else (rows, cols)
    for part in _ranges(short[0], _even_lengths(_length(short), max_dim)):
        limit = max_dim
        if max_ratio is not None:
            limit = min(max_dim, math.ceil(max_ratio * _length(part)))
        counts = Counter(_even_lengths(_length(long), limit))
        spans = _ranges(long[0], [count * length for length, count in counts.items()])
        for span, (length, count) in zip(spans, counts.items(), strict=True):
            place = (part, span) if transposed else (span, part)
            yield Layout(*place, transposed, count, (length, _length(part)), True)


def _even_lengths(length: int, limit: int) -> list[int]:
    """Return the lengths of the fewest parts of at most ``limit`` that make up a side.

    They differ by at most one, the longer ones first.
    """
    parts = math.ceil(length / limit)
    base, longer = divmod(length, parts)
    return [base + 1] * longer + [base] * (parts - longer)


def _as_units(plan: Plan) -> Plan:
    """Return the same plan, with equal rectangles that lie side by side as units."""
    first = plan.layouts[0]
    kinds = {(layout.key, layout.transposed) for layout in plan.layouts}
    if len(plan.layouts) == 1 or len(kinds) > 1:
        return plan
    below = len({layout.cols for layout in plan.layouts}) == 1
    beside = len({layout.rows for layout in plan.layouts}) == 1 and len(plan.shape) == 2
    if not (below or beside):
        return plan
    matrix = (_length(first.rows), _length(first.cols))
    layout = replace(first, rows=(0, matrix[0]), cols=(0, matrix[1]))
    units = len(plan.layouts)
    return Plan(plan.shape, units, 0 if below else 1, 1, matrix, (layout,), plan.last)
