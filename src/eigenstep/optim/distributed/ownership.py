"""Who holds what of a parameter, who steps what of it, and how owners are chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..cost import matmul_flops, state_bytes
from ..formats import initial_state, suffix_of
from ..layout import Plan, plan_of
from ..options import Options

OFF = "or pass distributed=False to step all parameters on every rank"


class Box(NamedTuple):
    """A part of a tensor: on each axis the indices from ``start`` to ``stop``."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> torch.Size:
        """Lengths of the axes."""
        return torch.Size(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of entries."""
        return self.shape.numel()

    def common(self, other: Box) -> Box | None:
        """Return what lies in both boxes, ``None`` if that is nothing."""
        start, stop = (
            tuple(map(max, self.start, other.start)),
            tuple(map(min, self.stop, other.stop)),
        )
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def of(self, tensor: Tensor, frame: Box) -> Tensor:
        """Return the view of this box in a tensor that holds a larger box, its ``frame``."""
        if self == frame:
            return tensor
        return tensor[
            tuple(
                slice(a - f, b - f)
                for a, b, f in zip(self.start, self.stop, frame.start, strict=True)
            )
        ]


@dataclass(frozen=True)
class Candidate:
    """A parameter that needs owners."""

    param: Tensor
    plan: Plan  # of the whole parameter
    # Operations, bytes of state, ... of stepping one slice; each is balanced over the ranks
    costs: tuple[float, ...]
    wide: torch.dtype  # number format of its steps
    description: tuple[Any, ...]  # what ``describe`` says of it


@dataclass(frozen=True)
class Part:
    """Consecutive slices of a parameter, which one rank steps."""

    owner: int  # the rank
    start: int  # first slice
    stop: int  # one after the last slice
    box: Box  # where they are in the parameter
    plan: Plan  # how this box is laid out


@dataclass(frozen=True)
class Member:
    """A parameter that several ranks share."""

    param: Tensor
    wide: torch.dtype  # number format of its steps
    boxes: list[Box]  # what each rank holds
    parts: list[Part]  # what is stepped where, in the order of the slices

    @cached_property
    def holders(self) -> dict[Box, list[int]]:
        """The ranks that hold each box."""
        found: dict[Box, list[int]] = {}
        for rank, box in enumerate(self.boxes):
            found.setdefault(box, []).append(rank)
        return found

    def source(self, box: Box, owner: int) -> int:
        """Return who gives an owner the gradient of a box: the rank of the owner's replica that
        holds it.
        """
        ranks = self.holders[box]
        return ranks[self.holders[self.boxes[owner]].index(owner) % len(ranks)]


def balance(
    tasks: Sequence[tuple[int, Sequence[float]]], loads: Any, ranks: int
) -> tuple[list[list[int]], Any]:
    """Distribute tasks so that no rank has much more to do, of any kind, than the others.

    The most expensive slices come first, and each goes to the rank that it burdens least.

    Args: tasks: number of slices of each task, and what a slice costs of each kind (operations,
        memory, ...). loads: what each rank has to do already, ranks x kinds; 0 for nothing. ranks:
        how many ranks there are.

    Returns:
        For each task, how many of its slices each rank gets; and the new loads.
    """
    counts = [[0] * ranks for _ in tasks]
    if not tasks:
        return counts, loads
    slices, costs = (
        np.array([number for number, _ in tasks]),
        np.array([cost for _, cost in tasks], dtype=float),
    )
    loads = np.zeros((ranks, costs.shape[1])) + loads
    totals = np.maximum(loads.sum(0) + slices @ costs, 1e-300)
    shares = costs / totals
    for task in np.argsort(-shares.max(1), kind="stable"):
        for _ in range(slices[task]):
            burden = loads / totals + shares[task]
            # Of ranks that are equally far in what they have most of, the one that has less of the
            # rest.
            rank = int(np.argmin(burden.max(1) + 1e-3 * burden.sum(1)))
            loads[rank] += costs[task]
            counts[task][rank] += 1
    return counts, loads


def parts_of(plan: Plan, counts: Sequence[int]) -> list[Part]:
    """Cut a parameter into parts, given how many slices each rank gets."""
    parts, start = [], 0
    for owner, count in enumerate(counts):
        if count:
            low, high, own = plan.part(start, start + count)
            parts.append(Part(owner, start, start + count, Box(low, high), own))
            start += count
    return parts


def wanted(params: Iterable[Tensor]) -> bool:
    """Tell whether there are other ranks to work with, or parameters that only all ranks together
    have.
    """
    return dist.get_world_size() > 1 or any(map(is_sharded, params))


def is_sharded(param: Tensor) -> bool:
    """Tell whether a parameter is a DTensor."""
    return hasattr(param, "device_mesh")


def group_of(param: Any) -> dist.ProcessGroup:
    """Return the ranks that share a parameter."""
    world = dist.group.WORLD
    assert world is not None
    if not is_sharded(param) or param.device_mesh.size() == dist.get_world_size():
        return world
    mesh = param.device_mesh
    return (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()


def describe(param: Any) -> tuple[Any, ...]:
    """Return what ranks must know of each other: shape, number format, what is held, and check sums
    of replicas.
    """
    shape = tuple(param.shape)
    if is_sharded(param):
        if any(placement.is_partial() for placement in param.placements):
            raise ValueError(
                f"a DTensor parameter of shape {shape} must be sharded or replicated, not a "
                "partial sum"
            )
        (chunk,) = param.__create_chunk_list__()
        stop = tuple(a + n for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
        return shape, str(param.dtype), (tuple(chunk.offsets), stop), None, None
    # Parameters without numbers, of a cost model for instance, have no check sum.
    sums = [
        None if x is None or x.is_meta else x.abs().sum(dtype=torch.float64).item()
        for x in (param, param.grad)
    ]
    return shape, str(param.dtype), ((0,) * len(shape), shape), *sums


def candidate_of(options: Options, param: Tensor) -> Candidate:
    """Say what stepping a parameter costs, so that ranks can share the work."""
    plan = plan_of(options, param.shape)
    state = initial_state(options, plan, param.dtype, "meta")
    totals = (matmul_flops(plan, options), state_bytes(state), param.numel())
    costs = tuple(total / plan.slices for total in totals)
    wide = state["step" + suffix_of(plan, 0)].dtype
    return Candidate(param, plan, costs, wide, describe(param))


def check_alike(known: Sequence[Sequence[tuple[Any, ...]]]) -> None:
    """Raise unless the ranks have the same parameters, and the same weights and gradients in what
    is replicated.
    """
    first = known[0]
    for rank, other in enumerate(known):
        if [item[:2] for item in other] != [item[:2] for item in first]:
            raise ValueError(
                f"ranks 0 and {rank} have different parameters, so they cannot share the work: "
                "give the optimizer the "
                f"same parameters in the same order on all ranks, {OFF}"
            )
        for index, (mine, theirs) in enumerate(zip(first, other, strict=True)):
            _check_pair(mine, theirs, f"ranks 0 and {rank}", f"parameter {index}")


def _check_pair(mine: tuple[Any, ...], theirs: tuple[Any, ...], ranks: str, place: str) -> None:
    """Raise unless two ranks have the same weights and gradients for a parameter."""
    if (mine[4] is None) != (theirs[4] is None):
        raise ValueError(f"{ranks} do not both have a gradient for {place}")
    for name, at, tolerance in (("weights", 3, 1e-6), ("gradients", 4, 1e-3)):
        if not _alike(mine[at], theirs[at], tolerance):
            raise ValueError(
                f"{ranks} have different {name} for {place} of shape {mine[0]}: wrap the model in "
                f"DistributedDataParallel or fully_shard, {OFF}"
            )


def _alike(mine: float | None, theirs: float | None, tolerance: float) -> bool:
    """Tell whether check sums agree; there are none of shards and of parameters without numbers."""
    if mine is None or theirs is None:
        return mine is theirs
    return abs(mine - theirs) <= tolerance * (abs(mine) + abs(theirs))


def check_shards(param: Tensor, held: Sequence[Box]) -> None:
    """Raise unless the shards of a parameter, given what each rank holds, make up the
    whole, once.
    """
    boxes = [box for box in dict.fromkeys(held) if box.numel]
    placements = getattr(param, "placements", ())
    strided = any(type(placement).__name__ == "_StridedShard" for placement in placements)
    overlap = strided and any(a.common(b) for i, a in enumerate(boxes) for b in boxes[:i])
    if overlap or sum(box.numel for box in boxes) != param.numel():
        raise ValueError(
            f"the shards of a DTensor parameter of shape {tuple(param.shape)} must be contiguous "
            "parts that "
            f"make up the whole, which is not so with the placements {placements}"
        )
