"""Plain numbers about training, for loggers: sizes of gradients, updates and weights, condition, speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .distributed.rounds import local
from .inspect import name_of
from .state import State

Sizes = dict[Tensor, tuple[Tensor, Tensor]]
"""For each parameter the norms of its newest gradient and update, still on the device."""


def note(sizes: Sizes, params: Sequence[Tensor], gradients: list[Tensor], directions: list[Tensor], lr: Any) -> None:
    """Take down the norms of gradients, and of directions times the learning rate."""
    lengths = (length * lr for length in torch._foreach_norm(directions))
    sizes.update(zip(params, zip(torch._foreach_norm(gradients), lengths, strict=True), strict=True))


def metrics_of(
    groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, State], sizes: Sizes, skipped: int
) -> dict[str, float]:
    """Return all numbers; they are read back from the device in one piece.

    Args:
        groups: the optimizer's parameter groups.
        states: its state.
        sizes: what ``note`` took down.
        skipped: number of steps that were left out.
    """
    counts = {"steps": max((group["count"] for group in groups), default=0), "skipped_steps": skipped}
    found: dict[str, Tensor] = {}
    for param in (param for group in groups for param in group["params"] if param.numel()):
        own = name_of(param, groups).replace(" #", ".")  # some loggers refuse other signs than these
        found[f"weight_norm/{own}"] = torch.linalg.vector_norm(local(param.detach()))
        if param in sizes:
            found[f"gradient_norm/{own}"], found[f"update_norm/{own}"] = sizes[param]
        state = states.get(param, {})
        if any(key.startswith("basis") and len(state[key]) for key in state):
            eigs = [state[key].flatten(1) for key in state if key.startswith("eigs")]
            sides = torch.stack([e.amax(1) / e.amin(1) for e in eigs])
            found[f"condition/{own}"] = sides.prod(0).amax()
            speeds = [state[key].mean() for key in state if key.startswith("speed")]
            found[f"rotation_speed/{own}"] = torch.stack(speeds).amax()
    if not found:
        return counts
    first = next(iter(found.values()))
    numbers = torch.stack([number.to(first.device, torch.float32) for number in found.values()]).tolist()
    return {**dict(zip(found, numbers, strict=True)), **counts}
