"""Collectives of a step of many ranks: gradients go to their owners, and steps come back, in rounds
of some megabytes.

Team calls, of each round in this order: ``send_gradients`` sends them to where they are needed,
without waiting; ``own_gradients`` returns, for each member of which this rank steps a part, the
gradient of this part; ``send_steps`` sends the steps of these parts, without waiting;
``receive_steps`` waits for those that this rank needs, and takes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .ownership import Box, Member

PADDING = 1.1
"""All-gather needs equal parts; if filling them up costs more bytes than this factor, all-to-all
sends exact ones.
"""

Apply = Callable[[list[Tensor], list[Tensor]], None]  # moves tensors along steps


class Item(NamedTuple):
    """A box of a tensor that goes to, or comes from, another rank."""

    peer: int  # the other rank
    tensor: int  # number of the tensor
    box: Box  # which part of it


Pending = Iterator[tuple[Item, Tensor]]
"""Boxes on their way: waits for all of them, then gives each and its content."""
Traffic = tuple[list[Item], list[Item], list[Item]]  # what goes out, comes in, and stays here


class ReplicatedRound:
    """Every rank has all weights and gradients: owners change their weights and then share them."""

    def __init__(self, members: Sequence[Member], group: dist.ProcessGroup) -> None:
        """Prepare a round for parameters of one number format."""
        self.members, self.group, self.rank = list(members), group, dist.get_rank(group)
        self.everything = [
            Item(p.owner, index, p.box) for index, m in enumerate(self.members) for p in m.parts
        ]
        self.own = [item for item in self.everything if item.peer == self.rank]

    def _part(self, item: Item, of: Callable[[Tensor], Tensor]) -> Tensor:
        member = self.members[item.tensor]
        return item.box.of(of(member.param), member.boxes[self.rank])

    def send_gradients(self) -> Pending | None:
        """Send nothing: owners have the gradients."""
        return None

    def own_gradients(self, _: Pending | None) -> dict[int, Tensor]:
        """Return views of gradients."""
        return {item.tensor: self._part(item, local_gradient) for item in self.own}

    def send_steps(self, steps: Mapping[int, Tensor], apply: Apply) -> Pending:
        """Change the weights that are owned, and send them."""
        weights = [self._part(item, local) for item in self.own]
        if weights:
            apply(weights, [steps[item.tensor] for item in self.own])
        return share(weights, self.everything, local(self.members[0].param), self.group)

    def receive_steps(self, coming: Pending, _: Apply) -> None:
        """Take over the weights that others own."""
        for item, content in coming:
            self._part(item, local).copy_(content)


class ShardedRound:
    """Ranks have shards of weights and gradients: these meet at owners, and shards of steps come
    back.
    """

    def __init__(self, members: Sequence[Member], group: dist.ProcessGroup) -> None:
        """Prepare a round for parameters of one number format."""
        self.members, self.group, here = list(members), group, dist.get_rank(group)
        self.frames = [member.boxes[here] for member in self.members]
        parts = [
            (index, member, part)
            for index, member in enumerate(self.members)
            for part in member.parts
        ]
        self.own = {index: part.box for index, _, part in parts if part.owner == here}
        # What concerns other ranks alone need not be looked at.
        gradients = (
            (member.source(box, part.owner), part.owner, index, part.box.common(box))
            for index, member, part in parts
            for box in (member.holders if part.owner == here else [member.boxes[here]])
        )
        steps = (
            (part.owner, rank, index, part.box.common(member.boxes[rank]))
            for index, member, part in parts
            for rank in (range(len(member.boxes)) if part.owner == here else [here])
        )
        self.gradients, self.steps = _sorted(gradients, here), _sorted(steps, here)
        self._here: list[tuple[Item, Tensor]] = []

    def _send(self, traffic: Traffic, tensors: Any, frames: Any, like: Tensor) -> Pending:
        """Send boxes of tensors that hold the boxes ``frames``; what stays is kept here."""

        def cut(items: list[Item]) -> list[tuple[Item, Tensor]]:
            return [
                (item, item.box.of(tensors[item.tensor], frames[item.tensor])) for item in items
            ]

        outgoing, incoming, staying = traffic
        self._here = cut(staying)
        return swap(cut(outgoing), incoming, like, self.group)

    def send_gradients(self) -> Pending:
        """Send this rank's shards to the owners."""
        shards = [local_gradient(member.param) for member in self.members]
        return self._send(self.gradients, shards, self.frames, shards[0])

    def own_gradients(self, coming: Pending | None) -> dict[int, Tensor]:
        """Put gradients together from shards."""
        like = local_gradient(self.members[0].param)
        whole = {index: like.new_empty(box.shape) for index, box in self.own.items()}
        for item, content in itertools.chain(self._here, coming or ()):
            item.box.of(whole[item.tensor], self.own[item.tensor]).copy_(content)
        return whole

    def send_steps(self, steps: Mapping[int, Tensor], _: Apply) -> Pending:
        """Send shards of steps to the ranks that hold those of the weights."""
        first = self.members[0]
        like = torch.empty(0, dtype=first.wide, device=local(first.param).device)
        return self._send(self.steps, steps, self.own, like)

    def receive_steps(self, coming: Pending, apply: Apply) -> None:
        """Put steps of this rank's shards together, and take them."""
        shards = [local(member.param) for member in self.members]
        steps = [
            torch.empty_like(w, dtype=m.wide) for w, m in zip(shards, self.members, strict=True)
        ]
        for item, content in itertools.chain(self._here, coming):
            item.box.of(steps[item.tensor], self.frames[item.tensor]).copy_(content)
        self._here = []
        held = [at for at, shard in enumerate(shards) if shard.numel()]
        if held:
            apply([shards[at] for at in held], [steps[at] for at in held])


