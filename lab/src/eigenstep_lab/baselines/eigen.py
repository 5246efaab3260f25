"""The default scheme with an eigendecomposition at every step.

``S <- (1 - lr decay) S + lr H``, then ``S = B Diag(d) B^T`` anew: the scheme that the spectral
update equals to first order in ``lr`` without decomposing anything. For a Kronecker product each
factor does so with its own curvature, in which the other factors enter as inverses: ``S_C <- (1 -
lr decay) S_C + lr G S_K^-1 G^T / m``, known as KL-Shampoo. Each factor then moves the common scale
at the full rate, where the spectral scheme's ``alpha`` takes their mean.

Everything is done in the coordinates of the old eigenbasis, where ``S`` is diagonal. In exact
arithmetic this makes no difference; in floating point, small eigenvalues keep digits that they
would lose in the rounding errors of ``S``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from eigenstep.core.checks import check_number
from eigenstep.core.curvature import Curvature, project, project_identity
from eigenstep.core.matrices import Diagonal, Full, Kronecker, factors_of
from eigenstep.core.step import matmul, reorthonormalize, symmetrize

Matrix = TypeVar("Matrix", Full, Diagonal, Kronecker)


def update(
    S: Matrix, curvature: Curvature, *, lr: float, decay: float = 1.0, damping: float | Tensor = 0.0
) -> Matrix:
    """Return ``(1 - lr decay) S + lr (H + damping I)``, decomposed.

    Args:
        S: the matrix that learns.
        curvature: what it learns from, ``H``.
        lr: the paper's beta-2.
        decay: the paper's gamma.
        damping: a number, or one for each matrix of a batch, shape ``(*batch,)``; Kronecker factors
            get the paper's adaptive ``Lambda``.
    """
    check_number(lr, "lr", 0.0)
    check_number(decay, "decay", 0.0, 1.0)
    factors: list[Full | Diagonal] = []
    for factor, w, identity in zip(
        factors_of(S), project(S, curvature), project_identity(S), strict=True
    ):
        past = (1 - lr * decay) * factor.eigs + lr * (damping * identity)[..., None]
        if isinstance(factor, Full):
            eigs, turn = torch.linalg.eigh(symmetrize(torch.diag_embed(past) + lr * w))
            # The product of many rotations stays orthogonal with a Newton-Schulz step each.
            basis = reorthonormalize(matmul(factor.basis, turn)).to(factor.basis.dtype)
            factor = replace(factor, basis=basis)
        else:
            eigs = past + lr * w
        factors.append(replace(factor, eigs=_positive(eigs, curvature)))
    new = (
        Kronecker(S.scale, tuple(factors)).normalized() if isinstance(S, Kronecker) else factors[0]
    )
    assert isinstance(new, type(S))
    return new


def _positive(eigs: Tensor, curvature: Curvature) -> Tensor:
    """Return the eigenvalues, those that drown in rounding errors raised to the size of these."""
    if not curvature.semidefinite and not (eigs > 0).all():
        raise ValueError(
            f"curvature took an eigenvalue of S to {eigs.min():.3g}: the default scheme needs "
            "curvature without "
            "negative eigenvalues, or a smaller lr"
        )
    return eigs.clamp_min(torch.finfo(eigs.dtype).eps * eigs.amax(-1, keepdim=True))
