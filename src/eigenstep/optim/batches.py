"""Equal-shaped matrices side by side in one tensor, and many small vectors in one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import formats, vector
from .formats import State
from .layout import Layout, Plan
from .matrix import GivenCurvature, Matrices, MatrixState
from .options import Options, interval_at
from .user_curvature import equal_vectors

MOST = 2**22
MOST_ON_CPU = 2**18
"""This many weights step at a time, fewer on a CPU for its cache: what is computed takes ten times
their memory.
"""
KEPT = 2**24
"""Bytes. Freeing one block of this size makes glibc keep later, smaller blocks instead of returning
them to the system, which would clear them anew for every step (5 % of its time).
"""
CHUNK = 2**18
"""A CPU steps this many entries of vectors at a time: what is computed stays in its cache."""


EARLY = 100
"""Eigenvectors change ever more slowly: gaps between turns start at one step, and grow by one in
so many steps. Bases are mended at every turn in the first so many steps.
"""


def turns_at(options: Options, count: int) -> bool:
    """Tell whether bases turn after so many steps. Schedules are followed to the letter."""
    if isinstance(options.interval, int):
        return count % min(options.interval, 1 + count // EARLY) == 0
    return count % interval_at(options.interval, count) == 0


def mends_at(options: Options, count: int, turns: int) -> bool:
    """Tell whether bases are mended at a turn: every second time, wherever that is enough.

    Quadratic maps of generators of a norm up to 0.5 stretch bases by at most
    ``sqrt(1 + 4 |N|^4)``, two turns by 1.25, and Newton-Schulz steps come back from below
    ``sqrt(3)``. Other maps are exact enough to be held to it or the user's own; a CUDA graph
    repeats one step for ever. ``turns`` counts those of the parameter.
    """
    if not options.turning.mend:
        return False
    always = options.turning.map != "quadratic" or options.capturable
    early = isinstance(options.interval, int) and count < EARLY
    return always or early or turns % 2 == 0


class Moment(NamedTuple):
    """Where in its course a parameter group is."""

    steps: int  # taken before
    turn: bool  # whether bases turn now


class Arithmetic(NamedTuple):
    """How matrices step: the class, and the program that steps it, which may be compiled."""

    kind: type[Matrices]
    program: Callable[..., Tensor]


class Member(NamedTuple):
    """One rectangle of every unit of a parameter."""

    param: Tensor
    plan: Plan  # how it is laid out
    part: int  # number of the rectangle, which is that of its layout in the plan

    @property
    def layout(self) -> Layout:
        """How the rectangle lies in a batch."""
        return self.plan.layouts[self.part]

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.plan.units * self.layout.entries

    @property
    def whole(self) -> bool:
        """Whether the rectangle is all of the parameter."""
        return len(self.plan.layouts) == 1


class Clock:
    """How often bases turned and vectors stepped, as the host knows it without asking the device.

    The state has the same numbers on the device, where the arithmetic needs them.
    """

    def __init__(self) -> None:
        """Start without members."""
        self._counts: dict[tuple[Tensor, int], int] = {}

    def __getitem__(self, member: Member) -> int:
        """Return the count of a member."""
        return self._counts[member.param, member.part]

    def read(self, member: Member, tensors: Mapping[str, Tensor]) -> int:
        """Return the count of a member, asking the device if the host does not know it."""
        key = (member.param, member.part)
        if key not in self._counts:
            name = "turns" if formats.is_matrix(tensors) else "step"
            self._counts[key] = int(tensors[name][0])
        return self._counts[key]

    def start(self, member: Member) -> None:
        """Count a new member from zero."""
        self._counts[member.param, member.part] = 0

    def advance(self, members: Sequence[Member]) -> int:
        """Count a turn or step of all members, and return its number for the first."""
        for member in members:
            self._counts[member.param, member.part] += 1
        return self[members[0]]


def split(plan: Plan, part: int, tensor: Tensor) -> Tensor:
    """Lay out one rectangle of each unit as ``(units, blocks, *sizes)``, plus trailing axes."""
    rows, cols = plan.matrix
    extra = tensor.shape[len(plan.shape) :]
    if plan.last is not None:
        tensor = tensor.movedim(plan.last, len(plan.shape) - 1)
    if plan.axis == 1:
        matrices = tensor.reshape(rows, plan.units, cols, *extra).movedim(1, 0)
    else:
        matrices = tensor.reshape(plan.units, rows, cols, *extra)
    layout = plan.layouts[part]
    cut = matrices[:, slice(*layout.rows), slice(*layout.cols)]
    if layout.transposed:
        cut = cut.transpose(1, 2)
    return cut.reshape(len(cut), layout.blocks, *layout.sizes, *extra)


def join(plan: Plan, parts: Sequence[Tensor]) -> Tensor:
    """Undo ``split``, given the rectangles of all layouts."""
    if len(parts) == 1:
        whole = _rectangle(plan.layouts[0], parts[0])
    else:
        whole = parts[0].new_empty(plan.units, *plan.matrix)
        for layout, part in zip(plan.layouts, parts, strict=True):
            whole[:, slice(*layout.rows), slice(*layout.cols)] = _rectangle(layout, part)
    if plan.axis == 1:
        whole = whole.movedim(0, 1)
    if plan.last is None:
        return whole.reshape(plan.shape)
    others = [n for axis, n in enumerate(plan.shape) if axis != plan.last]
    return whole.reshape(*others, plan.shape[plan.last]).movedim(-1, plan.last)


def _rectangle(layout: Layout, part: Tensor) -> Tensor:
    """Return the rows and columns of a rectangle, of all units, from how they lie in a batch."""
    height = layout.rows[1] - layout.rows[0]
    width = layout.cols[1] - layout.cols[0]
    if layout.transposed:
        return part.reshape(-1, width, height).mT
    return part.reshape(-1, height, width)


class MatrixBatch:
    """Rectangles of one layout, number format and device, with their state in one tensor per name.

    The optimizer's ``state[parameter]`` holds views into these tensors, so that checkpoints look as
    ever. The first ``units[0]`` elements of the batch are the first member's, and so on.
    """

    def __init__(
        self,
        members: Sequence[Member],
        states: Mapping[Tensor, State],
        clock: Clock,
        arithmetic: Arithmetic,
    ) -> None:
        """Gather the members' states into one, and leave views of it in ``states``."""
        self.members = list(members)
        self._clock = clock
        self._arithmetic = arithmetic
        self.units = [member.plan.units for member in members]
        if members[0].param.device.type == "cpu":
            torch.empty(KEPT, dtype=torch.uint8)
        parts = [formats.part_of(states[m.param], m.plan, m.part) for m in members]
        self.tensors: State = {}
        for name in parts[0]:
            self.tensors[name] = torch.cat([part[name] for part in parts])
        for name, tensor in self.tensors.items():
            for member, view in zip(members, torch.split(tensor, self.units), strict=True):
                suffix = formats.suffix_of(member.plan, member.part)
                states[member.param][name + suffix] = view
        self._computed_with = None
        if not formats.is_packed(self.tensors):
            self._computed_with = formats.matrix_state(self.tensors)

    def steps(
        self,
        options: Options,
        gradients: Mapping[Tensor, Tensor],
        vectors: Mapping[Tensor, Tensor],
        now: Moment,
    ) -> list[Tensor]:
        """Learn from gradients, or vectors given for some parameters; return each member's step."""
        gradient = self.gather(gradients)
        curvature = self.gather_curvature(gradients, vectors) if vectors else None
        if options.nonfinite == "ignore":
            gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
            if curvature is not None:
                finite = curvature.vectors.nan_to_num(0.0, 0.0, 0.0)
                curvature = curvature._replace(vectors=finite)
        turns = self._clock.advance(self.members) if now.turn else 0
        mend = now.turn and mends_at(options, now.steps, turns)
        state = self.open_state()
        kind, program = self._arithmetic
        rates = kind.rates_of(options, state.scale)
        steps = program(kind, state, options, rates, gradient, curvature, now.turn, mend)
        self.close_state(state)
        return list(torch.split(steps, self.units))

    def open_state(self) -> MatrixState:
        """Return the state as it is computed with; ``close_state`` keeps what a step changes."""
        if self._computed_with is not None:
            return self._computed_with
        return formats.matrix_state(formats.unpack(self.tensors))

    def close_state(self, state: MatrixState) -> None:
        """Keep what a step has changed, using it up."""
        if state is not self._computed_with:
            formats.pack_(self.tensors, formats.to_names(state))

    def gather(self, tensors: Mapping[Tensor, Tensor]) -> Tensor:
        """Put tensors of the parameters' shapes, plus any trailing axis, side by side."""
        parts = [split(m.plan, m.part, tensors[m.param]) for m in self.members]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def gather_curvature(
        self, gradients: Mapping[Tensor, Tensor], vectors: Mapping[Tensor, Tensor]
    ) -> GivenCurvature | None:
        """Put vectors side by side that were given for some parameters in place of gradients."""
        params = [member.param for member in self.members]
        equal = equal_vectors(params, vectors, gradients)
        if equal is None:
            return None
        marks: list[bool] = []
        for member, units in zip(self.members, self.units, strict=True):
            marks += [member.param in vectors] * units
        gathered = self.gather(dict(zip(params, equal, strict=True)))
        return GivenCurvature(gathered, torch.tensor(marks, device=gathered.device))


