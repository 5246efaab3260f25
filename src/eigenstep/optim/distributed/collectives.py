"""One round of a step of many ranks: gradients to their owners, and steps back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Box, Item, Pending, share, swap
from .ownership import Member

Apply = Callable[[list[Tensor], list[Tensor]], None]
"""Moves tensors along steps."""


class Round(Protocol):
    """What a round can do, in this order."""

    members: list[Member]

    def send_gradients(self) -> Pending | None:
        """Send gradients to where they are needed, without waiting."""

    def own_gradients(self, coming: Pending | None) -> dict[int, Tensor]:
        """Return, for each member of which this rank steps a part, the gradient of this part."""

    def send_steps(self, steps: Mapping[int, Tensor], apply: Apply) -> Pending:
        """Send the steps of these parts to where they are needed, without waiting."""

    def receive_steps(self, coming: Pending, apply: Apply) -> None:
        """Wait for the steps that this rank needs, and take them."""


class ReplicatedRound:
    """Every rank has all weights and gradients: owners change their weights and then share them."""

    def __init__(self, members: Sequence[Member], group: dist.ProcessGroup) -> None:
        """Prepare a round for parameters of one number format."""
        self.members, self.group, self.rank = list(members), group, dist.get_rank(group)
        everything = [Item(p.owner, index, p.box) for index, m in enumerate(self.members) for p in m.parts]
        self.everything = everything
        self.own = {item.tensor: item.box for item in everything if item.peer == self.rank}

    def _weights(self, index: int, box: Box) -> Tensor:
        member = self.members[index]
        return box.of(local(member.param), member.boxes[self.rank])

    def send_gradients(self) -> None:
        """Send nothing: owners have the gradients."""

    def own_gradients(self, coming: Pending | None) -> dict[int, Tensor]:
        """Return views of gradients."""
        members = self.members
        return {
            index: box.of(local_gradient(members[index].param), members[index].boxes[self.rank])
            for index, box in self.own.items()
        }

    def send_steps(self, steps: Mapping[int, Tensor], apply: Apply) -> Pending:
        """Change the weights that are owned, and send them."""
        weights = [self._weights(index, box) for index, box in self.own.items()]
        if weights:
            apply(weights, [steps[index] for index in self.own])
        return share(weights, self.everything, local(self.members[0].param), self.group)

    def receive_steps(self, coming: Pending, apply: Apply) -> None:
        """Take over the weights that others own."""
        for item, content in coming.wait():
            self._weights(item.tensor, item.box).copy_(content)


class ShardedRound:
    """Ranks have shards of weights and gradients: these meet at owners, and shards of steps come back."""

    def __init__(self, members: Sequence[Member], group: dist.ProcessGroup) -> None:
        """Prepare a round for parameters of one number format."""
        self.members, self.group, self.rank = list(members), group, dist.get_rank(group)
        self.own: dict[int, Box] = {}
        # Boxes of gradients that go out, come in, or are here already; and the same for steps.
        self.gradients: tuple[list[Item], list[Item], list[Item]] = ([], [], [])
        self.steps: tuple[list[Item], list[Item], list[Item]] = ([], [], [])
        for index, member in enumerate(self.members):
            for part in member.parts:
                mine = part.owner == self.rank
                if mine:
                    self.own[index] = part.box
                # What concerns other ranks alone need not be looked at.
                for box in member.holders if mine else [member.boxes[self.rank]]:
                    if common := part.box.common(box):
                        source = member.source(box, part.owner)
                        _sort(self.gradients, self.rank, source, part.owner, index, common)
                for rank in range(len(member.boxes)) if mine else [self.rank]:
                    if common := part.box.common(member.boxes[rank]):
                        _sort(self.steps, self.rank, part.owner, rank, index, common)
        self._here: list[tuple[Item, Tensor]] = []

    def _shard(self, item: Item, shard: Tensor) -> Tensor:
        return item.box.of(shard, self.members[item.tensor].boxes[self.rank])

    def send_gradients(self) -> Pending:
        """Send this rank's shards to the owners."""
        shards = [local_gradient(member.param) for member in self.members]
        outgoing, incoming, here = self.gradients
        self._here = [(item, self._shard(item, shards[item.tensor])) for item in here]
        sent = [(item, self._shard(item, shards[item.tensor])) for item in outgoing]
        return swap(sent, incoming, shards[0], self.group)

    def own_gradients(self, coming: Pending | None) -> dict[int, Tensor]:
        """Put gradients together from shards."""
        assert coming is not None
        like = local_gradient(self.members[0].param)
        whole = {index: like.new_empty(box.shape) for index, box in self.own.items()}
        for item, content in [*self._here, *coming.wait()]:
            item.box.of(whole[item.tensor], self.own[item.tensor]).copy_(content)
        return whole

    def send_steps(self, steps: Mapping[int, Tensor], apply: Apply) -> Pending:
        """Send shards of steps to the ranks that hold those of the weights."""
        outgoing, incoming, here = self.steps
        first = self.members[0]
        like = torch.empty(0, dtype=first.wide, device=local(first.param).device)

        def cut(item: Item) -> tuple[Item, Tensor]:
            return item, item.box.of(steps[item.tensor], self.own[item.tensor])

        self._here = [cut(item) for item in here]
        return swap([cut(item) for item in outgoing], incoming, like, self.group)

    def receive_steps(self, coming: Pending, apply: Apply) -> None:
        """Put steps of this rank's shards together, and take them."""
        shards = [local(member.param) for member in self.members]
        steps = [torch.empty_like(w, dtype=m.wide) for w, m in zip(shards, self.members, strict=True)]
        for item, content in [*self._here, *coming.wait()]:
            self._shard(item, steps[item.tensor]).copy_(content)
        self._here = []
        moved = [(w, step) for w, step in zip(shards, steps, strict=True) if w.numel()]
        if moved:
            apply([w for w, _ in moved], [step for _, step in moved])


def _sort(
    kinds: tuple[list[Item], list[Item], list[Item]], here: int, source: int, target: int, index: int, box: Box
) -> None:
    """Note a box that goes from one rank to another, as far as this rank is concerned."""
    outgoing, incoming, staying = kinds
    if source == target == here:
        staying.append(Item(here, index, box))
    elif source == here:
        outgoing.append(Item(target, index, box))
    elif target == here:
        incoming.append(Item(source, index, box))


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor; changes to it change the tensor."""
    shard = getattr(tensor, "_local_tensor", None)
    return tensor if shard is None else shard


def local_gradient(param: Tensor) -> Tensor:
    """Return what this rank holds of a gradient, sharded as the parameter is."""
    gradient: Any = param.grad
    if hasattr(param, "placements") and hasattr(gradient, "placements") and gradient.placements != param.placements:
        gradient = gradient.redistribute(placements=param.placements)
    return local(gradient)
