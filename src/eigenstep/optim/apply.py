"""How steps move the weights: decay, learning rate, and rounding to bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from .options import Options


def apply_steps(
    options: Options, params: list[Tensor], directions: list[Tensor], seed: int | None = None
) -> None:
    """Move parameters in place: ``W <- W - lr (weight_decay W + direction)``.

    Args:
        options: of their group.
        params: the weights.
        directions: steps before the learning rate, which are used up.
        seed: of the random numbers of stochastic rounding; by default they come from torch's
            global generator.
    """
    lr = _scalar(options.lr)
    weight_decay = _scalar(options.weight_decay)
    shrink = lr * weight_decay
    along = lr if options.maximize else -lr
    rounding = options.stochastic_rounding and params[0].dtype == torch.bfloat16
    if rounding or options.cautious_weight_decay or isinstance(along, Tensor):
        torch._foreach_mul_(directions, along)
        along = 1.0
    if rounding:
        _add_rounded(params, directions, shrink, options, seed)
        return
    if options.cautious_weight_decay:
        for param, direction in zip(params, directions, strict=True):
            direction.sub_(shrink * decaying(param, direction))
    elif isinstance(weight_decay, Tensor) or weight_decay:  # a tensor's value is for the device
        torch._foreach_mul_(params, 1 - shrink)
    torch._foreach_add_(params, directions, alpha=along)


def _scalar(value: float | Tensor) -> float | Tensor:
    return value.reshape(()) if isinstance(value, Tensor) else value


def _add_rounded(
    params: list[Tensor],
    steps: list[Tensor],
    shrink: float | Tensor,
    options: Options,
    seed: int | None,
) -> None:
    generator = None
    if seed is not None:
        generator = torch.Generator(params[0].device).manual_seed(seed)
    for param, step in zip(params, steps, strict=True):
        weights = decaying(param, step) if options.cautious_weight_decay else param
        add_stochastically_(param, step - shrink * weights.float(), generator)


def decaying(param: Tensor, step: Tensor) -> Tensor:
    """Return the weights that a step moves toward zero, and zeros in place of the others."""
    return torch.where(param * step <= 0, param, 0)


def add_stochastically_(
    param: Tensor, addend: Tensor, generator: torch.Generator | None = None
) -> None:
    """Add to a bfloat16 tensor in place, rounding up or down at random with the right mean."""
    exact = (param.float() + addend).float()
    # bfloat16 is the upper half of float32: adding random lower bits before cutting them off
    # rounds at random.
    noise = torch.randint(
        1 << 16, exact.shape, generator=generator, dtype=torch.int32, device=exact.device
    )
    bits = (exact.view(torch.int32) + noise) & -65536
    param.copy_(bits.view(torch.float32))
