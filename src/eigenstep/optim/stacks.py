"""What is stepped together: rectangles of one shape, side by side in one tensor, and parameters without bases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .diagonal import Counts, Diagonals
from .layout import Plan
from .state import State

Create = Callable[[Tensor, Plan], State]
"""Makes the state of a parameter that has none yet."""


class Member(NamedTuple):
    """One rectangle of every unit of a parameter.

    Attributes:
        param: the parameter.
        plan: how it is laid out.
        part: number of the rectangle, which is that of its layout in the plan.
    """

    param: Tensor
    plan: Plan
    part: int

    @property
    def suffix(self) -> str:
        """What the names of its state end with."""
        return suffix(self.plan, self.part)


def suffix(plan: Plan, index: int) -> str:
    """Return what the names of the state of one layout end with; nothing if it is the only one."""
    return f".{index}" if len(plan.layouts) > 1 else ""


class Stack:
    """Rectangles of one layout, number format and device, with their state side by side in one tensor per name.

    The optimizer's own ``state[parameter]`` holds views into these tensors, so that checkpoints look as ever.
    """

    def __init__(self, members: Sequence[Member], states: Mapping[Tensor, State]) -> None:
        """Gather the members' states into one, and leave views of it with each.

        Args:
            members: the rectangles.
            states: the optimizer's state, one dictionary for each parameter.
        """
        self.members = list(members)
        self._units = [member.plan.units for member in members]
        parts = [own_state(states[member.param], member) for member in members]
        self.state: State = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        views = {name: torch.split(tensor, self._units) for name, tensor in self.state.items()}
        for at, member in enumerate(members):
            states[member.param].update({name + member.suffix: view[at] for name, view in views.items()})

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stack one tensor per member, each of its parameter's shape (plus any trailing axis)."""
        parts = [member.plan.split(x, member.part) for member, x in zip(self.members, tensors, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def marked(self, params: Mapping[Tensor, object]) -> list[bool]:
        """Tell of each element of the stack whether its parameter is one of those given."""
        return [m.param in params for m, units in zip(self.members, self._units, strict=True) for _ in range(units)]

    def parts(self, stacked: Tensor) -> Sequence[Tensor]:
        """Return what belongs to each member."""
        return (stacked,) if len(self.members) == 1 else torch.split(stacked, self._units)


def own_state(state: Mapping[str, Tensor], member: Member) -> State:
    """Return the state of one rectangle, of all that a parameter has."""
    end = member.suffix
    return (
        {name.removesuffix(end): value for name, value in state.items() if name.endswith(end)} if end else dict(state)
    )


def complete(
    stacks: Sequence[Stack | Diagonals], compute: Callable[[Stack | Diagonals], Sequence[Tensor]]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Compute stack by stack, and give out the parameters of which nothing is missing, with their steps.

    Args:
        stacks: what to step.
        compute: returns what belongs to each member of a stack.
    """
    waiting: dict[Tensor, dict[int, Tensor]] = {}
    for stack in stacks:
        params, steps = [], []
        for (param, plan, index), found in zip(stack.members, compute(stack), strict=True):
            parts = waiting.setdefault(param, {})
            parts[index] = found
            if len(parts) == len(plan.layouts):
                params.append(param)
                steps.append(plan.join([parts[at] for at in range(len(parts))]))
                del waiting[param]
        if params:
            yield params, steps


class Stacks:
    """The stacks of parameters that are stepped together, arranged anew only when others have gradients than before."""

    def __init__(self) -> None:
        """Start without any."""
        self._found: list[Stack | Diagonals] = []
        self._params: list[Tensor] = []
        self._counts: Counts = {}

    def arrange(
        self,
        params: list[Tensor],
        states: dict[Tensor, State],
        plan_of: Callable[[Tensor], Plan],
        create: Create,
        together: bool = True,
    ) -> list[Stack | Diagonals]:
        """Return stacks of exactly these parameters.

        Args:
            params: those that have gradients now.
            states: the optimizer's state, one dictionary for each parameter.
            plan_of: tells how a parameter is laid out.
            create: makes the state of a parameter that has none yet.
            together: whether same-shaped parameters share a stack.
        """
        if list(map(id, params)) == list(map(id, self._params)):
            return self._found
        buckets: dict[tuple[object, ...], list[Member]] = {}
        for param in params:
            plan = plan_of(param)
            if not states[param]:
                states[param].update(create(param, plan))
                self._counts.update({(param, part): 0 for part in range(len(plan.layouts))})
            for index, layout in enumerate(plan.layouts):
                adam = "scale" + suffix(plan, index) not in states[param]
                key: tuple[object, ...] = (adam or layout.key, param.dtype, param.device)
                buckets.setdefault(key if together else (*key, id(param)), []).append(Member(param, plan, index))
        wanted = {_ids(members): members for members in buckets.values()}
        kept = {_ids(stack.members): stack for stack in self._found}
        for ids, stack in kept.items():
            if ids not in wanted:
                # Views would hold on to the whole stack for the sake of a part.
                for member in stack.members:
                    own = own_state(states[member.param], member)
                    states[member.param].update({n + member.suffix: value.clone() for n, value in own.items()})
        self._params = list(params)
        self._found = [kept.get(ids) or self._stack(members, states) for ids, members in wanted.items()]
        return self._found

    def _stack(self, members: Sequence[Member], states: Mapping[Tensor, State]) -> Stack | Diagonals:
        adam = "scale" + members[0].suffix not in states[members[0].param]
        return Diagonals(members, states, self._counts) if adam else Stack(members, states)


def _ids(members: Sequence[Member]) -> frozenset[tuple[int, int]]:
    return frozenset((id(member.param), member.part) for member in members)
