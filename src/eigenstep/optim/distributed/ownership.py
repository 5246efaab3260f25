"""Who holds what of a parameter, who steps what of it, and how owners are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layout import Layout
from .exchange import Box


@dataclass(frozen=True)
class Part:
    """Consecutive pieces of a parameter, which one rank steps.

    Attributes:
        owner: the rank.
        start: first piece.
        stop: one after the last piece.
        box: where they are in the parameter.
        layout: how this box is laid out.
    """

    owner: int
    start: int
    stop: int
    box: Box
    layout: Layout


@dataclass(frozen=True)
class Member:
    """A parameter that several ranks share.

    Attributes:
        param: the parameter.
        wide: number format of its steps.
        boxes: what each rank holds.
        parts: what is stepped where, in the order of the pieces.
    """

    param: Tensor
    wide: torch.dtype
    boxes: list[Box]
    parts: list[Part]

    @cached_property
    def holders(self) -> dict[Box, list[int]]:
        """The ranks that hold each box."""
        found: dict[Box, list[int]] = {}
        for rank, box in enumerate(self.boxes):
            found.setdefault(box, []).append(rank)
        return found

    @property
    def replicated(self) -> bool:
        """Whether every rank holds everything."""
        return len(self.holders) == 1

    def source(self, box: Box, owner: int) -> int:
        """Return who gives an owner the gradient of a box: the rank of the owner's replica that holds it."""
        ranks = self.holders[box]
        return ranks[self.holders[self.boxes[owner]].index(owner) % len(ranks)]

    def part_of(self, rank: int) -> Part | None:
        """Return what a rank steps."""
        return next((part for part in self.parts if part.owner == rank), None)


def balance(tasks: Sequence[tuple[int, Sequence[float]]], loads: Any, ranks: int) -> tuple[list[list[int]], Any]:
    """Distribute tasks so that no rank has much more to do, of any kind, than the others.

    The most expensive pieces come first, and each goes to the rank that it burdens least.

    Args:
        tasks: number of pieces of each task, and what a piece costs of each kind (operations, memory, ...).
        loads: what each rank has to do already, ranks x kinds; 0 for nothing.
        ranks: how many ranks there are.

    Returns:
        For each task, how many of its pieces each rank gets; and the new loads.
    """
    counts = [[0] * ranks for _ in tasks]
    if not tasks:
        return counts, loads
    costs = np.array([cost for _, cost in tasks], dtype=float)
    loads = np.zeros((ranks, costs.shape[1])) + loads
    pieces = np.array([number for number, _ in tasks])
    totals = np.maximum(loads.sum(0) + pieces @ costs, 1e-300)
    shares = costs / totals
    for task in np.argsort(-shares.max(1), kind="stable"):
        for _ in range(pieces[task]):
            burden = loads / totals + shares[task]
            # Of ranks that are equally far in what they have most of, the one that has less of the rest.
            rank = int(np.argmin(burden.max(1) + 1e-3 * burden.sum(1)))
            loads[rank] += costs[task]
            counts[task][rank] += 1
    return counts, loads


def parts_of(layout: Layout, counts: Sequence[int]) -> list[Part]:
    """Cut a parameter into parts, given how many pieces each rank gets.

    Args:
        layout: layout of the whole parameter.
        counts: number of pieces of each rank; if pieces are no slices, one rank gets all.
    """
    parts, start, axis = [], 0, layout.cut_axis
    for owner, count in enumerate(counts):
        if count:
            part = layout.part(start, start + count)
            low, high = [0] * len(layout.shape), list(layout.shape)
            if axis is not None and count != layout.pieces:
                width = layout.shape[axis] // layout.pieces
                low[axis], high[axis] = start * width, (start + count) * width
            parts.append(Part(owner, start, start + count, Box(tuple(low), tuple(high)), part))
            start += count
    return parts
