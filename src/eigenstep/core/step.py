"""The one step of learning that everything else is built on.

For each factor, with curvature ``W`` in its eigenbasis, damping ``lam`` and memory ``M``, which is ``Diag(d)`` unless
the factor keeps one (:meth:`eigenstep.core.matrices.Full.with_memory`)::

    A = (1 - gamma beta) M + beta (W + lam I)       average of old and new
    N = rotation(d, A)                              skew-symmetric generator
    B <- B orthogonal(N)                            Cayley map, exact or truncated
    d <- positive(d, change of the eigenvalues)     exponential map, exact or truncated

and for Kronecker products the factors are scaled back to determinant one, the scale going to ``alpha``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from .checks import check_beside, check_finite, check_function, check_number, check_size
from .curvature import Curvature, factors_of, project, project_identity, scale_of
from .generators import Rotation, bounded
from .maps import cayley, exp, reorthonormalize, truncated_exp
from .matrices import SPD, Diagonal, Full, Kronecker
from .numerics import accumulation_dtype, diagonal, largest, saturate, symmetrize, transpose

Structure = TypeVar("Structure", bound=SPD)


def update(
    S: Structure,
    curvature: Curvature,
    *,
    lr: float,
    basis_lr: float | None = None,
    decay: float = 1.0,
    damping: float | Tensor = 0.0,
    rotation: Rotation = bounded,
    orthogonal: Callable[[Tensor], Tensor] = cayley,
    positive: Callable[[Tensor, Tensor], Tensor] = exp,
    rayleigh: bool = False,
    sweeps: int = 1,
) -> Structure:
    """Return ``S`` after one step of ``S <- (1 - lr decay) S + lr H``, to first order in ``lr``, in spectral form.

    Args:
        S: the matrix that learns: ``Full``, ``Diagonal`` or ``Kronecker``.
        curvature: what it learns from, ``H``.
        lr: the paper's beta-2, step size of the eigenvalues, and of the basis unless ``basis_lr`` is given.
        basis_lr: step size of the basis (the paper's beta-bar-2 is of this kind, too); with 0 it stays as it is.
        decay: the paper's gamma between 0 (sum up curvature) and 1 (running average).
        damping: the paper's lambda: ``H`` counts as ``H + damping I`` (Kronecker factors get the paper's Lambda).
            A number, or one for each matrix of a batch, shape ``(*batch,)``.
        rotation: how the basis turns; see :mod:`eigenstep.core.generators`.
        orthogonal: map from generators to orthogonal matrices, ``cayley`` or ``truncated_cayley``.
        positive: map that moves the eigenvalues, ``exp`` for any curvature or ``truncated_exp``, cheaper and
            closer to the linear update, for curvature without negative eigenvalues.
        rayleigh: read the new eigenvalues off in the new basis (Rayleigh quotients) instead of the old one, as the
            paper does. Better when curvature is exact; with noisy curvature it fits the noise.
        sweeps: how many times the basis turns towards the same average: more are closer to its eigenvectors, which
            pays in the first steps, when the basis is still far from them.

    Returns:
        The new matrix, of the same structure and number formats.
    """
    basis_lr = lr if basis_lr is None else basis_lr
    projected = project(S, curvature)
    for value, name in ((rotation, "rotation"), (orthogonal, "orthogonal"), (positive, "positive")):
        check_function(value, name)
    _check_options(curvature, lr, basis_lr, decay, positive, rayleigh)
    check_size(sweeps, "sweeps")
    _check_damping(damping, scale_of(S))
    factors: list[Full | Diagonal] = []
    for factor, w, identity in zip(factors_of(S), projected, project_identity(S), strict=True):
        level = saturate(damping * identity)[..., None]
        new = diagonal(w) if isinstance(factor, Full) else w
        target = (1 - lr * decay) * factor.eigs + lr * (new + level)
        if isinstance(factor, Full) and basis_lr > 0:
            past = torch.diag_embed(factor.eigs) if factor.memory is None else factor.memory
            w = w + torch.diag_embed(level.expand_as(factor.eigs))
            average = turned = symmetrize((1 - basis_lr * decay) * past + basis_lr * w)
            basis = factor.basis.to(accumulation_dtype(factor.basis.dtype))
            for left in reversed(range(sweeps)):
                turn = orthogonal(rotation(factor.eigs, turned))
                # One Newton-Schulz step keeps the basis orthogonal for good, in any precision and with any map.
                basis = reorthonormalize(basis @ turn.to(basis.dtype))
                if left or rayleigh or factor.memory is not None:
                    turned = symmetrize(transpose(turn) @ turned @ turn)
            if rayleigh:
                target = target + diagonal(turned) - diagonal(average)
            memory = None if factor.memory is None else turned.to(factor.memory.dtype)
            factor = Full(basis.to(factor.basis.dtype), factor.eigs, memory)
        factors.append(replace(factor, eigs=positive(factor.eigs, target - factor.eigs)))
    return cast(Structure, _normalize(S, factors) if isinstance(S, Kronecker) else factors[0])


def _normalize(S: Kronecker, factors: list[Full | Diagonal]) -> Kronecker:
    """Scale the factors back to determinant one; the mean of their logarithms goes to the scale."""
    log_means = [factor.eigs.log().mean(-1) for factor in factors]
    scale = (S.scale.log() + sum(log_means) / len(factors)).exp()
    scale = scale.clamp(torch.finfo(scale.dtype).tiny, largest(scale.dtype))
    return Kronecker(scale, tuple(factor.with_unit_determinant() for factor in factors))


def _check_options(
    curvature: Curvature,
    lr: float,
    basis_lr: float,
    decay: float,
    positive: Callable[[Tensor, Tensor], Tensor],
    rayleigh: bool,
) -> None:
    check_number(lr, "lr", 0.0)
    check_number(basis_lr, "basis_lr", 0.0)
    check_number(decay, "decay", 0.0, 1.0)
    if positive is not truncated_exp:
        return
    if not curvature.semidefinite:
        raise ValueError(
            "positive=truncated_exp needs curvature without negative eigenvalues, or the eigenvalues of S could turn "
            "negative; use positive=exp, or pass semidefinite=True to Dense if the matrix is known to have none"
        )
    if lr * decay > 1:
        raise ValueError(f"positive=truncated_exp needs lr * decay <= 1, got lr={lr} and decay={decay}")
    if rayleigh and basis_lr not in (0, lr):
        raise ValueError(
            f"positive=truncated_exp with rayleigh=True needs basis_lr equal to lr or 0, or the eigenvalues of S could "
            f"turn negative; got basis_lr={basis_lr} and lr={lr}"
        )


def _check_damping(damping: float | Tensor, scale: Tensor) -> None:
    if not isinstance(damping, Tensor):
        return check_number(damping, "damping", 0.0)
    check_finite(damping, "damping")
    check_beside(damping, "damping", scale, "S")
    if damping.shape != scale.shape:
        raise ValueError(f"damping must be a number or have shape {tuple(scale.shape)}, got {tuple(damping.shape)}")
    if (damping < 0).any():
        raise ValueError(f"damping must be at least 0.0, got {damping.min():.3g}")
