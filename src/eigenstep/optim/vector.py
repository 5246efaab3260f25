"""Parameters without a basis: AdamW's rule, for all of a group in a few calls.

Adam's two averages are kept with their bias corrected, so that the correction is a rate that
falls::

    m <- m + w1 (g - m),   v <- v + w2 (g^2 - v),   w = (1 - beta) / (1 - beta^t)
    step = m / (sqrt(v) + eps)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.step import accumulation_dtype
from .options import Options


class VectorState(NamedTuple):
    """What parameters without a basis keep between steps; changed in place."""

    step: Tensor  # how many steps were taken, shape (b,)
    second_moment: Tensor  # v, shape (b, 1, n), or flat
    momentum: Tensor | None = None  # m


class Weights(NamedTuple):
    """Weights of the newest terms of both averages: numbers, or tensors if the host may not know.

    ``momentum`` is ``w1`` and ``second_moment`` is ``w2``.
    """

    momentum: float | Tensor
    second_moment: float | Tensor


def new_state(shape: Sequence[int], options: Options, *, device: torch.device | str) -> VectorState:
    """Return the state before the first gradient of shape ``(b, 1, n)``."""
    assert options.state_dtype is not None
    zeros = torch.zeros(*shape, dtype=options.state_dtype, device=device)
    return VectorState(
        step=torch.zeros(shape[0], dtype=accumulation_dtype(zeros.dtype), device=device),
        second_moment=zeros,
        momentum=zeros.clone() if options.betas[0] > 0 else None,
    )


def weights_of(options: Options, count: int | Tensor) -> Weights:
    """Return the weights of the newest terms in the step with this number, from 1."""
    first, second = ((1 - beta) / (1 - beta**count) for beta in options.betas)
    return Weights(first, second)


def learn_(
    state: VectorState,
    weights: Weights,
    options: Options,
    gradient: Tensor,
    vectors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take gradients into the averages; return the numerator and denominator of the step.

    Args:
        state: averages, changed in place, of the shape of the gradient.
        weights: of the newest terms.
        options: of the parameter group.
        gradient: ``g``.
        vectors: whose squares replace those of the gradient, along the last axis.
    """
    wide = state.step.dtype
    gradient = within_range(gradient, wide, options)
    numerator = gradient
    if state.momentum is not None:
        numerator = state.momentum.to(wide).lerp_(gradient, weights.momentum)
        state.momentum.copy_(numerator)  # at no cost if they are the same tensor
    second = weights.second_moment
    average = state.second_moment.to(wide).mul_(1 - second)
    samples = [gradient]
    if vectors is not None:
        samples = list(within_range(vectors, wide, options).unbind(-1))
    for sample in samples:
        if isinstance(second, Tensor):
            average.addcmul_(sample * second, sample)
        else:
            average.addcmul_(sample, sample, value=second)
    state.second_moment.copy_(average)
    root = average.sqrt() if options.root == 2 else average.pow(1 / options.root)
    return numerator, root.add_(max(options.eps, torch.finfo(wide).tiny))


def within_range(x: Tensor, wide: torch.dtype, options: Options) -> Tensor:
    """Return numbers in the format of the arithmetic, cut where squares could overflow."""
    most = torch.finfo(wide).max ** 0.5 / 16
    if options.nonfinite == "ignore":
        x = x.nan_to_num(0.0, 0.0, 0.0)
    return x.to(wide).clamp(-most, most)


def clipped(step: Tensor, clip: float) -> Tensor:
    """Return a step of a root mean square of at most ``clip``."""
    size = step.norm() / step.numel() ** 0.5
    return step * (clip / size.clamp_min(clip))