class VectorBatch:
    """Parameters without bases, of one number format and device: many small ones share tensors."""

    def __init__(
        self, members: Sequence[Member], states: MutableMapping[Tensor, State], clock: Clock
    ) -> None:
        """Gather the members' states, and leave views of them in ``states``."""
        first = members[0]
        packed = formats.is_packed(formats.part_of(states[first.param], first.plan, first.part))
        self.flats: list[FlatVectors] = []
        for count in sorted({clock[member] for member in members}):
            equal = [member for member in members if clock[member] == count]
            # In 8 bits, units are those of one parameter.
            for some in _portions(equal, 0 if packed else CHUNK):
                self.flats.append(FlatVectors(some, states, clock))
        self.members = [member for flat in self.flats for member in flat.members]

    def steps(
        self,
        options: Options,
        gradients: Mapping[Tensor, Tensor],
        vectors: Mapping[Tensor, Tensor],
        now: Moment,
    ) -> list[Tensor]:
        """Learn from gradients, or vectors given for some parameters; return each member's step."""
        steps: list[Tensor] = []
        for flat in self.flats:
            parts = []
            for _, numerator, denominator in flat.learn(options, gradients, vectors):
                parts.append(numerator / denominator)
            steps += torch.split(_joined(parts), flat.sizes)
        if options.clip is not None:
            return [vector.clipped(step, options.clip) for step in steps]
        return steps

    def can_step_at_once(self, options: Options) -> bool:
        """Tell whether ``step_at_once`` does all that the options ask for."""
        numbers = not isinstance(options.lr, Tensor) and not isinstance(
            options.weight_decay, Tensor
        )
        simple = options.clip is None and not options.cautious_weight_decay
        if not (numbers and simple and all(member.whole for member in self.members)):
            return False
        wide = self.flats[0].state["step"].dtype
        params = [member.param for member in self.members]
        return all(param.dtype == wide and param.is_contiguous() for param in params)

    def step_at_once(
        self, options: Options, gradients: Mapping[Tensor, Tensor], vectors: Mapping[Tensor, Tensor]
    ) -> None:
        """Learn and move the parameters in the fewest calls, without making steps first."""
        rate = options.lr if options.maximize else -options.lr
        for flat in self.flats:
            whole = [member.param.view(-1) for member in flat.members]
            for part, numerator, denominator in flat.learn(options, gradients, vectors):
                weights = whole if len(whole) > 1 else [whole[0][part]]
                sizes = [weight.numel() for weight in weights]
                if options.weight_decay:
                    torch._foreach_mul_(weights, 1 - options.lr * options.weight_decay)
                numerators = torch.split(numerator, sizes)
                denominators = torch.split(denominator, sizes)
                torch._foreach_addcdiv_(weights, numerators, denominators, rate)


