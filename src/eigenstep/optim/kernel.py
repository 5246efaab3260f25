"""The optimizer's arithmetic: one batched step for a stack of same-shaped tensors, no parameter in sight.

A stack holds ``b`` gradients, each of ``k`` blocks with axes ``n0, ..., nl``, as one tensor ``(b, k, n0, ..., nl)``.
Its curvature is ``S = alpha S0 x ... x Sl``, one factor for each axis; the factor of the first axis is block-diagonal
with one block for each of the ``k``, all other factors are shared by the blocks. Nothing here reads a number back to
the host, so a step never waits for the device.

Gradients enter divided by ``sqrt(alpha)``, and ``alpha`` is kept as a logarithm: multiplying the loss by a constant
changes nothing, and no gradient is too large or too small to be squared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..linalg import accumulation_dtype, diagonal, matmul, transpose
from ..maps import cayley, exp, reorthonormalize, shrink_factor, truncated_cayley, truncated_exp
from ..rotation import bounded, moore_penrose, normalized
from ..spd import centered_exp

State = dict[str, Tensor]
"""The tensors of one stack, by name; :func:`initial_state` tells which."""

LOG_RANGE = 160.0
"""``|log alpha|`` stays below this, so that ``sqrt(alpha)`` fits float32."""


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
    nesterov: bool = False
    bias_correction: bool = True
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
    """Return the state of a stack before its first gradient: ``B = I``, ``d = 1``, and no scale yet.

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
        "log_scale": torch.full((shape[0],), -torch.inf, dtype=wide, device=device),
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
    wide = state["log_scale"].dtype
    state["step"] += 1
    gradient = gradient.to(wide)
    rotated = _rotate(gradient, state)
    direction = rotated
    if "momentum" in state:
        weight = _spread(_rate(rates.beta1, state["step"], rule), rotated)
        momentum = torch.lerp(state["momentum"].to(wide), rotated, weight)
        state["momentum"].copy_(momentum)
        direction = torch.lerp(momentum, rotated, 1 - rates.beta1) if rule.nesterov else momentum

    samples = rotated[..., None]
    if curvature is not None:
        samples = torch.stack([_rotate(v.to(wide), state) for v in curvature.unbind(-1)], dim=-1)
    samples, excess = _whiten(samples, state)
    turns = _turn_bases(samples, excess, state, rule, rates) if turn else {}
    _learn_eigenvalues(samples, excess, state, rule, rates)
    for axis, q in turns.items():
        direction = _turn(direction, q, axis)
    if turns and "momentum" in state:
        for axis, q in turns.items():
            momentum = _turn(momentum, q, axis)
        state["momentum"].copy_(momentum)

    direction = direction / _root_of_spectrum(state, rule)
    for axis in range(direction.ndim - 2):
        if f"basis_{axis}" in state:
            direction = _turn(direction, transpose(state[f"basis_{axis}"]), axis)
    return _limit(direction.to(wide), gradient, state, rule, rates)


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """Give one number per stack element as many axes as a stack has."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _rate(beta: Tensor, time: Tensor, rule: Rule) -> Tensor:
    """Return the weight of the newest term, ``(1 - beta) / (1 - beta^t)``: a running average that starts as a mean.

    This is Adam's bias correction written as a recursion.
    """
    return (1 - beta) / (1 - beta**time) if rule.bias_correction else (1 - beta).expand_as(time)


def _rotate(x: Tensor, state: State) -> Tensor:
    dtype = x.dtype
    for axis in range(x.ndim - 2):
        if f"basis_{axis}" in state:
            x = _turn(x, state[f"basis_{axis}"], axis)
    return x.to(dtype)


def _turn(x: Tensor, q: Tensor, axis: int) -> Tensor:
    """Return ``x`` with one axis multiplied by ``Q^T``: block by block on the first axis, shared on the others."""
    x = x.to(q.dtype)
    if axis == 0:
        return matmul(transpose(q), x.flatten(3) if x.ndim > 3 else x[..., None]).view_as(x)
    moved = x.movedim(axis + 2, -1)
    return matmul(moved.flatten(1, -2), q[:, 0]).view(moved.shape).movedim(-1, axis + 2)


def _whiten(samples: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Divide by ``sqrt(alpha)``, and by how much the largest entry exceeds it, so that the squares are safe.

    The first samples that are not all zero set ``alpha`` to their mean square.
    """
    axes = tuple(range(1, samples.ndim))
    peak = samples.abs().amax(axes)
    safe = torch.where(peak > 0, peak, 1.0)
    mean_square = (samples / _spread(safe, samples)).square().sum(-1).mean(axes[:-1])
    unset = torch.isinf(state["log_scale"]) & (peak > 0)
    start = (mean_square.log() + 2 * safe.log()).clamp(-LOG_RANGE, LOG_RANGE)
    state["log_scale"].copy_(torch.where(unset, start, state["log_scale"]))
    unit = torch.where(torch.isinf(state["log_scale"]), 1.0, (state["log_scale"] / 2).exp())
    excess = (peak / unit).clamp_min(1.0)
    return samples / _spread(unit * excess, samples), excess


