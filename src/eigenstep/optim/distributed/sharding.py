"""Spectral on many processes: which rank steps what, where gradients meet, and how the steps come back.

Every rank is the owner of some matrices, or of some pieces of very large ones: it alone keeps their state and computes
their steps. Owners are chosen greedily so that matrix products, memory and bytes to send are balanced.

- Replicated parameters (DDP): all ranks have the same gradient. The owner changes its weights, and then every rank gets
  them from their owners by all-gather, so that all ranks end with the same bits.
- Sharded parameters (FSDP2, HSDP, tensor parallelism): the shards of a gradient go to the owner by all-to-all; the
  owner computes the step, and its shards go back to the ranks that hold those of the weights.

Both happen in rounds of some megabytes: while one round is computed, gradients of the next and steps of the last are on
their way. All ranks call the same collectives in the same order, which follows from what all know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import Layout
from ..options import GO
from . import agreement
from .collectives import Apply, ReplicatedRound, Round, ShardedRound, local, local_gradient
from .exchange import Box, Pending
from .ownership import Member, balance, parts_of

__all__ = ["OFF", "Candidate", "Sharding", "describe", "is_sharded", "local_gradient", "wanted"]

ROUND_BYTES = 64 * 2**20
"""About how much a rank steps in one round."""

OFF = "or pass distributed=False to step all parameters on every rank"

Directions = Callable[[list[Tensor], list[Tensor], int], list[Tensor]]


@dataclass(frozen=True)
class Candidate:
    """A parameter that needs owners.

    Attributes:
        param: the parameter.
        layout: layout of the whole parameter.
        costs: operations, bytes of state, ... of stepping one piece; each is balanced over the ranks.
        wide: number format of its steps.
        description: what ``describe`` says of it.
    """

    param: Tensor
    layout: Layout
    costs: tuple[float, ...]
    wide: torch.dtype
    description: tuple[Any, ...]


class Sharding:
    """The parameters of an optimizer, by the group of ranks that share them."""

    def __init__(self) -> None:
        """Start without parameters."""
        self._teams: dict[dist.ProcessGroup, Team] = {}
        self._team_of: dict[Tensor, Team] = {}
        self._members: dict[Tensor, tuple[Team, Member]] = {}

    def __contains__(self, param: Tensor) -> bool:
        """Tell whether a parameter has owners."""
        return param in self._members

    def agree(
        self,
        groups: Sequence[Mapping[str, Any]],
        verdict: int | Tensor,
        candidates: Mapping[Tensor, Candidate],
    ) -> int:
        """Take part in the decision on a step, and give parameters owners; all ranks must call this before every step.

        Args:
            groups: the optimizer's parameter groups.
            verdict: what this rank says to the step.
            candidates: parameters that have no owners yet.

        Returns:
            The verdict of all.
        """
        teams = self._all_teams(groups)
        device = local(groups[0]["params"][0]).device
        admitted, unsure = [], []
        error: ValueError | None = None
        for team in teams:
            said = agreement.statement(groups, lambda p: self._team_of.get(p) is team, set(candidates))  # noqa: B023
            verdict, again = team.vote(verdict, said, teams, device)
            found = [c for param, c in candidates.items() if self._team_of[param] is team]
            if found and verdict == GO:
                try:
                    admitted.append((team, found, team.compare(found)))
                except ValueError as mistake:
                    error, verdict = mistake, agreement.REFUSED + dist.get_rank()
            if again:
                unsure.append(team)
        for team in unsure:
            verdict, _ = team.vote(verdict, {}, [], device)
        if error is not None:
            raise error
        if verdict == GO:
            for team, found, boxes in admitted:
                self._members.update((member.param, (team, member)) for member in team.admit(found, boxes))
        return int(verdict)

    def _all_teams(self, groups: Iterable[Mapping[str, Any]]) -> list[Team]:
        """Return the teams of all parameters, in an order in which nobody waits for ever.

        Small ones come first: what goes wrong in them can then be told to the larger ones.
        """
        for group in groups:
            for param in group["params"]:
                if param not in self._team_of and param.numel():
                    ranks = _group(param)
                    self._team_of[param] = self._teams.setdefault(ranks, Team(ranks))
        return sorted(self._teams.values(), key=Team.place)

    def part(self, param: Tensor) -> tuple[int, int, Layout]:
        """Return what this rank steps of a parameter: its first piece, the number of all pieces, and the layout."""
        team, member = self._members[param]
        total = member.parts[-1].stop
        part = member.part_of(team.rank)
        return (0, total, member.parts[0].layout.part(0, 0)) if part is None else (part.start, total, part.layout)

    def layout(self, param: Tensor) -> Layout:
        """Return how this rank's part of a parameter is laid out."""
        return self.part(param)[2]

    def step(self, params: Sequence[Tensor], directions: Directions, apply: Apply) -> None:
        """Step parameters.

        Args:
            params: those that have gradients.
            directions: computes steps, given the parameters of which this rank steps a part, the gradients of these
                parts, and a number that tells rounds apart.
            apply: moves tensors along steps.
        """
        teams: dict[Team, list[Member]] = {}
        for param in params:
            team, member = self._members[param]
            teams.setdefault(team, []).append(member)
        for team in sorted(teams, key=Team.place):
            team.step(teams[team], directions, apply)