class FlatVectors:
    """Parameters without basis that have taken equally many steps, and will."""

    def __init__(
        self, members: list[Member], states: MutableMapping[Tensor, State], clock: Clock
    ) -> None:
        """Gather the members' states, and leave views of them in ``states``."""
        self.members = members
        self._clock = clock
        parts = [formats.part_of(states[m.param], m.plan, m.part) for m in members]
        self.sizes = [part["second_moment"].numel() for part in parts]
        self._packed = formats.is_packed(parts[0])
        self.state: State = {}
        if self._packed:  # then there is no other, and each of its units has units of its own
            self.state.update(parts[0])
            return
        for name in parts[0]:
            tensors = [part[name] for part in parts]
            self.state[name] = _joined([tensor.flatten() for tensor in tensors])
            views = torch.split(self.state[name], [tensor.numel() for tensor in tensors])
            for member, tensor, view in zip(members, tensors, views, strict=True):
                suffix = formats.suffix_of(member.plan, member.part)
                states[member.param][name + suffix] = view.view(tensor.shape)

    def learn(
        self, options: Options, gradients: Mapping[Tensor, Tensor], vectors: Mapping[Tensor, Tensor]
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Learn from gradients; give out numerators and denominators of steps, part by part."""
        step = self.state["step"].add_(1)
        count = self._clock.advance(self.members)
        weights = vector.weights_of(options, step[0] if options.capturable else count)
        gradient = self._gather(gradients)
        samples = self._gather_vectors(gradients, vectors)
        entries = len(gradient) // len(step) if self._packed else 1  # of an element of the state
        for rows in self._chunks(len(gradient) // entries, entries, gradient.device):
            part = slice(rows.start * entries, rows.stop * entries)
            kept = {name: value[rows] for name, value in self.state.items()}
            computed = formats.unpack(kept) if self._packed else kept
            flat = {name: value.view(-1) for name, value in computed.items()}
            newest = None if samples is None else samples[part]
            state = formats.vector_state(flat)._replace(step=step)
            fraction = vector.learn_(state, weights, options, gradient[part], newest)
            if self._packed:
                formats.pack_(kept, computed)
            yield part, *fraction

    def _chunks(self, rows: int, entries: int, device: torch.device) -> Iterator[slice]:
        """Cut the rows of the state into parts that are stepped at a time."""
        most = CHUNK if self._packed or device.type == "cpu" else sys.maxsize
        width = max(1, most // entries)
        for start in range(0, rows, width):
            yield slice(start, start + width)

    def _gather(self, tensors: Mapping[Tensor, Tensor]) -> Tensor:
        """Put tensors of the members' parameters one after the other."""
        return _joined([_cut(member, tensors[member.param]).reshape(-1) for member in self.members])

    def _gather_vectors(
        self, gradients: Mapping[Tensor, Tensor], vectors: Mapping[Tensor, Tensor]
    ) -> Tensor | None:
        """Put vectors that were given in place of gradients one after the other."""
        if not vectors:
            return None
        equal = equal_vectors([member.param for member in self.members], vectors, gradients)
        if equal is None:
            return None
        parts = []
        for member, tensor in zip(self.members, equal, strict=True):
            parts.append(_cut(member, tensor).reshape(-1, tensor.shape[-1]))
        return _joined(parts)


def _cut(member: Member, tensor: Tensor) -> Tensor:
    """Return a member's part of a tensor that has its parameter's shape."""
    return tensor if member.whole else split(member.plan, member.part, tensor)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


Batch = MatrixBatch | VectorBatch


class Assembly:
    """Steps of parameters that lie in several batches, until all their parts are there."""

    def __init__(self) -> None:
        """Start without any."""
        self._waiting: dict[Tensor, dict[int, Tensor]] = {}

    def complete(
        self, members: Sequence[Member], steps: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Take up the steps of some members; return parameters whose step is complete, and it."""
        params = []
        whole = []
        for member, step in zip(members, steps, strict=True):
            parts = self._waiting.setdefault(member.param, {})
            parts[member.part] = step
            if len(parts) == len(member.plan.layouts):
                del self._waiting[member.param]
                params.append(member.param)
                whole.append(join(member.plan, [parts[part] for part in range(len(parts))]))
        return params, whole


class Batches:
    """The batches of parameters that step together, arranged anew only when they change."""

    def __init__(self, everyone: Collection[Batches], clock: Clock, arithmetic: Arithmetic) -> None:
        """Start without any; parameters may come here from others of ``everyone``."""
        self._everyone = everyone
        self._arithmetic = arithmetic
        self._clock = clock
        self._batches: list[Batch] = []
        self._params: list[Tensor] = []

    def arrange(
        self,
        params: Sequence[Tensor],
        states: MutableMapping[Tensor, State],
        plan_of: Callable[[Tensor], Plan],
        create: Callable[[Tensor, Plan], State],
    ) -> list[Batch]:
        """Return batches of exactly these parameters.

        Args:
            params: parameters that have a gradient.
            states: the state of each; new ones get theirs.
            plan_of: returns the layout of a parameter.
            create: makes the state of a new one.
        """
        if list(map(id, params)) == list(map(id, self._params)):
            return self._batches
        members: list[Member] = []
        for param in params:
            plan = plan_of(param)
            parts = [Member(param, plan, part) for part in range(len(plan.layouts))]
            if not states[param]:
                states[param].update(create(param, plan))
                for member in parts:
                    self._clock.start(member)
            members += parts
        wanted = {_ids(some): some for some in self._bucketed(members, states)}
        kept = {_ids(batch.members): batch for batch in self._batches}
        leaving = [batch for ids, batch in kept.items() if ids not in wanted]
        for other in self._everyone:
            leaving += other._given_up(self, params)
        _detach_views(leaving, states)
        self._params = list(params)
        self._batches = [kept.get(ids) or self._new(some, states) for ids, some in wanted.items()]
        return self._batches

    def _given_up(self, other: Batches, params: Sequence[Tensor]) -> list[Batch]:
        """Return all batches, and forget them, if parameters of them step with others now."""
        if other is self or set(map(id, params)).isdisjoint(map(id, self._params)):
            return []
        batches = self._batches
        self._batches = []
        self._params = []
        return batches

    def _bucketed(
        self, members: Sequence[Member], states: Mapping[Tensor, State]
    ) -> Iterator[list[Member]]:
        """Give out members that can share a batch, as many as may step at a time."""
        buckets: dict[object, list[Member]] = {}
        for member in members:
            tensors = formats.part_of(states[member.param], member.plan, member.part)
            count = self._clock.read(member, tensors)
            kind: object = "vector"
            if formats.is_matrix(tensors):  # every second turn mends bases
                kind = (member.layout.key, count % 2)
            param = member.param
            key = (kind, formats.formats_of(tensors), param.dtype, param.device)
            buckets.setdefault(key, []).append(member)
        for some in buckets.values():
            is_vector = not some[0].layout.has_basis and len(some[0].layout.sizes) == 1
            most = MOST_ON_CPU if some[0].param.device.type == "cpu" else MOST
            yield from _portions(some, sys.maxsize if is_vector else most)

    def _new(self, members: Sequence[Member], states: MutableMapping[Tensor, State]) -> Batch:
        first = members[0]
        if formats.is_matrix(states[first.param], formats.suffix_of(first.plan, first.part)):
            return MatrixBatch(members, states, self._clock, self._arithmetic)
        return VectorBatch(members, states, self._clock)


def _detach_views(batches: Sequence[Batch], states: Mapping[Tensor, State]) -> None:
    """Give the members of batches that end memory of their own: views would keep all of it."""
    for batch in batches:
        for member in batch.members:
            state = states[member.param]
            suffix = formats.suffix_of(member.plan, member.part)
            for name, value in formats.part_of(state, member.plan, member.part).items():
                state[name + suffix] = value.clone()


def _portions(members: Sequence[Member], most: int) -> Iterator[list[Member]]:
    """Cut a list of members into parts of at most so many weights, or of a single member."""
    some: list[Member] = []
    room = most
    for member in members:
        if some and member.size > room:
            yield some
            some = []
            room = most
        room -= member.size
        some.append(member)
    if some:
        yield some


def _ids(members: Sequence[Member]) -> frozenset[tuple[int, int]]:
    return frozenset((id(member.param), member.part) for member in members)