def _inverse(state: State, axis: int, ndim: int) -> Tensor:
    """Return ``1/d`` of an axis, shaped to multiply samples."""
    values = state[f"eigs_{axis}"].reciprocal()
    return values.view(*values.shape[:2], *[1] * axis, -1, *[1] * (ndim - 3 - axis))


def _damping(axis: int, axes: int, state: State, rule: Rule, rates: Rates, excess: Tensor) -> Tensor:
    """Return the paper's ``Lambda / (alpha k)`` of an axis in the units of whitened samples, shape ``(b, 1, 1)``."""
    level = rates.damping / excess.square()
    if not rule.relative_damping:
        level = level * (-state["log_scale"]).exp()
    for other in range(axes):
        eigs = state[f"eigs_{other}"]
        if rule.relative_damping:
            level = level * eigs.mean((1, 2))
        if other != axis:
            level = level * eigs.reciprocal().mean((1, 2))
    return level[:, None, None]


def _learn_eigenvalues(samples: Tensor, excess: Tensor, state: State, rule: Rule, rates: Rates) -> None:
    """Move ``d``, ``alpha`` and the corrected eigenvalues towards the squares of the whitened samples."""
    axes = samples.ndim - 3
    rate = _rate(rates.beta2, state["step"], rule)[:, None, None]
    shrink = excess.square()[:, None, None]
    square = samples.square().sum(-1)
    positive = exp if rule.maps == "exact" else truncated_exp
    tiny = torch.finfo(square.dtype).tiny
    learned = []
    for axis in range(axes):
        weighted = square
        for other in range(axes):
            if other != axis:
                weighted = weighted * _inverse(state, other, samples.ndim - 1)
        summed = tuple(i for i in range(1 if axis else 2, square.ndim) if i != axis + 2)
        measured = weighted.mean(summed) if summed else weighted
        old = state[f"eigs_{axis}"] / shrink
        level = _damping(axis, axes, state, rule, rates, excess)
        new = (1 - rule.decay * rate) * old + rate * (measured.view_as(old) + level)
        learned.append(positive(old, new - old).clamp_min(tiny).log().flatten(1))
    change = torch.stack([logs.mean(-1) for logs in learned]).mean(0)
    for axis, logs in enumerate(learned):
        state[f"eigs_{axis}"].copy_(centered_exp(logs).view_as(state[f"eigs_{axis}"]))
        if f"memory_{axis}" in state:
            state[f"memory_{axis}"].mul_((-logs.mean(-1)).exp()[:, None, None, None])
    if "second_moment" in state:
        past = state["second_moment"].to(square.dtype)
        moment = _spread((1 - rule.decay * rate) / shrink, past) * past + _spread(rate, past) * square
        state["second_moment"].copy_(moment * _spread((-change).exp(), past))
    moved = (state["log_scale"] + 2 * excess.log() + change).clamp(-LOG_RANGE, LOG_RANGE)
    state["log_scale"].copy_(torch.where(torch.isinf(state["log_scale"]), state["log_scale"], moved))


