"""Spectral on many processes: which rank steps what, where gradients meet, and how the steps come
back.

Every rank is the owner of some matrices, or of some slices of very large ones: it alone keeps their
state and computes their steps. Owners are chosen greedily so that matrix products, memory and bytes
to send are balanced.

- Replicated parameters (DDP): all ranks have the same gradient. The owner changes its weights, and
  then every rank gets them from their owners by all-gather, so that all ranks end with the same
  bits.
- Sharded parameters (FSDP2, HSDP, tensor parallelism): the shards of a gradient go to the owner by
  all-to-all; the owner computes the step, and its shards go back to the ranks that hold those of
  the weights.

Both happen in rounds of some megabytes: while one round is computed, gradients of the next and
steps of the last are on their way. All ranks call the same collectives in the same order, which
follows from what all know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..inspect import candidate_of
from ..options import GO, initial_state
from ..stacks import Plan
from ..state import State
from . import agreement
from .collectives import Apply, Pending, ReplicatedRound, Round, ShardedRound, local
from .ownership import (
    Box,
    Candidate,
    Member,
    balance,
    check_alike,
    check_shards,
    group_of,
    parts_of,
)
from .sharded_state import own_part

ROUND_BYTES = 64 * 2**20
"""About how much a rank steps in one round."""

MISSING = (
    "ranks {} have none of the parameters that this rank shares with them, so they cannot step "
    "together: give the "
    "optimizer the same parameters on all ranks of their device mesh"
)
Groups = Sequence[dict[str, Any]]
Directions = Callable[[list[Tensor], list[Tensor], int], list[Tensor]]
"""Computes steps, given parameters of which this rank steps a part, the parts' gradients, and the
number of a round.
"""


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

    def begin(
        self,
        groups: Groups,
        states: Mapping[Tensor, State],
        look: Callable[[], Any],
        name: Callable[[Tensor], str],
    ) -> tuple[Any, Any, int]:
        """Decide with all other ranks on a step, and give new parameters owners; raise on all if
        one cannot take it.

        Args: groups: the optimizer's parameter groups. states: the optimizer's state. look: checks
            the gradients of this rank; returns what the step needs and its verdict, or raises an
            error. name: tells a parameter's name.

        Returns:
            What ``look`` returned, but with the verdict of all ranks.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return *look()[
                :2
            ], GO  # the ranks were compared before; replaying a graph runs nothing of this
        error: Exception | None = None
        candidates: dict[Tensor, Candidate] = {}
        work = samples = None
        try:
            work, samples, verdict = look()
            candidates = {
                param: candidate_of(group, param)
                for group in groups
                for param in group["params"]
                if param not in self
                and param.numel()
                and (param.requires_grad or param.grad is not None)
            }
        except Exception as mistake:
            error, verdict = mistake, agreement.REFUSED + dist.get_rank()
        verdict = self._agree(groups, GO if verdict is None else verdict, candidates)
        if error is not None:
            raise error
        if verdict >= agreement.DIFFERENT:
            raise ValueError(agreement.sentence(verdict))
        if verdict == GO:
            for group in groups:
                for param in candidates.keys() & set(group["params"]):
                    own = states[param] or initial_state(group, param, self.plan(param))
                    states[param].update(self.own_state(own, param, name(param)))
        return work, samples, verdict

    def _agree(
        self, groups: Groups, verdict: int | Tensor, candidates: Mapping[Tensor, Candidate]
    ) -> int:
        """Return the verdict of all ranks, and give candidates owners if it is to go."""
        teams = self._all_teams(groups)
        device = local(groups[0]["params"][0]).device
        admitted, unsure = [], []
        error: ValueError | None = None
        for team in teams:
            if missing := team.absent():
                error, verdict = (
                    ValueError(MISSING.format(missing)),
                    agreement.REFUSED + dist.get_rank(),
                )
                continue
            shared = {param for param, other in self._team_of.items() if other is team}
            said = agreement.statement(groups, shared.__contains__, set(candidates))
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
                self._members.update(
                    (member.param, (team, member)) for member in team.admit(found, boxes)
                )
        return int(verdict)

    def _all_teams(self, groups: Groups) -> list[Team]:
        """Return the teams of all parameters, in an order in which nobody waits for ever.

        Small ones come first: what goes wrong in them can then be told to the larger ones.
        """
        for param in (param for group in groups for param in group["params"]):
            if param not in self._team_of and param.numel():
                ranks = group_of(param)
                self._team_of[param] = self._teams.setdefault(ranks, Team(ranks))
        return sorted(self._teams.values(), key=Team.place)

    def units(self, param: Tensor) -> tuple[int, int, Plan]:
        """Return what this rank steps of a parameter: its first unit, the number of all units, and
        the layout.
        """
        team, member = self._members[param]
        mine = [(part.start, part.plan) for part in member.parts if part.owner == team.rank]
        start, plan = mine[0] if mine else (0, member.parts[0].plan.part(0, 0)[2])
        return start * plan.grain, member.parts[-1].stop * plan.grain, plan

    def plan(self, param: Tensor) -> Plan:
        """Return how this rank's part of a parameter is laid out."""
        return self.units(param)[2]

    def own_state(self, state: Mapping[str, Tensor], param: Tensor, name: str) -> State:
        """Return the state of the units of a parameter that are stepped here, with the same names
        on all ranks.
        """
        start, total, plan = self.units(param)
        return {
            key: own_part(tensor, start, plan.units, total, name) for key, tensor in state.items()
        }

    def step(
        self,
        params: Sequence[Tensor],
        arranged: Callable[..., Any],
        compute: Callable[..., Iterable[tuple[list[Tensor], list[Tensor]]]],
        apply: Apply,
    ) -> None:
        """Step parameters.

        Args: params: those that have gradients. arranged: puts parameters into stacks, given a
            number that tells rounds apart. compute: computes the steps of stacks, given gradients
            by parameter, and gives out what is complete. apply: moves tensors along steps.
        """

        def directions(own: list[Tensor], gradients: list[Tensor], tag: int) -> list[Tensor]:
            given, found = dict(zip(own, gradients, strict=True)), dict[Tensor, Tensor]()
            for complete, steps in compute(stacks=arranged(own, tag), gradients=given):
                found.update(zip(complete, steps, strict=True))
            return [found[param] for param in own]

        teams: dict[Team, list[Member]] = {}
        for team, member in map(self._members.__getitem__, params):
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
        self._complete = False
        self._rounds: dict[tuple[int, ...], list[Round]] = {}

    def place(self) -> tuple[Any, ...]:
        """Return what puts all teams of all ranks into one order."""
        return self.size, self.ranks, self.group.group_name

    def absent(self) -> list[int]:
        """Return the ranks of the team that step other parameters but none of the team's."""
        missing = [] if self._complete else agreement.absent(self.group)
        self._complete = not missing
        return missing

    def vote(
        self,
        verdict: int | Tensor,
        said: Mapping[str, int | Tensor],
        teams: Sequence[Team],
        device: torch.device,
    ) -> tuple[int, bool]:
        """Return the verdict of all ranks of the team, and whether they will vote once more."""
        # Of what goes wrong in a later team, the ranks that are not part of that team must hear,
        # too.
        later = teams[teams.index(self) + 1 :] if self in teams else []
        again = any(not set(self.ranks).issubset(team.ranks) for team in later)
        return agreement.vote(verdict, again, said, device, self.group)

    def compare(self, candidates: Sequence[Candidate]) -> list[list[Box]]:
        """Return what each rank holds of each parameter; raise on all ranks if something does not
        fit together.
        """
        known: list[list[tuple[Any, ...]]] = [[]] * self.size
        dist.all_gather_object(known, [c.description for c in candidates], group=self.group)
        check_alike(known)
        boxes = [[Box(*rank[index][2]) for rank in known] for index in range(len(candidates))]
        for c, held in zip(candidates, boxes, strict=True):
            check_shards(c.param, held)
        return boxes

    def admit(self, candidates: Sequence[Candidate], boxes: Sequence[list[Box]]) -> list[Member]:
        """Choose owners of more parameters, given what each rank holds, and what it has to do
        already.
        """
        counts, self._loads = balance(
            [(c.plan.slices, c.costs) for c in candidates], self._loads, self.size
        )
        return [
            Member(c.param, c.wide, held, parts_of(c.plan, count))
            for c, held, count in zip(candidates, boxes, counts, strict=True)
        ]

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
            steps = (
                directions([now.members[index].param for index in own], list(own.values()), tag)
                if own
                else []
            )
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
            replicated = len(member.holders) == 1  # every rank holds everything
            kind = replicated, member.param.dtype, member.wide, local(member.param).device
            kinds.setdefault(kind, []).append(member)
        rounds: list[tuple[bool, list[Member]]] = []
        for (replicated, *_), found in kinds.items():
            left = 0
            for member in sorted(found, key=lambda m: m.parts[0].plan.key):
                size = member.param.numel() * member.wide.itemsize
                if size > left:
                    rounds.append((replicated, []))
                    left = ROUND_BYTES * self.size
                rounds[-1][1].append(member)
                left -= size
        return [
            (ReplicatedRound if whole else ShardedRound)(some, self.group) for whole, some in rounds
        ]
