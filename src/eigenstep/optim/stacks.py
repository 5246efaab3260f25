"""Parameters as stacks: rectangles of one shape side by side in one tensor, and how their steps
move the weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import storage
from .diagonal import Counts, Diagonals
from .state import State

Range = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """A rectangle of a matrix, or a whole tensor, as one stack element of shape ``(blocks,
    *sizes)``.
    """

    rows: Range  # first row and the one after the last
    cols: Range  # the same for columns
    transposed: bool  # whether it is laid out transposed, so that tall and wide ones share a stack
    blocks: int  # of the longer side; they share the factor of the shorter
    sizes: tuple[int, ...]  # of the axes of one block
    full: tuple[bool, ...]  # for each axis, whether it has a basis

    @property
    def key(self) -> tuple[int, tuple[int, ...], tuple[bool, ...]]:
        """What must agree for two rectangles to be stacked."""
        return self.blocks, self.sizes, self.full

    @property
    def diagonal(self) -> bool:
        """Whether there is neither a basis nor more than one axis."""
        return self.full == (False,)

    def describe(self) -> str:
        """Say what the structure is, for people."""
        names = [
            f"{n}" if full else f"diag {n}" for n, full in zip(self.sizes, self.full, strict=True)
        ]
        if self.blocks > 1:
            names[0] = f"{self.blocks} blocks of {names[0]}"
        return " x ".join(names)


@dataclass(frozen=True)
class Plan:
    """A parameter as ``units`` equal and independent matrices or tensors, and each of them as
    rectangles.
    """

    shape: tuple[int, ...]  # the parameter's own
    units: int
    axis: int  # along which they lie in the parameter
    grain: int  # how many lie at one index of this axis, if several axes count them; otherwise 1
    matrix: tuple[int, int]  # rows and columns of a unit
    layouts: tuple[Layout, ...]  # the rectangles that make up a unit
    last: int | None = (
        None  # an axis of the parameter that comes last in its matrix, if its own last does not
    )

    @property
    def slices(self) -> int:
        """Into how many slices the parameter can be cut, so that no unit is cut."""
        return self.units // self.grain

    @property
    def key(self) -> tuple[object, ...]:
        """What agrees for parameters that can share all their stacks."""
        return tuple(layout.key for layout in self.layouts)

    def part(self, start: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...], Plan]:
        """Return where the slices ``start`` to ``stop`` begin and end in the parameter, and how
        they are laid out.
        """
        low, high = [0] * len(self.shape), list(self.shape)
        if self.shape and stop - start != self.slices:
            width = self.shape[self.axis] // self.slices
            low[self.axis], high[self.axis] = start * width, stop * width
        shape = tuple(b - a for a, b in zip(low, high, strict=True))
        return (
            tuple(low),
            tuple(high),
            replace(self, shape=shape, units=(stop - start) * self.grain),
        )

    def split(self, tensor: Tensor, index: int) -> Tensor:
        """Lay out one rectangle of every unit as a stack ``(units, blocks, *sizes)``, plus any
        trailing axis.
        """
        (rows, cols), extra = self.matrix, tensor.shape[len(self.shape) :]
        tensor = tensor if self.last is None else tensor.movedim(self.last, len(self.shape) - 1)
        if self.axis == 1:
            matrices = tensor.reshape(rows, self.units, cols, *extra).movedim(1, 0)
        else:
            matrices = tensor.reshape(self.units, rows, cols, *extra)
        layout = self.layouts[index]
        cut = matrices[:, slice(*layout.rows), slice(*layout.cols)]
        cut = cut.transpose(1, 2) if layout.transposed else cut
        return cut.reshape(len(cut), layout.blocks, *layout.sizes, *extra)

    def join(self, stacks: Sequence[Tensor]) -> Tensor:
        """Undo ``split``, given the stacks of all rectangles."""
        whole = stacks[0].new_empty(self.units, *self.matrix) if len(stacks) > 1 else stacks[0]
        for layout, stack in zip(self.layouts, stacks, strict=True):
            sides = layout.rows[1] - layout.rows[0], layout.cols[1] - layout.cols[0]
            part = (
                stack.reshape(-1, *sides[::-1]).mT
                if layout.transposed
                else stack.reshape(-1, *sides)
            )
            if len(stacks) == 1:
                whole = part
            else:
                whole[:, slice(*layout.rows), slice(*layout.cols)] = part
        whole = whole.movedim(0, 1) if self.axis == 1 else whole
        if self.last is None:
            return whole.reshape(self.shape)
        others = [n for axis, n in enumerate(self.shape) if axis != self.last]
        return whole.reshape(*others, self.shape[self.last]).movedim(-1, self.last)

    def describe(self) -> str:
        """Say what the structure is, for people."""
        if self.layouts[0].diagonal:
            return f"diag {math.prod(self.shape)}"
        counts = Counter(layout.describe() for layout in self.layouts)
        texts = [(text, count * self.units) for text, count in counts.items()]
        return " and ".join(
            text if count == 1 else f"{count} times ({text})" for text, count in texts
        )


MOST, MOST_ON_CPU = 2**22, 2**18
"""So many weights step at a time, fewer on a CPU for its cache: what is computed takes ten times
that memory.
"""
KEPT = 2**24
"""Bytes. Once so large a block was freed, glibc keeps what smaller ones leave free, up to twice as
much, for the next. Otherwise it returns to the system, which clears it for every step anew: a
twentieth of the time.
"""


class Member(NamedTuple):
    """One rectangle of every unit of a parameter."""

    param: Tensor
    plan: Plan  # how it is laid out
    part: int  # number of the rectangle, which is that of its layout in the plan

    @property
    def suffix(self) -> str:
        """What the names of its state end with."""
        return suffix(self.plan, self.part)


def suffix(plan: Plan, index: int) -> str:
    """Return what the names of the state of one layout end with; nothing if it is the only one."""
    return f".{index}" if len(plan.layouts) > 1 else ""


class Stack:
    """Rectangles of one layout, number format and device, with their state side by side in one
    tensor per name.

    The optimizer's own ``state[parameter]`` holds views into these tensors, so that checkpoints
    look as ever. Of the stack, the first ``units[0]`` elements are the first member's, and so on.
    """

    def __init__(
        self, members: Sequence[Member], states: Mapping[Tensor, State], counts: Counts
    ) -> None:
        """Gather the members' states into one, and leave views of it in ``states``; ``counts`` says
        of turned bases.
        """
        self.members, self._counts = list(members), counts
        self.units = [member.plan.units for member in members]
        if members[0].param.device.type == "cpu":
            torch.empty(KEPT, dtype=torch.uint8)
        parts = [own_state(states[member.param], member.suffix) for member in members]
        device = members[0].param.device
        self.state: State = {
            name: storage.joined([part[name] for part in parts], device) for name in parts[0]
        }
        self.packed = storage.is_packed(self.state)
        views = {name: torch.split(tensor, self.units) for name, tensor in self.state.items()}
        for at, member in enumerate(members):
            states[member.param].update(
                {name + member.suffix: view[at] for name, view in views.items()}
            )

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stack one tensor per member, each of its parameter's shape (plus any trailing axis)."""
        parts = []
        for member, tensor in zip(self.members, tensors, strict=True):
            parts.append(member.plan.split(tensor, member.part))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def turned(self) -> int:
        """Count a turn of the bases, and return its number, which is odd for all members or even
        for all.
        """
        for member in self.members:
            self._counts[member.param, member.part] += 1
        return self._counts[self.members[0].param, self.members[0].part]

    def marked(self, params: Mapping[Tensor, object]) -> list[bool]:
        """Tell of each element of the stack whether its parameter is one of those given."""
        return [
            m.param in params
            for m, units in zip(self.members, self.units, strict=True)
            for _ in range(units)
        ]