def _turn_bases(samples: Tensor, excess: Tensor, state: State, rule: Rule, rates: Rates) -> dict[int, Tensor]:
    """Turn the bases towards the newest samples and return the rotation ``Q`` of each axis that has a basis."""
    axes = samples.ndim - 3
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
        level = _damping(axis, axes, state, rule, rates, excess)
        turns[axis] = _turn_basis(axis, w, level, excess, state, rule, rates)
    return turns


def _turn_basis(axis: int, w: Tensor, level: Tensor, excess: Tensor, state: State, rule: Rule, rates: Rates) -> Tensor:
    """Turn one basis, ``B <- B Q`` with ``Q = Cayley(N)``, and return ``Q``."""
    eigs, basis, memory = state[f"eigs_{axis}"], state[f"basis_{axis}"], state.get(f"memory_{axis}")
    beta = rates.beta2 if rule.rotation == "normalized" else 1 - rates.basis
    rate = _rate(beta, state["turns"], rule)[:, None, None, None]
    shrink = excess.square()[:, None, None, None]
    past = torch.diag_embed(eigs) if memory is None else memory.to(w.dtype)
    average = (1 - rule.decay * rate) / shrink * past + rate * w
    diagonal(average).add_(rate[..., 0] * level)

    if rule.rotation == "bounded":
        generator = bounded(eigs, average)
    elif rule.rotation == "normalized":
        generator = normalized(eigs, average, rate=rates.basis, gap=rule.gap)
    else:
        generator = moore_penrose(eigs / shrink[..., 0], average, gap=rule.gap)
    state[f"speed_{axis}"].copy_(torch.linalg.matrix_norm(generator))
    q = _orthogonal(generator.to(basis.dtype), rule)
    turned = matmul(basis, q)
    if rule.reorthonormalize == 1:
        turned = reorthonormalize(turned)
    elif rule.reorthonormalize:
        due = (state["turns"] % rule.reorthonormalize == 0)[:, None, None, None]
        turned = torch.where(due, reorthonormalize(turned), turned)
    basis.copy_(turned)
    if memory is not None:
        memory.copy_(matmul(matmul(transpose(q), average.to(q.dtype)), q))
    return q


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


def _root_of_spectrum(state: State, rule: Rule) -> Tensor:
    """Return the eigenvalues of the stack to the power ``1/p``."""
    wide = state["log_scale"].dtype
    if "second_moment" in state:
        spectrum = state["second_moment"].to(wide)
    else:
        axes = sum(name.startswith("eigs_") for name in state)
        spectrum = state["eigs_0"].view(*state["eigs_0"].shape, *[1] * (axes - 1))
        for axis in range(1, axes):
            spectrum = spectrum / _inverse(state, axis, axes + 2)
    spectrum = spectrum.clamp_min(torch.finfo(wide).tiny)
    root = spectrum.sqrt() if rule.root == 2 else spectrum.pow(1 / rule.root)
    log_scale = torch.where(torch.isinf(state["log_scale"]), 0.0, state["log_scale"])
    return root * _spread((log_scale / rule.root).exp(), root)


def _limit(direction: Tensor, gradient: Tensor, state: State, rule: Rule, rates: Rates) -> Tensor:
    """Clip the root mean square of each direction, or give it the size of another optimizer's step."""
    axes = tuple(range(1, direction.ndim))
    size = direction.square().mean(axes, keepdim=True).sqrt()
    if rule.clip is not None:
        direction = direction * (rule.clip / size.clamp_min(rule.clip))
    return direction