class Team:
    """The ranks of a process group and the parameters that they share."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Start without parameters."""
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._loads: Any = 0.0
        self._rounds: dict[tuple[int, ...], list[Round]] = {}

    def place(self) -> tuple[Any, ...]:
        """Return what puts all teams of all ranks into one order."""
        return self.size, self.ranks, self.group.group_name

    def vote(
        self, verdict: int | Tensor, said: Mapping[str, int | Tensor], teams: Sequence[Team], device: torch.device
    ) -> tuple[int, bool]:
        """Return the verdict of all ranks of the team, and whether they will vote once more.

        Args:
            verdict: what this rank says so far.
            said: digests of what must be the same on all of them; none if that was settled before.
            teams: all teams of this rank, in their order.
            device: where its tensors are.
        """
        # Of what goes wrong in a later team, the ranks that are not part of that team must hear, too.
        later = teams[teams.index(self) + 1 :] if self in teams else []
        again = any(not set(self.ranks).issubset(team.ranks) for team in later)
        sent = agreement.ballot(verdict, again, said, device)
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=self.group)
        return agreement.count(sent.tolist())

    def compare(self, candidates: Sequence[Candidate]) -> list[list[Box]]:
        """Return what each rank holds of each parameter; raise on all ranks if something does not fit together."""
        known: list[list[tuple[Any, ...]]] = [[]] * self.size
        dist.all_gather_object(known, [c.description for c in candidates], group=self.group)
        _check_alike(known)
        boxes = [[Box(*rank[index][2]) for rank in known] for index in range(len(candidates))]
        for c, held in zip(candidates, boxes, strict=True):
            _check_shards(Member(c.param, c.wide, held, []))
        return boxes

    def admit(self, candidates: Sequence[Candidate], boxes: Sequence[list[Box]]) -> list[Member]:
        """Choose owners of more parameters, given what each rank holds, and what it has to do already."""
        tasks = [
            (c.layout.pieces, c.costs) if c.layout.cut_axis is not None else (1, [c.layout.pieces * x for x in c.costs])
            for c in candidates
        ]
        counts, self._loads = balance(tasks, self._loads, self.size)
        members = []
        for c, held, count in zip(candidates, boxes, counts, strict=True):
            if c.layout.cut_axis is None:
                count = [c.layout.pieces * number for number in count]
            members.append(Member(c.param, c.wide, held, parts_of(c.layout, count)))
        return members

    def step(self, members: Sequence[Member], directions: Directions, apply: Apply) -> None:
        """Step parameters, round by round."""
        key = tuple(map(id, members))
        if key not in self._rounds:
            self._rounds[key] = self._plan(members)
        rounds = self._rounds[key]
        gradients = rounds[0].send_gradients()
        last: tuple[Round, Pending] | None = None
        for tag, now in enumerate(rounds):
            own = now.own_gradients(gradients)
            gradients = rounds[tag + 1].send_gradients() if tag + 1 < len(rounds) else None
            steps = directions([now.members[index].param for index in own], list(own.values()), tag) if own else []
            sent = now.send_steps(dict(zip(own, steps, strict=True)), apply)
            if last is not None:
                last[0].receive_steps(last[1], apply)
            last = now, sent
        if last is not None:
            last[0].receive_steps(last[1], apply)

    def _plan(self, members: Sequence[Member]) -> list[Round]:
        """Divide parameters into rounds; those that can be stepped in one batch stay together."""
        kinds: dict[Any, list[Member]] = {}
        for member in members:
            kind = member.replicated, member.param.dtype, member.wide, local(member.param).device
            kinds.setdefault(kind, []).append(member)
        rounds: list[Round] = []
        for (replicated, *_), found in kinds.items():
            round_type = ReplicatedRound if replicated else ShardedRound
            some: list[Member] = []
            size = 0
            for member in sorted(found, key=lambda m: (m.parts[0].layout.key, m.wide.itemsize)):
                bytes_now = member.param.numel() * member.wide.itemsize
                if some and size + bytes_now > ROUND_BYTES * self.size:
                    rounds.append(round_type(some, self.group))
                    some, size = [], 0
                some.append(member)
                size += bytes_now
            rounds.append(round_type(some, self.group))
        return rounds


