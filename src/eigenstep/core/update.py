"""``update``, the step of learning for one matrix of any structure.

It projects curvature to ``W`` of each factor, lets each factor learn (``eigenstep.core.step``), and
scales Kronecker factors back to determinant one, the scale going to ``alpha``.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.linalg import diagonal

from .checks import check_damping, check_linear, check_number, choose, describe
from .curvature import Curvature, project, project_identity
from .matrices import SPD, Diagonal, Full, Kronecker, factors_of, scale_of
from .step import (
    POSITIVE,
    TURNING,
    Learned,
    Positive,
    Turning,
    accumulation_dtype,
    largest,
    learn,
    reorthonormalize,
    saturate,
    truncated_exp,
)

Structure = TypeVar("Structure", bound=SPD)


def update(
    S: Structure,
    curvature: Curvature,
    *,
    lr: float,
    decay: float = 1.0,
    damping: float | Tensor = 0.0,
    positive: str | Positive = "exp",
    turning: Turning = TURNING,
) -> Structure:
    """Return ``S`` after one step of ``S <- (1 - lr decay) S + lr H``, to first order in ``lr``.

    Args:
        S: the matrix that learns: ``Full``, ``Diagonal`` or ``Kronecker``.
        curvature: what it learns from, ``H``.
        lr: the paper's beta-2, step size of the eigenvalues, and of the basis unless ``turning``
            has a rate (the paper's beta-bar-2 is of this kind, too).
        decay: the paper's gamma between 0 (sum up curvature) and 1 (running average).
        damping: the paper's lambda: ``H`` counts as ``H + damping I`` (Kronecker factors get the
            paper's Lambda). A number, or one for each matrix of a batch, shape ``(*batch,)``.
        positive: map that moves the eigenvalues: "exp" for any curvature or "truncated_exp",
            cheaper and closer to the linear update, for curvature without negative eigenvalues; or
            a function.
        turning: how bases turn.
    """
    positive = choose(positive, POSITIVE, "positive")
    projected = project(S, curvature)
    check_number(lr, "lr", 0.0)
    check_number(decay, "decay", 0.0, 1.0)
    check_damping(damping, scale_of(S))
    if not isinstance(turning, Turning):
        raise TypeError(f"turning must be a Turning, got {describe(turning)}")
    rate = lr if turning.rate is None else cast(float, turning.rate)
    check_number(rate, "turning.rate", 0.0)
    if positive is truncated_exp:
        check_linear(bool(curvature.semidefinite), lr, rate, decay, turning.rayleigh)
    step = partial(learn, rate=lr, decay=decay, positive=positive, turning=turning)
    factors = []
    for factor, W, identity in zip(factors_of(S), projected, project_identity(S), strict=True):
        if rate == 0 and isinstance(factor, Full):
            W = diagonal(W)
        level = saturate(damping * identity)[..., None]
        factors.append(_learn(factor, partial(step, W=W, damping=level), turning.mend))
    if isinstance(S, Kronecker):
        return cast(Structure, _with_unit_determinants(S, factors))
    return cast(Structure, factors[0])


def _learn(factor: Full | Diagonal, step: Callable[..., Learned], mend: bool) -> Full | Diagonal:
    """Return a factor after a step of ``learn``, its basis turned by what was learned."""
    if not isinstance(factor, Full):
        return replace(factor, eigs=step(factor.eigs).eigs)
    learned = step(factor.eigs, residual=factor.residual)
    basis = factor.basis
    if learned.turn is not None:
        wide = accumulation_dtype(basis.dtype)
        basis = basis.to(wide) @ learned.turn.to(wide)
        basis = (reorthonormalize(basis) if mend else basis).to(factor.basis.dtype)
    return Full(basis, learned.eigs, learned.residual)


def _with_unit_determinants(S: Kronecker, factors: Sequence[Full | Diagonal]) -> Kronecker:
    """Scale the factors back to determinant one; the mean of their logarithms goes to the scale."""
    means = torch.stack([factor.eigs.log().mean(-1) for factor in factors])
    scale = (S.scale.log() + means.mean(0)).exp()
    scale = scale.clamp(torch.finfo(scale.dtype).tiny, largest(scale.dtype))
    return Kronecker(scale, tuple(factor.with_unit_determinant() for factor in factors))
