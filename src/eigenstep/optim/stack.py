"""Same-shaped parameters stacked, so that one batched call steps them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .layout import Layout
from .state import State

ParamState = dict[str, Tensor]


class Stack:
    """Parameters of one layout, number format and device, with their state side by side in one tensor per name.

    The optimizer's own ``state[parameter]`` holds views into these tensors, so that checkpoints look as ever.
    """

    def __init__(self, params: Sequence[Tensor], layouts: Sequence[Layout]) -> None:
        """Remember which parameters are stacked, and how."""
        self.params = list(params)
        self.layouts = list(layouts)
        self.state: State = {}

    def attach(self, states: Mapping[Tensor, ParamState], create: Callable[[Tensor, Layout], State]) -> None:
        """Gather the parameters' states into one, creating what is missing, and leave views of it with each.

        Args:
            states: the optimizer's state, one dictionary for each parameter.
            create: makes the state of a parameter that has none yet.
        """
        parts = [
            states[param] or create(param, layout) for param, layout in zip(self.params, self.layouts, strict=True)
        ]
        self.state = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        start = 0
        for param, layout in zip(self.params, self.layouts, strict=True):
            for name, tensor in self.state.items():
                states[param][name] = tensor[start : start + layout.pieces]
            start += layout.pieces

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stack one tensor per parameter, each of the parameter's shape (plus any trailing axis)."""
        pieces = [layout.split(tensor) for layout, tensor in zip(self.layouts, tensors, strict=True)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def scatter(self, stacked: Tensor) -> list[Tensor]:
        """Undo :meth:`gather`."""
        pieces = torch.split(stacked, [layout.pieces for layout in self.layouts])
        return [layout.join(piece) for layout, piece in zip(self.layouts, pieces, strict=True)]
