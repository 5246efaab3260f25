"""Moving weights: along a step, with weight decay, and rounded at random if they are bfloat16 numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def move(group: Mapping[str, Any], params: list[Tensor], directions: list[Tensor], seed: int | None = None) -> None:
    """Move parameters in place along, or against, directions before the learning rate, which are used up.

    The random numbers of stochastic rounding have a seed, or come from torch's global generator.
    """
    lr, weight_decay = group["lr"], group["weight_decay"]
    lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
    weight_decay = weight_decay.reshape(()) if isinstance(weight_decay, Tensor) else weight_decay
    torch._foreach_mul_(directions, lr if group["maximize"] else -lr)
    shrink = lr * weight_decay
    if group["stochastic_rounding"] and params[0].dtype == torch.bfloat16:
        generator = None if seed is None else torch.Generator(params[0].device).manual_seed(seed)
        for param, direction in zip(params, directions, strict=True):
            decay = shrink * _decaying(param, direction, group["cautious_weight_decay"]).float()
            add_stochastically(param, direction - decay, generator)
        return
    if group["cautious_weight_decay"]:
        for param, direction in zip(params, directions, strict=True):
            direction.sub_(shrink * _decaying(param, direction, True))
    elif isinstance(weight_decay, Tensor) or weight_decay:  # the value of a tensor is for the device alone
        torch._foreach_mul_(params, 1 - shrink)
    torch._foreach_add_(params, directions)


def _decaying(param: Tensor, step: Tensor, cautious: bool) -> Tensor:
    """Return the parameter, with zeros where the step itself does not lead toward zero if that is asked for."""
    return torch.where(param * step <= 0, param, 0) if cautious else param


def add_stochastically(param: Tensor, addend: Tensor, generator: torch.Generator | None = None) -> None:
    """Add to a bfloat16 tensor in place, rounding up or down at random with the right mean."""
    exact = (param.float() + addend).float()
    # bfloat16 is the upper half of float32: adding random lower bits before cutting them off rounds at random.
    noise = torch.randint(1 << 16, exact.shape, generator=generator, dtype=torch.int32, device=exact.device)
    bits = (exact.view(torch.int32) + noise) & -65536
    param.copy_(bits.view(torch.float32))