Round = ReplicatedRound | ShardedRound


def _sorted(moves: Iterable[tuple[int, int, int, Box | None]], here: int) -> Traffic:
    """Tell apart moves (from rank, to rank, tensor, box) of boxes that are not empty, as far as
    they concern a rank.
    """
    known = [
        (source, target, index, box) for source, target, index, box in moves if box is not None
    ]
    return (
        [
            Item(target, index, box)
            for source, target, index, box in known
            if source == here != target
        ],
        [
            Item(source, index, box)
            for source, target, index, box in known
            if target == here != source
        ],
        [
            Item(here, index, box)
            for source, target, index, box in known
            if source == target == here
        ],
    )


def swap(
    outgoing: Sequence[tuple[Item, Tensor]],
    incoming: Sequence[Item],
    like: Tensor,
    group: dist.ProcessGroup,
) -> Pending:
    """Send boxes to other ranks and receive boxes from them, in one all-to-all of numbers ``like``
    these.

    For each pair of ranks, what goes out must be in the order in which the receiver expects it.
    """
    outgoing = sorted(outgoing, key=lambda pair: pair[0].peer)
    incoming = sorted(incoming, key=lambda item: item.peer)
    sent = _flat([tensor for _, tensor in outgoing], like)
    received = like.new_empty(sum(item.box.numel for item in incoming))
    splits = _totals(incoming, group), _totals([item for item, _ in outgoing], group)
    work = dist.all_to_all_single(received, sent, *splits, group=group, async_op=True)
    starts = itertools.accumulate((item.box.numel for item in incoming), initial=0)
    return _arriving(work, received, list(zip(incoming, starts)), sent)  # noqa: B905 - the last start is the end


def share(
    mine: Sequence[Tensor], everything: Sequence[Item], like: Tensor, group: dist.ProcessGroup
) -> Pending:
    """Give every rank what each rank, the item's peer, has, in one collective; only what others
    have arrives.
    """
    world, here, totals = (
        dist.get_world_size(group),
        dist.get_rank(group),
        _totals(everything, group),
    )
    others, part = [item for item in everything if item.peer != here], max(totals)
    if world * part > PADDING * sum(totals):
        own = list(zip([item for item in everything if item.peer == here], mine, strict=True))
        targets = [rank for rank in range(world) if rank != here]
        return swap(
            [(item._replace(peer=to), content) for to in targets for item, content in own],
            others,
            like,
            group,
        )
    sent = _flat([*mine, like.new_zeros(part - totals[here])], like)
    received = like.new_empty(world * part)
    # Newer versions of torch have another name for it and warn of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(received, sent, group=group, async_op=True)
    places, filled = [], [rank * part for rank in range(world)]
    for item in others:
        places.append((item, filled[item.peer]))
        filled[item.peer] += item.box.numel
    return _arriving(work, received, places, sent)


def _arriving(
    work: Any, received: Tensor, places: Sequence[tuple[Item, int]], sent: Tensor
) -> Pending:
    """Give each item from its place among what was received; what is sent is kept until then."""
    work.wait()
    for item, place in places:
        yield item, received[place : place + item.box.numel].view(item.box.shape)


def _totals(items: Iterable[Item], group: dist.ProcessGroup) -> list[int]:
    """Return how many entries go to, or come from, each rank."""
    totals = [0] * dist.get_world_size(group)
    for item in items:
        totals[item.peer] += item.box.numel
    return totals


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Put tensors one after the other."""
    return torch.cat(
        [like.new_empty(0), *(tensor.reshape(-1).to(like.dtype) for tensor in tensors)]
    )


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor; changes to it change the tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def local_gradient(param: Tensor) -> Tensor:
    """Return what this rank holds of a gradient, sharded as the parameter is."""
    gradient: Any = param.grad
    if (
        hasattr(param, "placements")
        and hasattr(gradient, "placements")
        and gradient.placements != param.placements
    ):
        gradient = gradient.redistribute(placements=param.placements)
    return local(gradient)
