"""The arithmetic of a Gaussian posterior: draws from it, and how its precision learns from
gradients at the draws.

The posterior of a stack of weights is ``N(mu, (lambda S)^-1)``, with the effective number of
examples ``lambda`` and the curvature ``S`` of the optimizer's kernel. It is best where ``S`` is the
mean over the posterior of the Hessian of the loss (of one example), plus ``delta / lambda`` for a
prior of precision ``delta``.

Squared gradients need nothing here: the kernel learns the Fisher matrix from ``sqrt(B) g`` of ``B``
examples.

Gradients at draws ``w = mu + x`` tell more (the reparametrization trick): ``E[lambda S x g(w)^T]``
is the mean Hessian, whatever its signs are. Written for ``z = (lambda S)^(1/2) x``, which is
standard normal, and for what the gradient has beyond that of the quadratic function that ``S``
stands for, it says by which factor ``S`` is wrong::

    v = (lambda / S)^(1/2) (g(w) + delta / lambda x - m - S x)
    M = E[(z v^T + v z^T) / 2] = S^(-1/2) (H + delta / lambda) S^(-1/2) - I

The momentum ``m`` of earlier steps is independent of ``z``: subtracting it changes no mean.
Eigenvalues move by ``exp(rate M_ii)``, and stay positive however negative the curvature is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.linalg import diagonal

from ..core.step import TURNING, exp, learn, running_rate
from . import kernel
from .state import Rates, Rule, State, products_of_eigs

WARM = 3
"""The first guess of the curvature counts as so many estimates."""
LONGEST = 0.5
"""Logarithms of eigenvalues change by no more than this in a step, for one estimate may be far off.
"""


def bases_of(state: State) -> kernel.Turns:
    """Return the bases of a stack by axis."""
    return {int(name[6:]): basis for name, basis in state.items() if name.startswith("basis")}


def roots(state: State) -> Tensor:
    """Return the square roots of the eigenvalues of ``S``, shape ``(b, k, n0, ..., nl)``."""
    products = state.get("second_moment")
    if products is None:
        products = products_of_eigs(state, sum(name.startswith("eigs") for name in state))
    return (
        products.to(state["scale"].dtype)
        .sqrt()
        .mul_(state["scale"].view(-1, *[1] * (products.ndim - 1)))
    )


def whitened(vectors: Tensor, state: State) -> Tensor:
    """Return ``S^(-1/2) v`` in the eigenbasis for vectors along the last axis: variances are their
    squares.
    """
    root = roots(state)[..., None]
    return kernel.rotate(vectors.to(root.dtype), bases_of(state)) / root


def begin(state: State, gradient: Tensor, weight: float, damping: float) -> None:
    """Set the curvature in new state: ``weight`` times the mean square of a first gradient, plus
    damping.

    It is the same in all directions, and should be too large if anything: what starts too narrow
    soon becomes wide enough, but draws from what is too wide have gradients beyond measure. It
    counts as ``WARM`` gradients.
    """
    gradient = gradient.float().nan_to_num(0.0, 0.0, 0.0)
    unit = gradient.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    size = unit * (gradient / unit).square().mean().sqrt()  # entries of any size are safe
    size = torch.hypot(size * weight**0.5, torch.full_like(size, damping**0.5))
    for name, value in state.items():
        if name.startswith("step"):
            value.fill_(WARM)
        elif name.startswith("scale"):
            value.copy_(size.expand_as(value))


def reparametrized(
    ess: float,
    average: Callable[[Tensor], Tensor],
    gradient: Tensor,
    vectors: Tensor,
    state: State,
    rule: Rule,
    rates: Rates,
    turn: bool,
    given: Tensor | None = None,
) -> Tensor:
    """Learn from gradients at draws, where there are ``ess`` examples, and return the directions to
    go against.

    All else is as for the kernel's step, but for the ``vectors``: the noise ``z`` of the draws in
    the eigenbasis, then the gradients at them plus that of the prior at the mean, along the last
    axis. ``average`` is over ranks that drew different weights, and the damping is the prior's
    ``delta / lambda``.
    """
    state["step"] += 1
    bases = bases_of(state)
    rotated = kernel.rotate(kernel._within_range(gradient, state, bases), bases)
    noise, found = vectors.to(rotated.dtype).chunk(2, -1)
    found = kernel.rotate(kernel._within_range(found, state, bases), bases)
    if "momentum" in state:
        found = found - state["momentum"].to(found.dtype)[..., None]
    root = roots(state)[..., None]
    most = kernel.LARGEST[root.dtype] ** 0.25
    surplus = (ess**0.5 * found / root + (rates.damping / root.square() - 1) * noise).clamp(
        -most, most
    )
    turns = _learn(noise, surplus, state, rule, rates, bases if turn else {}, average)
    if "momentum" in state:
        weight = running_rate(rates.beta1, state["step"], min(rule.start, 1.0)).view(
            -1, *[1] * (rotated.ndim - 1)
        )
        state["momentum"].lerp_(
            rotated.to(state["momentum"].dtype), weight.to(state["momentum"].dtype)
        )
    direction = kernel.rotate(kernel._precondition(rotated, state, rule, rates), bases, back=True)
    kernel._turn(turns, bases, state, rule, given)
    return (
        direction
        if rule.clip is None
        else direction * (rule.clip / kernel._size(direction).clamp_min(rule.clip))
    )


def _learn(
    z: Tensor,
    v: Tensor,
    state: State,
    rule: Rule,
    rates: Rates,
    bases: kernel.Turns,
    average: Callable[..., Tensor],
) -> dict[int, Tensor]:
    """Learn eigenvalues and scale from ``z`` and ``v``, shape ``(b, k, n0, ..., nl, K)``; return
    rotations.
    """
    rate = running_rate(rates.beta2, state["step"], rule.start)[:, None, None]
    turning = kernel._turning(rule, rates, state, bases) if bases else TURNING
    learned, turns = [], {}
    for axis in range(z.ndim - 3):
        eigs, full = state[f"eigs_{axis}"], axis in bases
        relative = average(_surplus(z, v, axis, full))
        size = (diagonal(relative) if full else relative).abs().amax((1, 2), keepdim=True)
        cap = (LONGEST / (rate * size)).clamp_max(1.0)
        side = eigs.sqrt()
        units = cap[..., None] * side[..., :, None] * side[..., None, :] if full else cap * eigs
        curvature = units * relative + (torch.diag_embed(eigs) if full else eigs)
        result = learn(eigs, curvature, rate=rate, positive=exp, turning=turning)
        learned.append(result.eigs.flatten(1))
        if result.turn is not None and result.speed is not None:
            turns[axis] = result.turn
            state[f"speed_{axis}"].copy_(result.speed)
    kernel._normalize(learned, state)
    return turns


def _surplus(z: Tensor, v: Tensor, axis: int, full: bool) -> Tensor:
    """Return ``M`` of one axis, the mean over all others and over the draws, or its diagonal."""
    if not full:
        product = (z * v).movedim(axis + 2, 2).flatten(3).mean(-1)  # (b, k, n)
        return product if axis == 0 else product.mean(1, keepdim=True)
    # A product of two is a difference of squares.
    return (kernel._project(z + v, axis, []) - kernel._project(z - v, axis, [])) / (4 * z.shape[-1])
