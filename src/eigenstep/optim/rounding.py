"""Stochastic rounding: additions to bfloat16 numbers that are right on average, however small the addend."""

from __future__ import annotations

import torch
from torch import Tensor


def add_stochastically(param: Tensor, addend: Tensor, generator: torch.Generator | None = None) -> None:
    """Add to a bfloat16 tensor in place, rounding up or down at random with the right mean.

    Args:
        param: bfloat16 tensor, changed in place.
        addend: tensor of the same shape.
        generator: where the random numbers come from; by default from torch's global generator.
    """
    exact = (param.float() + addend).float()
    # bfloat16 is the upper half of float32: adding random lower bits before cutting them off rounds at random.
    noise = torch.randint(1 << 16, exact.shape, generator=generator, dtype=torch.int32, device=exact.device)
    bits = (exact.view(torch.int32) + noise) & -65536
    param.copy_(bits.view(torch.float32))
