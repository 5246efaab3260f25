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

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..formats import State, initial_state
from ..layout import Plan
from ..options import Options
from . import agreement
from .collectives import Apply, Pending, ReplicatedRound, Round, ShardedRound, local
from .ownership import (
    Box,
    Candidate,
    Member,
    balance,
    candidate_of,
    check_alike,
    check_shards,
    group_of,
    parts_of,
)
from .sharded_state import own_part

if TYPE_CHECKING:
    from ..spectral import Work

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


Known = Sequence[tuple[dict[str, Any], Options]]


class Talk:
    """How far ranks have come in deciding on a step."""

    def __init__(self, verdict: int | Tensor) -> None:
        """Begin with the verdict of this rank."""
        self.verdict = verdict
        self.error: ValueError | None = None
        self.unsure: list[Team] = []  # teams that vote once more
        self.admitted: list[tuple[Team, list[Candidate], list[list[Box]]]] = []

    def refuse(self, error: ValueError) -> None:
        """Take down that this rank cannot take the step."""
        self.error = error
        self.verdict = agreement.REFUSED + dist.get_rank()


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
        check: Callable[[], Work],
        name: Callable[[Tensor], str],
    ) -> Work:
        """Decide with all other ranks on a step, and give new parameters owners.

        If one rank cannot take the step, all raise an error.

        Args:
            groups: the optimizer's parameter groups.
            states: the optimizer's state.
            check: checks the gradients of this rank, and returns its work or raises an error.
            name: tells a parameter's name.

        Returns:
            The work, with the verdict of all ranks.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            # The ranks were compared before; replaying a graph runs nothing of this.
            return check()._replace(verdict=agreement.GO)
        error: Exception | None = None
        candidates: dict[Tensor, Candidate] = {}
        known: Known = []
        verdict: int | Tensor
        try:
            work = check()
            verdict = work.verdict
            known = [(group, options) for group, options, _ in work.groups]
            candidates = self._candidates(work)
        except Exception as mistake:
            error = mistake
            verdict = agreement.REFUSED + dist.get_rank()
        verdict = self._agree(groups, known, verdict, candidates)
        if error is not None:
            raise error
        if verdict >= agreement.DIFFERENT:
            raise ValueError(agreement.sentence(verdict))
        if verdict == agreement.GO:
            self._create_states(work, states, candidates, name)
        return work._replace(verdict=verdict)

    def _candidates(self, work: Work) -> dict[Tensor, Candidate]:
        """Return the parameters that need owners."""
        candidates = {}
        for group, options, _ in work.groups:
            for param in group["params"]:
                trained = param.requires_grad or param.grad is not None
                if trained and param.numel() and param not in self:
                    candidates[param] = candidate_of(options, param)
        return candidates

    def _create_states(
        self,
        work: Work,
        states: Mapping[Tensor, State],
        candidates: Collection[Tensor],
        name: Callable[[Tensor], str],
    ) -> None:
        """Give parameters that have owners now the state of what is stepped here."""
        for group, options, _ in work.groups:
            for param in set(group["params"]).intersection(candidates):
                state = states[param]
                if not state:
                    plan = self.plan(param)
                    state = initial_state(options, plan, param.dtype, local(param).device)
                states[param].update(self.own_state(state, param, name(param)))

    def _agree(
        self,
        groups: Groups,
        known: Known,
        verdict: int | Tensor,
        candidates: Mapping[Tensor, Candidate],
    ) -> int:
        """Return the verdict of all ranks, and give candidates owners if it is to go.

        ``known`` are the groups with their options, or none if this rank refuses.
        """
        teams = self._all_teams(groups)
        device = local(groups[0]["params"][0]).device
        talk = Talk(verdict)
        for team in teams:
            missing = team.absent()
            if missing:
                talk.refuse(ValueError(MISSING.format(missing)))
            else:
                self._talk_to(team, teams, talk, known, candidates)
        for team in talk.unsure:
            talk.verdict, _ = team.vote(talk.verdict, {}, [], device)
        if talk.error is not None:
            raise talk.error
        self._admit(talk)
        return int(talk.verdict)

    def _admit(self, talk: Talk) -> None:
        """Give parameters owners, if all ranks agreed on them."""
        if talk.verdict != agreement.GO:
            return
        for team, own, boxes in talk.admitted:
            for member in team.admit(own, boxes):
                self._members[member.param] = (team, member)

    def _talk_to(
        self,
        team: Team,
        teams: Sequence[Team],
        talk: Talk,
        known: Known,
        candidates: Mapping[Tensor, Candidate],
    ) -> None:
        """Vote with one team, and compare what its ranks hold of new parameters."""
        shared = {param for param, other in self._team_of.items() if other is team}
        device = local(next(iter(shared))).device
        said = agreement.statement(known, shared, set(candidates))
        talk.verdict, again = team.vote(talk.verdict, said, teams, device)
        own = [c for param, c in candidates.items() if self._team_of[param] is team]
        if own and talk.verdict == agreement.GO:
            try:
                talk.admitted.append((team, own, team.compare(own)))
            except ValueError as mistake:
                talk.refuse(mistake)
        if again:
            talk.unsure.append(team)

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

    def step(self, params: Sequence[Tensor], compute: Directions, apply: Apply) -> None:
        """Step parameters.

        Args:
            params: those that have gradients.
            compute: returns the steps of what this rank owns in one round.
            apply: moves tensors along steps.
        """
        teams: dict[Team, list[Member]] = {}
        for param in params:
            team, member = self._members[param]
            teams.setdefault(team, []).append(member)
        for team in sorted(teams, key=Team.place):
            team.step(teams[team], compute, apply)


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
