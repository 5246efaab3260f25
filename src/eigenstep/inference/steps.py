"""One step of the precision matrix, ``S <- (1 - beta gamma) S + beta H``, and how far it may go.

Both kinds of steps are ``eigenstep.update`` on spectral factors. The exact one turns the basis until the
average is diagonal to rounding, by matrix products and solves alone; the first-order one is the paper's.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.linalg import diagonal

from ..core.curvature import Curvature, factors_of, project, project_identity
from ..core.kronecker import Kronecker
from ..core.matrices import SPD, Full
from ..core.numerics import symmetrize
from ..core.step import update

Structure = TypeVar("Structure", bound=SPD)
SWEEPS = (4, 16, 64)
"""Turns of an exact step: few are enough close to the end, 64 for a matrix of condition 1e12 in an unknown basis."""
KEEP = 0.25  # Where curvature is negative, an exact step leaves at least this fraction of S in every direction


class NotPositiveDefinite(ArithmeticError):
    """A step would leave the cone of positive-definite matrices."""


def average(
    S: Structure, curvature: Curvature, *, lr: float, decay: float = 1.0, damping: float = 0.0, exact: bool = True
) -> Structure:
    """Return ``(1 - lr decay) S + lr (H + damping I)`` in spectral form, for a Kronecker product factor by factor.

    Either exactly, up to rounding, or ``NotPositiveDefinite`` is raised; or by the paper's update, which agrees to
    first order in ``lr`` and stays positive definite whatever comes.
    """
    if not exact:
        return update(S, curvature, lr=lr, decay=decay, damping=damping)
    start = _map_full(S, Full.with_residual)
    for sweeps in SWEEPS:
        how: Any = {"rayleigh": True, "sweeps": sweeps, "positive": _move_exactly}
        new = update(start, curvature, lr=lr, decay=decay, damping=damping, **how)
        if all(_is_diagonal(factor) for factor in factors_of(new) if isinstance(factor, Full)):
            break
    return _map_full(new, lambda factor: replace(factor, residual=None))


def _map_full(S: Structure, function: Callable[[Full], Full]) -> Structure:
    """Apply a function to all full factors."""
    if isinstance(S, Kronecker):
        factors = tuple(function(factor) if isinstance(factor, Full) else factor for factor in S.factors)
        return cast(Structure, replace(S, factors=factors))
    return cast(Structure, function(S)) if isinstance(S, Full) else S


def _is_diagonal(factor: Full) -> bool:
    """Tell whether the average, which the factor remembers, is diagonal up to rounding in the basis that was found."""
    memory = cast(Tensor, factor.residual)
    off = memory - torch.diag_embed(diagonal(memory))
    roots = factor.eigs.rsqrt()
    return bool((roots[:, None] * off * roots).abs().max() <= torch.finfo(roots.dtype).eps ** 0.75)


def _move_exactly(eigs: Tensor, target: Tensor) -> Tensor:
    """Return where the linear update puts the eigenvalues, or raise: nothing is cut off."""
    if not (target > 0).all() or not torch.isfinite(target).all():
        raise NotPositiveDefinite(
            f"the average of S and the curvature has an eigenvalue {target.min():.3g} beside {target.max():.3g}: it is "
            f"not positive definite, or not to {eigs.dtype} rounding"
        )
    return target


def tangent_vector(S: SPD, curvature: Curvature, damping: float = 0.0) -> tuple[Tensor, float, float]:
    """Return the natural gradient step ``H - S`` in orthonormal coordinates of the Fisher-Rao metric, as one vector.

    Its squared length is twice the decrease of the variational objective that a full step promises. The other numbers
    are the smallest and the largest eigenvalue of ``S^-1/2 H S^-1/2``. The damping is a part of ``H``.
    """
    total, parts, low, high = math.prod(S.sizes), [], math.inf, -math.inf
    for factor, w, identity in zip(factors_of(S), project(S, curvature), project_identity(S), strict=True):
        roots = factor.eigs.rsqrt()
        if isinstance(factor, Full):
            relative = symmetrize(roots[:, None] * w * roots) + torch.diag(damping * identity * roots.square())
            extremes = torch.linalg.eigvalsh(relative)
            turned = factor.basis @ relative @ factor.basis.mT
        else:
            extremes = w * roots.square() + damping * identity * roots.square()
            turned = torch.diag(extremes)
        low, high = min(low, extremes.min().item()), max(high, extremes.max().item())
        mean = diagonal(turned).mean()
        weight = (total / len(roots) / 2) ** 0.5
        parts.append(weight * (turned - mean * torch.eye(len(roots)).to(turned)).flatten())
    # All factors share one scale, of which each sees the same mean.
    return torch.cat([*parts, ((total / 2) ** 0.5 * (mean - 1))[None]]), low, high


def longest_step(low: float, high: float, exact: bool) -> float:
    """Return the largest ``beta`` that keeps ``S`` well inside the cone.

    An exact step is free where the curvature has no negative eigenvalue, and leaves ``KEEP`` of ``S`` elsewhere. A
    first-order step may change the logarithms of the eigenvalues by one.
    """
    if exact:
        return 1.0 if low > 0 else (1 - KEEP) / (1 - low)
    return 1 / max(abs(low - 1), abs(high - 1), 1.0)