def wanted(params: Iterable[Tensor]) -> bool:
    """Tell whether there are other ranks to work with, or parameters that only all ranks together have."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size() > 1 or any(map(is_sharded, params))


def is_sharded(param: Tensor) -> bool:
    """Tell whether a parameter is a DTensor."""
    return hasattr(param, "device_mesh")


def _group(param: Any) -> dist.ProcessGroup:
    """Return the ranks that share a parameter."""
    world = dist.group.WORLD
    assert world is not None
    if not is_sharded(param) or param.device_mesh.size() == dist.get_world_size():
        return world
    mesh = param.device_mesh
    group: dist.ProcessGroup = (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
    return group


def describe(param: Any) -> tuple[Any, ...]:
    """Return what ranks must know of each other: shape, number format, what is held, and check sums of replicas."""
    shape = tuple(param.shape)
    if is_sharded(param):
        if any(placement.is_partial() for placement in param.placements):
            raise ValueError(f"a DTensor parameter of shape {shape} must be sharded or replicated, not a partial sum")
        (chunk,) = param.__create_chunk_list__()
        start, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        return shape, str(param.dtype), (start, tuple(a + n for a, n in zip(start, sizes, strict=True))), None, None
    gradient = None if param.grad is None else param.grad.abs().sum(dtype=torch.float64).item()
    # Parameters without numbers, of a cost model for instance, have no check sum.
    weights = None if param.is_meta else param.abs().sum(dtype=torch.float64).item()
    return shape, str(param.dtype), ((0,) * len(shape), shape), weights, gradient


def _check_alike(known: Sequence[Sequence[tuple[Any, ...]]]) -> None:
    """Raise unless the ranks have the same parameters, and the same weights and gradients in what is replicated."""
    first = known[0]
    for rank, other in enumerate(known):
        if [item[:2] for item in other] != [item[:2] for item in first]:
            raise ValueError(
                f"ranks 0 and {rank} have different parameters, so they cannot share the work: give the optimizer the "
                f"same parameters in the same order on all ranks, {OFF}"
            )
        for index, (mine, theirs) in enumerate(zip(first, other, strict=True)):
            for name, at, tolerance in (("weights", 3, 1e-6), ("gradients", 4, 1e-3)):
                if (mine[at] is None) != (theirs[at] is None):
                    raise ValueError(f"ranks 0 and {rank} do not both have a gradient for parameter {index}")
                if mine[at] is not None and abs(mine[at] - theirs[at]) > tolerance * (abs(mine[at]) + abs(theirs[at])):
                    raise ValueError(
                        f"ranks 0 and {rank} have different {name} for parameter {index} of shape {mine[0]}: wrap the "
                        f"model in DistributedDataParallel or fully_shard, {OFF}"
                    )


def _check_shards(member: Member) -> None:
    """Raise unless the shards of a parameter make up the whole, once."""
    boxes = [box for box in member.holders if box.numel]
    placements = getattr(member.param, "placements", ())
    strided = any(type(placement).__name__ == "_StridedShard" for placement in placements)
    overlap = strided and any(a.common(b) for i, a in enumerate(boxes) for b in boxes[:i])
    if overlap or sum(box.numel for box in boxes) != member.param.numel():
        raise ValueError(
            f"the shards of a DTensor parameter of shape {tuple(member.param.shape)} must be contiguous parts that "
            f"make up the whole, which is not so with the placements {placements}"
        )
