"""The arithmetic of a Gaussian posterior: draws from it, and how its precision learns from gradients at the draws.

The posterior of a stack of weights is ``N(mu, (lambda S)^-1)``, with the effective number of examples ``lambda`` and
the curvature ``S`` of the optimizer's kernel. It is best where ``S`` is the mean over the posterior of the Hessian of
the loss (of one example), plus ``delta / lambda`` for a prior of precision ``delta``.

Squared gradients need no arithmetic of their own: the gradient of ``B`` examples has the covariance ``F / B``, so that
``B g g^T`` is an estimate of the Fisher matrix ``F``, and the kernel learns it from ``sqrt(B) g``.

Gradients at draws ``w = mu + x`` tell more (the reparametrization trick): ``E[lambda S x g(w)^T]`` is the mean Hessian,
whatever its signs are. Written for ``z = (lambda S)^(1/2) x``, which is standard normal, and for what the gradient has
beyond that of the quadratic function that ``S`` stands for, it says by which factor ``S`` is wrong::

    v = (lambda / S)^(1/2) (g(w) + delta / lambda x - m - S x)
    M = E[(z v^T + v z^T) / 2] = S^(-1/2) (H + delta / lambda) S^(-1/2) - I

The momentum ``m`` of earlier steps is independent of ``z``, so subtracting it changes no mean, only noise. Eigenvalues
move by ``exp(rate M_ii)``: they stay positive however negative the curvature is, and noise moves their logarithms
equally far up and down.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.linalg import diagonal

from ..core.maps import exp
from ..core.step import learn
from .kernel import (
    LARGEST,
    Turns,
    _normalize,
    _precondition,
    _project,
    _rate,
    _size,
    _turn,
    _turning,
    _within_range,
    products_of_eigs,
    rotate,
)
from .state import Rates, Rule, State

Reduce = Callable[[Tensor], Tensor]
"""Averages a tensor over the ranks that drew different weights."""
WARM = 10
"""The first guess of the curvature counts as so many estimates."""
LONGEST = 0.5
"""Logarithms of eigenvalues change by no more than this in a step, for one estimate may be far off."""


def bases_of(state: State) -> Turns:
    """Return the bases of a stack by axis."""
    return {int(name[6:]): basis for name, basis in state.items() if name.startswith("basis")}


def roots(state: State) -> Tensor:
    """Return the square roots of the eigenvalues of ``S``, shape ``(b, k, n0, ..., nl)``."""
    products = state.get("second_moment")
    products = products_of_eigs(state, sum(name.startswith("eigs") for name in state)) if products is None else products
    return products.to(state["scale"].dtype).sqrt().mul_(state["scale"].view(-1, *[1] * (products.ndim - 1)))


def colored(noise: Tensor, root: Tensor, state: State) -> Tensor:
    """Return deviations ``S^(-1/2) z`` from the mean, given noise in the eigenbasis and the roots of ``S``."""
    return rotate(noise / root, bases_of(state), back=True)


def whitened(vectors: Tensor, state: State) -> Tensor:
    """Return ``S^(-1/2) v`` in the eigenbasis for vectors along the last axis: variances are their squares."""
    root = roots(state)[..., None]
    return rotate(vectors.to(root.dtype), bases_of(state)) / root


def begin(state: State, gradient: Tensor, curvature: float, damping: float) -> None:
    """Set the curvature in new state, the same in all directions, by the mean square of a first gradient.

    It should be too large if anything: what starts too narrow soon becomes wide enough, but draws from what is too wide
    have gradients beyond measure. It counts as ``WARM`` gradients.

    Args:
        state: a parameter's state, changed in place.
        gradient: the first gradient.
        curvature: by what the mean square is multiplied.
        damping: the prior's ``delta / lambda``.
    """
    unit = gradient.abs().max().clamp_min(torch.finfo(torch.float32).tiny).float()
    size = unit * (gradient.float() / unit).square().mean().sqrt()  # entries of any size are safe
    size = torch.hypot(size * curvature**0.5, torch.full_like(size, damping**0.5))
    for name, value in state.items():
        if name.startswith("step"):
            value.fill_(WARM)
        elif name.startswith("scale"):
            value.copy_(size.expand_as(value))
        elif name.startswith("second_moment"):
            end = name.removeprefix("second_moment")
            value.copy_(torch.ones(()) if "scale" + end in state else size.square())


def reparametrized(
    ess: float,
    average: Reduce,
    gradient: Tensor,
    vectors: Tensor | None,
    state: State,
    rule: Rule,
    rates: Rates,
    turn: bool,
    given: Tensor | None = None,
) -> Tensor:
    """Learn from gradients at draws and return the directions to go against.

    Args:
        ess: ``lambda``, the effective number of examples.
        average: averages over ranks.
        gradient: that of the loss and the prior, its mean over the draws, shape ``(b, k, n0, ..., nl)``.
        vectors: noise ``z`` of the draws in the eigenbasis, then the gradients of the loss at them plus that of the
            prior at the mean, along the last axis, half of each.
        state: the stack's state, changed in place.
        rule: what to do.
        rates: decay rates; the damping is the prior's ``delta / lambda``.
        turn: whether the bases turn in this step.
        given: is ignored.
    """
    axes = gradient.ndim - 2
    state["step"] += 1
    bases = bases_of(state)
    rotated = rotate(_within_range(gradient, state, bases), bases)
    rate = _rate(rates.beta2, state["step"], rule.start)
    assert vectors is not None
    noise, found = vectors.to(rate.dtype).chunk(2, -1)
    found = rotate(_within_range(found, state, bases), bases)
    if "momentum" in state:
        found = found - state["momentum"].to(rate.dtype)[..., None]
    turns = _learn(noise, found, ess, state, rule, rates, rate, bases if turn else {}, average)
    if "momentum" in state:
        weight = _rate(rates.beta1, state["step"], min(rule.start, 1.0)).view(-1, *[1] * (axes + 1))
        state["momentum"].lerp_(rotated.to(state["momentum"].dtype), weight.to(state["momentum"].dtype))
    direction = rotate(_precondition(rotated, state, rule, rates), bases, back=True)
    _turn(turns, bases, state, rule, given)
    return direction if rule.clip is None else direction * (rule.clip / _size(direction).clamp_min(rule.clip))


def _learn(
    noise: Tensor,
    found: Tensor,
    ess: float,
    state: State,
    rule: Rule,
    rates: Rates,
    rate: Tensor,
    bases: Turns,
    average: Reduce,
) -> dict[int, Tensor]:
    """Learn eigenvalues and scale from noise and centered gradients, ``(b, k, n0, ..., nl, K)``; return rotations."""
    axes = noise.ndim - 3
    root = roots(state)[..., None]
    limit = LARGEST[rate.dtype] ** 0.25
    surplus = (ess**0.5 * found / root + (rates.damping / root.square() - 1) * noise).clamp(-limit, limit)
    turning = _turning(rule, rates, state, bases) if bases else {}
    column = rate[:, None, None]
    learned, turns = [], {}
    for axis in range(axes):
        relative = average(_surplus_of(noise, surplus, axis, axis in bases))
        size = diagonal(relative) if axis in bases else relative
        cap = (LONGEST / (column * size.abs().amax((1, 2), keepdim=True))).clamp_max(1.0)
        eigs = state[f"eigs_{axis}"]
        if axis in bases:
            side = eigs.sqrt()
            relative = cap[..., None] * relative * side[..., :, None] * side[..., None, :] + torch.diag_embed(eigs)
        else:
            relative = eigs * (1 + cap * relative)
        result = learn(eigs, relative, rate=column, positive=exp, **(turning if axis in bases else {}))
        learned.append(result.eigs.flatten(1))
        if result.turn is not None and result.speed is not None:
            turns[axis] = result.turn
            state[f"speed_{axis}"].copy_(result.speed)
    _normalize(learned, state)
    return turns


def _surplus_of(noise: Tensor, surplus: Tensor, axis: int, full: bool) -> Tensor:
    """Return ``M`` of one axis, the mean over all others and over the draws, or its diagonal."""
    if not full:
        product = (noise * surplus).movedim(axis + 2, 2).flatten(3).mean(-1)  # (b, k, n)
        return product if axis == 0 else product.mean(1, keepdim=True)
    draws = noise.shape[-1]
    project = partial(_project, axis=axis, inverses=[])
    # A product of two is a difference of squares.
    return (project(noise + surplus) - project(noise - surplus)) / (4 * draws)
