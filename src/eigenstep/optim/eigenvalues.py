"""Learning the eigenvalues of a stack: units in which squares are safe, each axis' ``d``, and the corrected ones.

Gradients enter divided by a number of their own size, and of ``alpha`` the square root is kept: multiplying the loss by
a constant changes nothing (a power of two, not even a bit), and no gradient is too large or too small to be squared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.maps import exp
from ..core.matrices import centered_exp
from .state import Rates, Rule, State, rate_of, spread

FAINT = 1e-8
"""Gradients this much smaller than ``sqrt(alpha)`` count as if they were zero."""


def whiten(samples: Tensor, state: State, rule: Rule, rates: Rates) -> tuple[Tensor, Tensor]:
    """Return samples in units in which their squares are safe, and the factor that takes ``alpha`` to these units.

    The unit is the largest entry, or ``sqrt(alpha)`` if all entries are far smaller; from here on it is the scale. The
    first samples that are not all zero set ``alpha`` to their mean square.
    """
    axes = tuple(range(1, samples.ndim))
    unit = torch.maximum(torch.linalg.vector_norm(samples, torch.inf, dim=axes), FAINT * state["scale"])
    if not rule.relative_damping:
        unit = torch.maximum(unit, rates.damping.sqrt())
    unit = torch.where(unit > 0, unit, 1.0)
    samples = samples / spread(unit, samples)
    size = torch.linalg.vector_norm(samples, dim=axes) / samples[0, ..., 0].numel() ** 0.5
    scale = torch.where(state["scale"] > 0, state["scale"] / unit, size)
    state["scale"].copy_(torch.where(scale > 0, unit, 0.0))
    past = torch.where(scale > 0, scale, 1.0).square()
    for name in [name for name in state if name.startswith("memory")]:
        state[name].mul_(past[:, None, None, None])
    return samples, past


def inverse(state: State, axis: int, ndim: int) -> Tensor:
    """Return ``1/d`` of an axis, shaped to multiply samples."""
    values = state[f"eigs_{axis}"].reciprocal()
    return values.view(*values.shape[:2], *[1] * axis, -1, *[1] * (ndim - 3 - axis))


def damping_level(axes: int, past: Tensor, state: State, rule: Rule, rates: Rates) -> Tensor:
    """Return the paper's ``lambda`` in the units of whitened samples, shape ``(b,)``."""
    if not rule.relative_damping:
        return (rates.damping.sqrt() / torch.where(state["scale"] > 0, state["scale"], 1.0)).square()
    level = rates.damping * past
    for axis in range(axes):
        level = level * state[f"eigs_{axis}"].mean((1, 2))
    return level


def axis_damping(axis: int, axes: int, level: Tensor, state: State) -> Tensor:
    """Return the paper's ``Lambda / (alpha k)`` of an axis, given ``lambda``, shape ``(b, 1, 1)``."""
    for other in range(axes):
        if other != axis:
            level = level * state[f"eigs_{other}"].reciprocal().mean((1, 2))
    return level[:, None, None]


def _measure(square: Tensor, axis: int, state: State) -> Tensor:
    """Return ``diag(W)`` of an axis: the mean over all other axes of the squares divided by their eigenvalues."""
    letters = "ijlmnopq"[: square.ndim - 2]
    spec, inverses, count = f"bk{letters}", [], square[0].numel() // state[f"eigs_{axis}"][0].numel()
    for other, letter in enumerate(letters):
        if other != axis:
            eigs = state[f"eigs_{other}"]
            inverses.append((eigs if other == 0 else eigs[:, 0]).reciprocal())
            spec += f",bk{letter}" if other == 0 else f",b{letter}"
    measured = torch.einsum(f"{spec}->{'bk' if axis == 0 else 'b'}{letters[axis]}", square, *inverses) / count
    return measured.view_as(state[f"eigs_{axis}"])


def learn_eigenvalues(samples: Tensor, past: Tensor, state: State, rule: Rule, rates: Rates) -> None:
    """Move ``d``, ``alpha`` and the corrected eigenvalues towards the squares of the whitened samples."""
    axes = samples.ndim - 3
    rate = rate_of(rates.beta2, state["step"], rule.start)
    keep = (1 - rule.decay * rate) * past
    square = samples.square().sum(-1) if samples.shape[-1] > 1 else samples[..., 0].square()
    level = damping_level(axes, past, state, rule, rates)
    limits = torch.finfo(square.dtype)
    learned = []
    for axis in range(axes):
        eigs = state[f"eigs_{axis}"]
        newest = _measure(square, axis, state) + axis_damping(axis, axes, level, state)
        new = keep[:, None, None] * eigs + rate[:, None, None] * newest
        if rule.maps == "exact":
            old = (past[:, None, None] * eigs).clamp_min(limits.tiny)
            change = new - old
            # Beyond a factor e along the tangent of the exponential: outliers of 1000 d are common, e^1000 is not.
            new = torch.where(change > old, math.e * change, exp(old, change.minimum(old)))
        learned.append(new.clamp(limits.tiny, limits.max).log().flatten(1))
    change = torch.stack([logs.mean(-1) for logs in learned]).mean(0)
    for axis, logs in enumerate(learned):
        state[f"eigs_{axis}"].copy_(centered_exp(logs).view_as(state[f"eigs_{axis}"]))
        if f"memory_{axis}" in state:
            memory = state[f"memory_{axis}"].mul_((-logs.mean(-1)).exp()[:, None, None, None])
            # Without gradients it may decay more slowly than its unit, for ever.
            largest = torch.linalg.vector_norm(memory, torch.inf, dim=(1, 2, 3), keepdim=True)
            memory.mul_(1 / (largest * FAINT).clamp_min(1.0))
    if "second_moment" in state:
        moment = state["second_moment"]
        shrink = (-change).exp()
        square.add_(spread(level, square)).mul_(spread(rate * shrink, square))
        moment.mul_(spread(keep * shrink, square)).add_(square)
    state["scale"].mul_((change / 2).exp()).clamp_(max=limits.max)