def own_state(state: Mapping[str, Tensor], end: str) -> State:
    """Return the state of one rectangle, of all that a parameter has, given what its names end
    with.
    """
    return {name.removesuffix(end): value for name, value in state.items() if name.endswith(end)}


def complete(
    stacks: Sequence[Stack | Diagonals], compute: Callable[[Stack | Diagonals], Sequence[Tensor]]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Compute what belongs to each member of a stack, and give out parameters of which nothing is
    missing, with it.
    """
    waiting: dict[Tensor, dict[int, Tensor]] = {}
    for stack in stacks:
        params, steps = [], []
        for (param, plan, index), found in zip(stack.members, compute(stack), strict=True):
            parts = waiting.setdefault(param, {})
            parts[index] = found
            if len(parts) == len(plan.layouts):
                params.append(param)
                steps.append(plan.join(list(map(parts.__getitem__, range(len(parts))))))
                del waiting[param]
        if params:
            yield params, steps


class Stacks:
    """The stacks of parameters that are stepped together, arranged anew only when others have
    gradients than before.
    """

    def __init__(self, all_stacks: Collection[Stacks], counts: Counts) -> None:
        """Start without any; parameters may come here from others of ``all_stacks``, which count
        together.
        """
        self._all, self._counts = all_stacks, counts
        self._found: list[Stack | Diagonals] = []
        self._params: list[Tensor] = []

    def arrange(
        self,
        params: list[Tensor],
        states: dict[Tensor, State],
        plan_of: Callable[[Tensor], Plan],
        create: Callable[[Tensor, Plan], State],
        together: bool = True,
    ) -> list[Stack | Diagonals]:
        """Return stacks of exactly these parameters; ``create`` makes the state of those that have
        none yet.

        Same-shaped parameters share stacks, if they may stay ``together``.
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
                end = suffix(plan, index)
                adam, formats = (
                    "scale" + end not in states[param],
                    storage.formats(states[param], end),
                )
                if (param, index) not in self._counts:  # after loading, the device must be asked
                    self._counts[param, index] = int(
                        states[param][("step" if adam else "turns") + end][0]
                    )
                # Every second turn mends bases
                kind = adam or (layout.key, self._counts[param, index] % 2)
                key: tuple[object, ...] = (kind, formats, param.dtype, param.device)
                buckets.setdefault(key if together else (*key, id(param)), []).append(
                    Member(param, plan, index)
                )
        wanted = {_ids(some): some for members in buckets.values() for some in _portions(members)}
        kept = {_ids(stack.members): stack for stack in self._found}
        leaving = [stack for ids, stack in kept.items() if ids not in wanted]
        for other in self._all:  # where a parameter was that steps here now, all is arranged anew
            if other is not self and not set(map(id, params)).isdisjoint(map(id, other._params)):
                leaving += other._found
                other._found, other._params = [], []
        for member in (
            member for stack in leaving for member in stack.members
        ):  # views would hold on to all of it
            own = own_state(states[member.param], member.suffix)
            states[member.param].update(
                {n + member.suffix: value.clone() for n, value in own.items()}
            )
        self._params, self._found = list(params), []
        for ids, some in wanted.items():
            adam = "scale" + some[0].suffix not in states[some[0].param]
            self._found.append(
                kept.get(ids) or (Diagonals if adam else Stack)(some, states, self._counts)
            )
        return self._found


def _portions(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Cut a list of members so that no part has more than ``MOST`` weights, or it has a single
    member.
    """
    most = MOST_ON_CPU if members[0].param.device.type == "cpu" else MOST
    some: list[Member] = []
    room = 0
    for member in members:
        layout = member.plan.layouts[member.part]
        size = member.plan.units * layout.blocks * math.prod(layout.sizes)
        if some and size > room and not layout.diagonal:
            yield some
            some, room = [], most
        room = (room if some else most) - size
        some.append(member)
    yield some


def _ids(members: Sequence[Member]) -> frozenset[tuple[int, int]]:
    return frozenset((id(member.param), member.part) for member in members)


def move(
    group: Mapping[str, Any],
    params: list[Tensor],
    directions: list[Tensor],
    seed: int | None = None,
) -> None:
    """Move parameters in place along, or against, directions before the learning rate, which are
    used up.

    The random numbers of stochastic rounding have a seed, or come from torch's global generator.
    """
    lr, weight_decay = group["lr"], group["weight_decay"]
    lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
    weight_decay = weight_decay.reshape(()) if isinstance(weight_decay, Tensor) else weight_decay
    rounding = group["stochastic_rounding"] and params[0].dtype == torch.bfloat16
    along, shrink = lr if group["maximize"] else -lr, lr * weight_decay
    if rounding or group["cautious_weight_decay"] or isinstance(along, Tensor):
        torch._foreach_mul_(directions, along)
        along = 1.0
    if rounding:
        generator = None if seed is None else torch.Generator(params[0].device).manual_seed(seed)
        for param, direction in zip(params, directions, strict=True):
            decay = shrink * _decaying(param, direction, group["cautious_weight_decay"]).float()
            add_stochastically(param, direction - decay, generator)
        return
    if group["cautious_weight_decay"]:
        for param, direction in zip(params, directions, strict=True):
            direction.sub_(shrink * _decaying(param, direction, True))
    elif (
        isinstance(weight_decay, Tensor) or weight_decay
    ):  # the value of a tensor is for the device alone
        torch._foreach_mul_(params, 1 - shrink)
    torch._foreach_add_(params, directions, alpha=along)


def _decaying(param: Tensor, step: Tensor, cautious: bool) -> Tensor:
    """Return the parameter, with zeros where the step itself does not lead toward zero if that is
    asked for.
    """
    return torch.where(param * step <= 0, param, 0) if cautious else param


def add_stochastically(
    param: Tensor, addend: Tensor, generator: torch.Generator | None = None
) -> None:
    """Add to a bfloat16 tensor in place, rounding up or down at random with the right mean."""
    exact = (param.float() + addend).float()
    # bfloat16 is the upper half of float32: adding random lower bits before cutting them off rounds
    # at random.
    noise = torch.randint(
        1 << 16, exact.shape, generator=generator, dtype=torch.int32, device=exact.device
    )
    bits = (exact.view(torch.int32) + noise) & -65536
    param.copy_(bits.view(torch.float32))
