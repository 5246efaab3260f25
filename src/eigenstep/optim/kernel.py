"""The optimizer's arithmetic: one batched step for a stack of same-shaped tensors, no parameter in sight.

A stack holds ``b`` gradients, each of ``k`` blocks with axes ``n0, ..., nl``, as one tensor ``(b, k, n0, ..., nl)``.
Its curvature is ``S = alpha S0 x ... x Sl``, one factor for each axis; the factor of the first axis is block-diagonal
with one block for each of the ``k``, all other factors are shared by the blocks. Nothing here reads a number back to
the host, so a step never waits for the device.

Gradients enter divided by a number of their own size, and of ``alpha`` the square root is kept: multiplying the loss by
a constant changes nothing (a power of two, not even a bit), and no gradient is too large or too small to be squared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..linalg import accumulation_dtype, diagonal, matmul, transpose
from ..maps import cayley, exp, reorthonormalize, shrink_factor, truncated_cayley
from ..rotation import bounded, moore_penrose, normalized
from ..spd import centered_exp

State = dict[str, Tensor]
"""The tensors of one stack, by name; :func:`initial_state` tells which."""

FAINT = 1e-8
"""Gradients this much smaller than ``sqrt(alpha)`` count as if they were zero."""


@dataclass(frozen=True)
class Rule:
    """What a step does, fixed for a stack; :class:`eigenstep.Spectral` explains each."""

    root: float = 2.0
    decay: float = 1.0
    eigenvalues: str = "corrected"
    rotation: str = "bounded"
    gap: float = 0.1
    maps: str = "quadratic"
    cap: float = 0.5
    reorthonormalize: int = 1
    nesterov: float | bool = 0.2
    turn_first: bool = False
    start: float = 4.0
    relative_damping: bool = True
    clip: float | None = None
    grafting: str | None = None


class Rates(NamedTuple):
    """Numbers that may change from step to step; tensors, so that a compiled step need not be compiled anew."""

    beta1: Tensor
    beta2: Tensor
    basis: Tensor
    damping: Tensor


def initial_state(
    shape: tuple[int, ...],
    full: tuple[bool, ...],
    rule: Rule,
    *,
    momentum: bool,
    residual: bool,
    dtype: torch.dtype,
    basis_dtype: torch.dtype,
    device: torch.device,
) -> State:
    """Return the state of a stack before its first gradient: ``B = I``, ``d = 1``, and no scale ``sqrt(alpha)`` yet.

    Args:
        shape: ``(b, k, n0, ..., nl)`` of the stack.
        full: for each axis, whether it has a basis; otherwise its factor is diagonal.
        rule: what the steps will do.
        momentum: whether to keep a running average of the gradients.
        residual: whether to keep what the rotations have not yet diagonalized.
        dtype: number format of everything as large as the gradients.
        basis_dtype: number format of the bases and residuals.
        device: where to put the tensors.
    """
    wide = accumulation_dtype(dtype)
    state = {
        "step": torch.zeros(shape[0], dtype=wide, device=device),
        "turns": torch.zeros(shape[0], dtype=wide, device=device),
        "scale": torch.zeros(shape[0], dtype=wide, device=device),
    }
    for axis, (size, has_basis) in enumerate(zip(shape[2:], full, strict=True)):
        eigs = torch.ones(shape[0], shape[1] if axis == 0 else 1, size, dtype=wide, device=device)
        state[f"eigs_{axis}"] = eigs
        if has_basis:
            state[f"basis_{axis}"] = torch.diag_embed(eigs).to(basis_dtype)
            state[f"speed_{axis}"] = torch.zeros_like(eigs[..., 0])
            if residual:
                state[f"memory_{axis}"] = torch.diag_embed(eigs).to(basis_dtype)
    large = ["momentum"] if momentum else []
    if rule.eigenvalues == "corrected" and len(full) > 1:
        large.append("second_moment")
    if rule.grafting is not None:
        large.append("graft")
    for name in large:
        state[name] = torch.zeros(shape, dtype=dtype, device=device)
    return state


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
    rotated = _rotate(gradient, state)
    direction = rotated
    if "momentum" in state:
        weight = _spread(_rate(rates.beta1, state["step"], min(rule.start, 1.0)), rotated)
        state["momentum"].lerp_(rotated.to(state["momentum"].dtype), weight.to(state["momentum"].dtype))
        direction = state["momentum"].to(wide)
        if rule.nesterov is True:
            direction = direction.lerp(rotated, 1 - rates.beta1)
        elif rule.nesterov:
            direction = direction.lerp(rotated, rule.nesterov)

    samples = rotated[..., None] if curvature is None else _rotate(curvature.to(wide), state)
    samples, past = _whiten(samples, state, rule, rates)
    del rotated  # memory is short while bases turn
    turns = _rotations(samples, past, state, rule, rates) if turn else {}
    _learn_eigenvalues(samples, past, state, rule, rates)
    del samples
    if rule.turn_first:
        for axis, q in turns.items():
            direction = _turn(direction, q, axis)
        _turn_bases(turns, state, rule)
    direction = _unrotate(_precondition(direction, state, rule), state)
    if not rule.turn_first:
        _turn_bases(turns, state, rule)
    return _limit(direction, gradient, state, rule, rates)


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """Give one number per stack element as many axes as a stack has."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _rate(beta: Tensor, time: Tensor, start: float) -> Tensor:
    """Return the weight of the newest term of a running average at each time 1, 2, ...

    With ``start = 1`` it is ``(1 - beta) / (1 - beta^t)``, Adam's bias correction written as a recursion: the average
    starts as a mean. Larger values forget the first terms faster, about as ``start / t``; 0 means ``1 - beta`` always.
    """
    if start == 0:
        return (1 - beta).expand_as(time)
    return (1 - beta) / (1 - beta ** (1 + (time - 1) / start))


