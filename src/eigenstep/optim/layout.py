"""How tensors become stacks: which axes get a basis, where long sides are cut, and what is stepped together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .state import State

STRUCTURES = ("kronecker", "axes", "full", "diagonal")
MOST_AXES = 8
"""As many axes as the arithmetic has letters for."""


@dataclass(frozen=True)
class Layout:
    """A parameter as ``pieces`` independent stack elements of shape ``(blocks, *sizes)``.

    Attributes:
        shape: the parameter's own shape.
        transposed: whether the matrix is laid out transposed, so that tall and wide ones share a stack.
        pieces: number of independent cuts of the columns.
        blocks: number of blocks of the rows; they share the factor of the columns.
        sizes: sizes of the axes of one block.
        full: for each axis, whether it has a basis.
    """

    shape: tuple[int, ...]
    transposed: bool
    pieces: int
    blocks: int
    sizes: tuple[int, ...]
    full: tuple[bool, ...]

    @property
    def key(self) -> tuple[int, tuple[int, ...], tuple[bool, ...]]:
        """What must agree for two parameters to be stacked."""
        return self.blocks, self.sizes, self.full

    def split(self, tensor: Tensor) -> Tensor:
        """Lay out a tensor of the parameter's shape, plus any trailing axis, as ``(pieces, blocks, *sizes)``."""
        extra = tensor.shape[len(self.shape) :]
        if self.transposed:
            tensor = self._matrix(tensor).transpose(0, 1)
        if self.pieces == 1:
            return tensor.reshape(1, self.blocks, *self.sizes, *extra)
        cut = tensor.reshape(self.blocks * self.sizes[0], self.pieces, self.sizes[1], *extra)
        return cut.movedim(1, 0).reshape(self.pieces, self.blocks, *self.sizes, *extra)

    def join(self, stack: Tensor) -> Tensor:
        """Undo ``split``."""
        rows, cols = self.blocks * self.sizes[0], self.pieces * math.prod(self.sizes[1:])
        if self.pieces > 1:
            stack = stack.reshape(self.pieces, rows, self.sizes[1]).movedim(0, 1)
        if self.transposed:
            stack = stack.reshape(rows, cols).transpose(0, 1)
        return stack.reshape(self.shape)

    @property
    def cut_axis(self) -> int | None:
        """Axis of the parameter along which the pieces lie side by side; ``None`` if they are not slices of it."""
        if self.transposed:
            return 0
        return 1 if len(self.shape) == 2 else None

    def part(self, start: int, stop: int) -> Layout:
        """Return the layout of the pieces ``start`` to ``stop``, for the slice of the parameter that they make up."""
        shape, axis = list(self.shape), self.cut_axis
        if stop - start != self.pieces and axis is not None:
            shape[axis] = (stop - start) * shape[axis] // self.pieces
        return replace(self, shape=tuple(shape), pieces=stop - start)

    def _matrix(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.shape[0], math.prod(self.shape[1:]), *tensor.shape[len(self.shape) :])

    def describe(self) -> str:
        """Say what the structure is, for people."""
        names = [f"{n}" if full else f"diag {n}" for n, full in zip(self.sizes, self.full, strict=True)]
        if self.blocks > 1:
            names[0] = f"{self.blocks} blocks of {names[0]}"
        text = " x ".join(names)
        return f"{self.pieces} pieces of ({text})" if self.pieces > 1 else text


