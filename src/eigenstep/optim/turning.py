"""Turning the bases of a stack: to new coordinates and back, and each basis towards the newest samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.generators import bounded, moore_penrose, normalized
from ..core.maps import cayley, reorthonormalize, shrink_factor, truncated_cayley
from ..core.numerics import diagonal, matmul, transpose
from .eigenvalues import axis_damping, damping_level, inverse
from .state import Rates, Rule, State, rate_of


def rotations(samples: Tensor, past: Tensor, state: State, rule: Rule, rates: Rates) -> dict[int, Tensor]:
    """Return, for each axis that has a basis, the rotation ``Q`` of the basis towards the newest samples."""
    axes = samples.ndim - 3
    level = damping_level(axes, past, state, rule, rates)
    state["turns"] += 1
    turns = {}
    for axis in range(axes):
        if f"basis_{axis}" not in state:
            continue
        weighted = samples
        for other in range(axes):
            if other != axis:
                weighted = weighted * inverse(state, other, samples.ndim)
        if axis == 0:
            left, right = weighted.flatten(3), samples.flatten(3)
        else:
            left, right = (x.movedim(axis + 2, 1).flatten(2)[:, None] for x in (weighted, samples))
        w = matmul(left, transpose(right)) / (right.shape[-1] / samples.shape[-1])
        diagonal(w).add_(axis_damping(axis, axes, level, state))
        turns[axis] = _rotation(axis, w, past, state, rule, rates)
    return turns


def _rotation(axis: int, w: Tensor, past: Tensor, state: State, rule: Rule, rates: Rates) -> Tensor:
    """Return ``Q = Cayley(N)`` for one axis, and keep the residual in the turned basis."""
    eigs, memory = state[f"eigs_{axis}"], state.get(f"memory_{axis}")
    beta = rates.beta2 if rule.rotation == "normalized" else 1 - rates.basis
    rate = rate_of(beta, state["turns"], rule.start)[:, None, None, None]
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


def turn_bases(turns: dict[int, Tensor], state: State, rule: Rule) -> None:
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
            state["momentum"].copy_(turn_axis(state["momentum"], q, axis))


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


def rotate(x: Tensor, state: State) -> Tensor:
    """Return ``x``, which may have a trailing axis of samples, in the eigenbasis: each axis times ``B^T``."""
    dtype = x.dtype
    for axis in range(x.ndim - 2):
        if f"basis_{axis}" in state:
            x = turn_axis(x, state[f"basis_{axis}"], axis)
    return x.to(dtype)


def unrotate(x: Tensor, state: State) -> Tensor:
    """Undo :func:`rotate`."""
    return rotate(x, {name: transpose(basis) for name, basis in state.items() if name.startswith("basis_")})


def turn_axis(x: Tensor, q: Tensor, axis: int) -> Tensor:
    """Return ``x`` with one axis multiplied by ``Q^T``: block by block on the first axis, shared on the others."""
    x = x.to(q.dtype)
    if axis == 0:
        return matmul(transpose(q), x.flatten(3) if x.ndim > 3 else x[..., None]).view_as(x)
    moved = x.movedim(axis + 2, -1)
    return matmul(moved.flatten(1, -2), q[:, 0]).view(moved.shape).movedim(-1, axis + 2)