def _rotate(x: Tensor, state: State) -> Tensor:
    """Return ``x``, which may have a trailing axis of samples, in the eigenbasis: each axis times ``B^T``."""
    dtype = x.dtype
    for axis in range(x.ndim - 2):
        if f"basis_{axis}" in state:
            x = _turn(x, state[f"basis_{axis}"], axis)
    return x.to(dtype)


def _unrotate(x: Tensor, state: State) -> Tensor:
    """Undo :func:`_rotate`."""
    return _rotate(x, {name: transpose(basis) for name, basis in state.items() if name.startswith("basis_")})


def _turn(x: Tensor, q: Tensor, axis: int) -> Tensor:
    """Return ``x`` with one axis multiplied by ``Q^T``: block by block on the first axis, shared on the others."""
    x = x.to(q.dtype)
    if axis == 0:
        return matmul(transpose(q), x.flatten(3) if x.ndim > 3 else x[..., None]).view_as(x)
    moved = x.movedim(axis + 2, -1)
    return matmul(moved.flatten(1, -2), q[:, 0]).view(moved.shape).movedim(-1, axis + 2)


def _whiten(samples: Tensor, state: State, rule: Rule, rates: Rates) -> tuple[Tensor, Tensor]:
    """Return samples in units in which their squares are safe, and the factor that takes ``alpha`` to these units.

    The unit is the largest entry, or ``sqrt(alpha)`` if all entries are far smaller; from here on it is the scale. The
    first samples that are not all zero set ``alpha`` to their mean square.
    """
    axes = tuple(range(1, samples.ndim))
    unit = torch.maximum(torch.linalg.vector_norm(samples, torch.inf, dim=axes), FAINT * state["scale"])
    if not rule.relative_damping:
        unit = torch.maximum(unit, rates.damping.sqrt())
    unit = torch.where(unit > 0, unit, 1.0)
    samples = samples / _spread(unit, samples)
    size = torch.linalg.vector_norm(samples, dim=axes) / samples[0, ..., 0].numel() ** 0.5
    scale = torch.where(state["scale"] > 0, state["scale"] / unit, size)
    state["scale"].copy_(torch.where(scale > 0, unit, 0.0))
    past = torch.where(scale > 0, scale, 1.0).square()
    for name in [name for name in state if name.startswith("memory")]:
        state[name].mul_(past[:, None, None, None])
    return samples, past


def _inverse(state: State, axis: int, ndim: int) -> Tensor:
    """Return ``1/d`` of an axis, shaped to multiply samples."""
    values = state[f"eigs_{axis}"].reciprocal()
    return values.view(*values.shape[:2], *[1] * axis, -1, *[1] * (ndim - 3 - axis))


def _damping(axes: int, past: Tensor, state: State, rule: Rule, rates: Rates) -> Tensor:
    """Return the paper's ``lambda`` in the units of whitened samples, shape ``(b,)``."""
    if not rule.relative_damping:
        return (rates.damping.sqrt() / torch.where(state["scale"] > 0, state["scale"], 1.0)).square()
    level = rates.damping * past
    for axis in range(axes):
        level = level * state[f"eigs_{axis}"].mean((1, 2))
    return level


def _axis_damping(axis: int, axes: int, level: Tensor, state: State) -> Tensor:
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


def _learn_eigenvalues(samples: Tensor, past: Tensor, state: State, rule: Rule, rates: Rates) -> None:
    """Move ``d``, ``alpha`` and the corrected eigenvalues towards the squares of the whitened samples."""
    axes = samples.ndim - 3
    rate = _rate(rates.beta2, state["step"], rule.start)
    keep = (1 - rule.decay * rate) * past
    square = samples.square().sum(-1) if samples.shape[-1] > 1 else samples[..., 0].square()
    level = _damping(axes, past, state, rule, rates)
    limits = torch.finfo(square.dtype)
    learned = []
    for axis in range(axes):
        eigs = state[f"eigs_{axis}"]
        newest = _measure(square, axis, state) + _axis_damping(axis, axes, level, state)
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
        square.add_(_spread(level, square)).mul_(_spread(rate * shrink, square))
        moment.mul_(_spread(keep * shrink, square)).add_(square)
    state["scale"].mul_((change / 2).exp()).clamp_(max=limits.max)