def plan(shape: tuple[int, ...], *, structure: str, max_dim: int | None, max_ratio: float | None) -> Layout:
    """Choose the layout of a parameter.

    Args:
        shape: its shape, without empty axes.
        structure: "kronecker" lays tensors out as matrices (first axis against the rest) with one factor per side;
            "axes" gives each axis of a tensor its own factor; "full" one factor for the whole parameter;
            "diagonal" no basis at all.
        max_dim: a side longer than this is cut into blocks with a basis each; it has none if there is no fair cut.
            ``None`` for no limit.
        max_ratio: so is a side more than this many times longer than the other.
    """
    size = math.prod(shape)
    max_dim = max_dim or size
    matrix = (shape[0], size // shape[0]) if shape else (1, 1)
    if structure == "full" and size <= max_dim:
        return Layout(shape, False, 1, 1, (size,), (True,))
    if structure == "diagonal" or min(matrix) == 1:
        return Layout(shape, False, 1, 1, (size,), (False,))
    if structure == "axes" and len(shape) > MOST_AXES:
        raise ValueError(
            f'structure="axes" takes at most {MOST_AXES} axes, got a parameter of shape {shape}: give it a group of '
            'its own with structure="kronecker"'
        )
    if structure == "axes" and len(shape) > 2:
        return Layout(shape, False, 1, 1, shape, tuple(1 < n <= max_dim for n in shape))
    transposed = matrix[0] < matrix[1]
    cols, rows = sorted(matrix)
    pieces = _cut(cols, max_dim)
    width = cols // pieces
    limit = max_dim if max_ratio is None else min(max_dim, math.ceil(max_ratio * width))
    blocks = _cut(rows, limit)
    height = rows // blocks
    return Layout(shape, transposed, pieces, blocks, (height, width), (height <= limit, width <= max_dim))


def _cut(length: int, limit: int) -> int:
    """Return into how many equal parts of at most ``limit`` to cut a side; one if no parts of a fair size exist."""
    fewest = math.ceil(length / limit)
    for parts in range(fewest, 2 * fewest + 1):
        if length % parts == 0:
            return parts
    return 1


Create = Callable[[Tensor, Layout], State]
"""Makes the state of a parameter that has none yet."""


class Stack:
    """Parameters of one layout, number format and device, with their state side by side in one tensor per name.

    The optimizer's own ``state[parameter]`` holds views into these tensors, so that checkpoints look as ever.
    """

    def __init__(self, members: Mapping[Tensor, Layout], states: Mapping[Tensor, State], create: Create) -> None:
        """Gather the parameters' states into one, creating what is missing, and leave views of it with each.

        Args:
            members: the parameters and their layouts.
            states: the optimizer's state, one dictionary for each parameter.
            create: makes the state of a parameter that has none yet.
        """
        self.params, self.layouts = list(members), list(members.values())
        parts = [states[param] or create(param, layout) for param, layout in members.items()]
        self.state: State = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        start = 0
        for param, layout in members.items():
            for name, tensor in self.state.items():
                states[param][name] = tensor[start : start + layout.pieces]
            start += layout.pieces

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stack one tensor per parameter, each of the parameter's shape (plus any trailing axis)."""
        pieces = list(map(Layout.split, self.layouts, tensors))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def scatter(self, stacked: Tensor) -> list[Tensor]:
        """Undo ``gather``."""
        if len(self.layouts) == 1:
            return [self.layouts[0].join(stacked)]
        pieces = torch.split(stacked, [layout.pieces for layout in self.layouts])
        return list(map(Layout.join, self.layouts, pieces))


class Stacks:
    """The stacks of parameters that are stepped together, arranged anew only when others have gradients than before."""

    def __init__(self) -> None:
        """Start without any."""
        self._found: list[Stack] = []
        self._params: list[Tensor] = []

    def arrange(
        self,
        params: list[Tensor],
        states: dict[Tensor, State],
        layout_of: Callable[[Tensor], Layout],
        create: Create,
        together: bool = True,
    ) -> list[Stack]:
        """Return stacks of exactly these parameters.

        Args:
            params: those that have gradients now.
            states: the optimizer's state, one dictionary for each parameter.
            layout_of: tells how a parameter is laid out.
            create: makes the state of a parameter that has none yet.
            together: whether same-shaped parameters share a stack.
        """
        if list(map(id, params)) == list(map(id, self._params)):
            return self._found
        buckets: dict[tuple[object, ...], dict[Tensor, Layout]] = {}
        for param in params:
            layout = layout_of(param)
            key: tuple[object, ...] = (*layout.key, param.dtype, param.device)
            buckets.setdefault(key if together else (*key, id(param)), {})[param] = layout
        wanted = [list(map(id, members)) for members in buckets.values()]
        kept = {tuple(map(id, stack.params)): stack for stack in self._found if list(map(id, stack.params)) in wanted}
        for stack in self._found:
            if tuple(map(id, stack.params)) not in kept:
                # Views would hold on to the whole stack for the sake of a part.
                for param in stack.params:
                    states[param].update({name: tensor.clone() for name, tensor in states[param].items()})
        self._params = list(params)
        self._found = [
            kept.get(tuple(map(id, members))) or Stack(members, states, create) for members in buckets.values()
        ]
        return self._found
