"""The step as a compiled program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a step: one program for each kind of stack, turning or not."""
    programs = torch.compile(function, fullgraph=True, dynamic=False)

    def step(*arguments: Any) -> Tensor:
        # More programs than the few that torch allows for one function.
        with torch._dynamo.config.patch(recompile_limit=256):
            return programs(*arguments)

    return step
