"""The optimizer's arithmetic: one batched step for a stack of same-shaped tensors, no parameter in sight.

A stack holds ``b`` gradients, each of ``k`` blocks with axes ``n0, ..., nl``, as one tensor ``(b, k, n0, ..., nl)``.
Its curvature is ``S = alpha S0 x ... x Sl``, one factor for each axis; the factor of the first axis is block-diagonal
with one block for each of the ``k``, all other factors are shared by the blocks. Nothing here reads a number back to
the host, so a step never waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .eigenvalues import inverse, learn_eigenvalues, whiten
from .state import Rates, Rule, State, rate_of, spread
from .turning import rotate, rotations, turn_axis, turn_bases, unrotate


def step(gradient: Tensor, curvature: Tensor | None, state: State, rule: Rule, rates: Rates, turn: bool) -> Tensor:
    """Learn from a stack of gradients and return the stack of directions ``S^(-1/p) M`` to go against.

    Args:
        gradient: ``G``, shape ``(b, k, n0, ..., nl)``.
        curvature: vectors whose outer products are summed up to the curvature, shape ``(b, k, n0, ..., nl, K)``; by
            default the gradient is the only one.
        state: the stack's state, changed in place.
        rule: what to do.
        rates: decay rates and damping.
        turn: whether the bases turn in this step.
    """
    wide = state["scale"].dtype
    state["step"] += 1
    gradient = gradient.to(wide)
    rotated = rotate(gradient, state)
    direction = rotated
    if "momentum" in state:
        weight = spread(rate_of(rates.beta1, state["step"], min(rule.start, 1.0)), rotated)
        state["momentum"].lerp_(rotated.to(state["momentum"].dtype), weight.to(state["momentum"].dtype))
        direction = state["momentum"].to(wide)
        if rule.nesterov is True:
            direction = direction.lerp(rotated, 1 - rates.beta1)
        elif rule.nesterov:
            direction = direction.lerp(rotated, rule.nesterov)

    samples = rotated[..., None] if curvature is None else rotate(curvature.to(wide), state)
    samples, past = whiten(samples, state, rule, rates)
    del rotated  # memory is short while bases turn
    turns = rotations(samples, past, state, rule, rates) if turn else {}
    learn_eigenvalues(samples, past, state, rule, rates)
    del samples
    if rule.turn_first:
        for axis, q in turns.items():
            direction = turn_axis(direction, q, axis)
        turn_bases(turns, state, rule)
    direction = unrotate(_precondition(direction, state, rule), state)
    if not rule.turn_first:
        turn_bases(turns, state, rule)
    return _limit(direction, gradient, state, rule, rates)


def _precondition(direction: Tensor, state: State, rule: Rule) -> Tensor:
    """Divide by the eigenvalues of the stack to the power ``1/p``; all zero as long as no curvature was seen."""
    axes = direction.ndim - 2
    if "second_moment" in state:
        spectrum = state["second_moment"].to(direction.dtype)
    else:
        spectrum = state["eigs_0"].view(*state["eigs_0"].shape, *[1] * (axes - 1))
        for axis in range(1, axes):
            spectrum = spectrum / inverse(state, axis, axes + 2)
    spectrum = spectrum.clamp_min(torch.finfo(spectrum.dtype).tiny)
    root = spectrum.sqrt_() if rule.root == 2 else spectrum.pow_(1 / rule.root)
    scale = spread(state["scale"], root)
    direction = direction / root.mul_(torch.where(scale > 0, scale, torch.inf))
    # Of alpha^(1/p) = scale^(2/p) the rest: in one factor, it could leave the range of the number format.
    return direction if rule.root == 2 else direction / torch.where(scale > 0, scale, 1.0).pow(2 / rule.root - 1)


def _limit(direction: Tensor, gradient: Tensor, state: State, rule: Rule, rates: Rates) -> Tensor:
    """Give each direction the size of another optimizer's step, and clip its root mean square."""
    if rule.grafting is not None:
        size = _size(direction).clamp_min(torch.finfo(direction.dtype).tiny)
        direction = direction / size * _size(_grafted_step(gradient, state, rule, rates))
    if rule.clip is not None:
        direction = direction * (rule.clip / _size(direction).clamp_min(rule.clip))
    return direction


def _size(x: Tensor) -> Tensor:
    """Return the root mean square of each element of a stack, shaped to multiply it; entries of any size are safe."""
    axes = tuple(range(1, x.ndim))
    unit = torch.linalg.vector_norm(x, torch.inf, dim=axes, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return unit * torch.linalg.vector_norm(x / unit, dim=axes, keepdim=True) / x[0].numel() ** 0.5


def _grafted_step(gradient: Tensor, state: State, rule: Rule, rates: Rates) -> Tensor:
    """Return the step that Adam or RMSprop would take, before the learning rate."""
    weight = spread(rate_of(rates.beta2, state["step"], min(rule.start, 1.0)), gradient)
    # Of the mean square the root is kept: hypot squares what does not fit the number format if squared.
    root = torch.hypot((1 - weight).sqrt() * state["graft"].to(gradient.dtype), weight.sqrt() * gradient)
    state["graft"].copy_(root)
    step = gradient
    if rule.grafting == "adam" and "momentum" in state:
        step = unrotate(state["momentum"].to(gradient.dtype), state)
    # Adam's entries are a few units at most, but momentum that was turned has noise where there was hardly a gradient.
    return torch.where(root > 0, step / root, 0.0).clamp(-10, 10)