def _rotations(samples: Tensor, past: Tensor, state: State, rule: Rule, rates: Rates) -> dict[int, Tensor]:
    """Return, for each axis that has a basis, the rotation ``Q`` of the basis towards the newest samples."""
    axes = samples.ndim - 3
    level = _damping(axes, past, state, rule, rates)
    state["turns"] += 1
    turns = {}
    for axis in range(axes):
        if f"basis_{axis}" not in state:
            continue
        weighted = samples
        for other in range(axes):
            if other != axis:
                weighted = weighted * _inverse(state, other, samples.ndim)
        if axis == 0:
            left, right = weighted.flatten(3), samples.flatten(3)
        else:
            left, right = (x.movedim(axis + 2, 1).flatten(2)[:, None] for x in (weighted, samples))
        w = matmul(left, transpose(right)) / (right.shape[-1] / samples.shape[-1])
        diagonal(w).add_(_axis_damping(axis, axes, level, state))
        turns[axis] = _rotation(axis, w, past, state, rule, rates)
    return turns


def _rotation(axis: int, w: Tensor, past: Tensor, state: State, rule: Rule, rates: Rates) -> Tensor:
    """Return ``Q = Cayley(N)`` for one axis, and keep the residual in the turned basis."""
    eigs, memory = state[f"eigs_{axis}"], state.get(f"memory_{axis}")
    beta = rates.beta2 if rule.rotation == "normalized" else 1 - rates.basis
    rate = _rate(beta, state["turns"], rule.start)[:, None, None, None]
    old = torch.diag_embed(past[:, None, None] * eigs) if memory is None else memory.to(w.dtype)
    average = old.mul_(1 - rule.decay * rate).add_(w.mul_(rate))
    if rule.rotation == "bounded":
        generator = bounded(eigs, average)
    elif rule.rotation == "normalized":
        generator = normalized(eigs, average, rate=rates.basis, gap=rule.gap)
    else:
        generator = moore_penrose(past[:, None, None] * eigs, average, gap=rule.gap)
    state[f"speed_{axis}"].copy_(torch.linalg.matrix_norm(generator))
    q = _orthogonal(generator.to(state[f"basis_{axis}"].dtype), rule)
    if memory is not None:
        memory.copy_(matmul(matmul(transpose(q), average.to(q.dtype)), q))
    return q


def _turn_bases(turns: dict[int, Tensor], state: State, rule: Rule) -> None:
    """Turn the bases, ``B <- B Q``, and with them the momentum, which lives in their coordinates."""
    for axis, q in turns.items():
        basis = state[f"basis_{axis}"]
        turned = matmul(basis, q)
        if rule.reorthonormalize == 1:
            turned = reorthonormalize(turned)
        elif rule.reorthonormalize:
            due = (state["turns"] % rule.reorthonormalize == 0)[:, None, None, None]
            turned = torch.where(due, reorthonormalize(turned), turned)
        basis.copy_(turned)
        if "momentum" in state:
            state["momentum"].copy_(_turn(state["momentum"], q, axis))


def _orthogonal(generator: Tensor, rule: Rule) -> Tensor:
    """Return ``Cayley(N)``, exactly or nearly."""
    if rule.maps == "exact":
        return cayley(generator)
    # The paper's rotation has its length set already; the bounded one can exceed the cap, in the first steps mostly.
    cap = None if rule.rotation == "normalized" else rule.cap
    if rule.maps == "truncated":
        return truncated_cayley(generator, cap)
    square = matmul(generator, generator)
    if cap is not None:
        short = shrink_factor(square, cap).to(generator.dtype)
        generator, square = generator * short, square * short.square()
    # To second order; what this lacks in orthogonality the Newton-Schulz step on the basis makes good.
    q = 2 * (generator + square)
    diagonal(q).add_(1)
    return q


def _precondition(direction: Tensor, state: State, rule: Rule) -> Tensor:
    """Divide by the eigenvalues of the stack to the power ``1/p``; all zero as long as no curvature was seen."""
    axes = direction.ndim - 2
    if "second_moment" in state:
        spectrum = state["second_moment"].to(direction.dtype)
    else:
        spectrum = state["eigs_0"].view(*state["eigs_0"].shape, *[1] * (axes - 1))
        for axis in range(1, axes):
            spectrum = spectrum / _inverse(state, axis, axes + 2)
    spectrum = spectrum.clamp_min(torch.finfo(spectrum.dtype).tiny)
    root = spectrum.sqrt_() if rule.root == 2 else spectrum.pow_(1 / rule.root)
    scale = _spread(state["scale"], root)
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
    weight = _spread(_rate(rates.beta2, state["step"], min(rule.start, 1.0)), gradient)
    # Of the mean square the root is kept: hypot squares what does not fit the number format if squared.
    root = torch.hypot((1 - weight).sqrt() * state["graft"].to(gradient.dtype), weight.sqrt() * gradient)
    state["graft"].copy_(root)
    step = gradient
    if rule.grafting == "adam" and "momentum" in state:
        step = _unrotate(state["momentum"].to(gradient.dtype), state)
    # Adam's entries are a few units at most, but momentum that was turned has noise where there was hardly a gradient.
    return torch.where(root > 0, step / root, 0.0).clamp(-10, 10)
