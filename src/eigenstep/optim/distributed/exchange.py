"""Moving parts of tensors between ranks: which box of which tensor goes where, in few large collectives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

PADDING = 1.1
"""All-gather needs equal parts; if filling them up costs more bytes than this factor, all-to-all sends exact ones."""


class Box(NamedTuple):
    """A part of a tensor: on each axis the indices from ``start`` to ``stop``."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of entries."""
        return torch.Size(self.shape).numel()

    def common(self, other: Box) -> Box | None:
        """Return what lies in both boxes, ``None`` if that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def of(self, tensor: Tensor, frame: Box) -> Tensor:
        """Return the view of this box in a tensor that holds a larger box, its ``frame``."""
        if self == frame:
            return tensor
        return tensor[tuple(slice(a - f, b - f) for a, b, f in zip(self.start, self.stop, frame.start, strict=True))]


class Item(NamedTuple):
    """A box of a tensor that goes to, or comes from, another rank.

    Attributes:
        peer: the other rank.
        tensor: number of the tensor.
        box: which part of it.
    """

    peer: int
    tensor: int
    box: Box


class Pending:
    """Boxes on their way."""

    def __init__(self, work: Any, buffer: Tensor, places: Sequence[tuple[Item, int]], sent: Tensor) -> None:
        """Remember where in a buffer each will arrive, and keep what is sent until it has gone."""
        self._work, self._buffer, self._places, self._sent = work, buffer, places, sent

    def wait(self) -> Iterator[tuple[Item, Tensor]]:
        """Give each item that has come, and its content."""
        self._work.wait()
        for item, place in self._places:
            yield item, self._buffer[place : place + item.box.numel].view(item.box.shape)


Outgoing = Sequence[tuple[Item, Tensor]]


def swap(outgoing: Outgoing, incoming: Sequence[Item], like: Tensor, group: dist.ProcessGroup) -> Pending:
    """Send boxes to other ranks and receive boxes from them, in one all-to-all.

    Args:
        outgoing: items and their content; for each pair of ranks in the order in which the receiver expects them.
        incoming: what will come.
        like: decides number format and device.
        group: the ranks that take part.
    """
    outgoing = sorted(outgoing, key=lambda pair: pair[0].peer)
    incoming = sorted(incoming, key=lambda item: item.peer)
    sent = _flat([tensor for _, tensor in outgoing], like)
    splits = [[0] * dist.get_world_size(group) for _ in range(2)]
    for split, items in zip(splits, (incoming, [item for item, _ in outgoing]), strict=True):
        for item in items:
            split[item.peer] += item.box.numel
    buffer = like.new_empty(sum(splits[0]))
    work = dist.all_to_all_single(buffer, sent, splits[0], splits[1], group=group, async_op=True)
    starts = itertools.accumulate((item.box.numel for item in incoming), initial=0)
    return Pending(work, buffer, list(zip(incoming, starts)), sent)  # noqa: B905 - the last start is the end


def share(mine: Sequence[Tensor], everything: Sequence[Item], like: Tensor, group: dist.ProcessGroup) -> Pending:
    """Give every rank what each rank has, in one collective; only what others have arrives.

    Args:
        mine: the content of this rank's own items, in their order.
        everything: all items; the peer is the rank that has it.
        like: decides number format and device.
        group: the ranks that take part.
    """
    world, here = dist.get_world_size(group), dist.get_rank(group)
    totals = [sum(item.box.numel for item in everything if item.peer == rank) for rank in range(world)]
    others = [item for item in everything if item.peer != here]
    if world * max(totals) > PADDING * sum(totals):
        own = list(zip([item for item in everything if item.peer == here], mine, strict=True))
        targets = [rank for rank in range(world) if rank != here]
        return swap([(item._replace(peer=to), content) for to in targets for item, content in own], others, like, group)
    part = max(totals)
    sent = _flat([*mine, like.new_zeros(part - totals[here])], like)
    buffer = like.new_empty(world * part)
    # Newer versions of torch have another name for it and warn of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(buffer, sent, group=group, async_op=True)
    places, filled = [], [rank * part for rank in range(world)]
    for item in others:
        places.append((item, filled[item.peer]))
        filled[item.peer] += item.box.numel
    return Pending(work, buffer, places, sent)


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Put tensors one after the other."""
    return torch.cat([like.new_empty(0), *(tensor.reshape(-1).to(like.dtype) for tensor in tensors)])
