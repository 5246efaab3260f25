"""The one step of learning that everything else is built on.

It is written in eigen-coordinates. For one factor with eigenvalues ``d``, curvature ``W = B^T H
B``, damping ``lam`` and the average ``M`` of the curvature so far, which is ``Diag(d)`` unless the
factor keeps a residual::

    n = (1 - gamma beta) d + beta (diag W + lam)   where the linear update would put the eigenvalues
    A = (1 - gamma beta) M + beta (W + lam I)           average of old and new
    N = rotation(d, A)                                  skew-symmetric generator
    Q = orthogonal(N)                                   Cayley map, exact or truncated
    d <- positive(d, n)                                 exponential map, exact or truncated

``learn`` is this step. The caller multiplies ``Q`` into the basis and into whatever else lives in
its coordinates. ``update`` projects curvature to ``W``, learns each factor, and scales Kronecker
factors back to determinant one, the scale going to ``alpha``. The optimizer's kernel projects its
stacks of gradients and calls the same functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.linalg import diagonal

from .checks import check_damping, check_linear, check_rates, check_size, choose
from .curvature import Curvature, factors_of, project, project_identity, scale_of
from .generators import ROTATIONS, Rotation, bounded
from .kronecker import Kronecker
from .maps import (
    ORTHOGONAL,
    POSITIVE,
    Orthogonal,
    Positive,
    cayley,
    exp,
    reorthonormalize,
    truncated_exp,
)
from .matrices import SPD, Diagonal, Full
from .numerics import accumulation_dtype, centered_exp, largest, matmul, saturate, symmetrize

Structure = TypeVar("Structure", bound=SPD)
# A tensor broadcasts against the eigenvalues: one rate for each matrix of a batch
Rate = float | Tensor


class Learned(NamedTuple):
    """What one step changed in one factor."""

    eigs: Tensor  # the new eigenvalues, shape (*batch, n)
    turn: Tensor | None = (
        None  # Q by which the basis turns, B <- B Q; None where only eigenvalues were learned
    )
    residual: Tensor | None = (
        None  # the average A in the turned basis, shape (*batch, n, n), if the factor keeps one
    )
    speed: Tensor | None = (
        None  # norm of the last generator N, shape (*batch,): how fast the basis turns
    )


def blend(past: Tensor, newest: Rate, rate: Rate, decay: float) -> Tensor:
    """Return ``(1 - gamma beta) past + beta newest``, the linear update that all learning follows
    to first order.
    """
    if decay == 1 and isinstance(newest, Tensor):
        return torch.lerp(past, newest, rate)
    return (1 - decay * rate) * past + rate * newest


def running_rate(beta: Tensor, time: Tensor, start: float) -> Tensor:
    """Return the weight of the newest term of a running average at each time 1, 2, ...

    With ``start = 1`` it is ``(1 - beta) / (1 - beta^t)``, Adam's bias correction written as a
    recursion: the average starts as a mean. Larger values forget the first terms faster, about as
    ``start / t``; 0 means ``1 - beta`` always.
    """
    if start == 0:
        return (1 - beta).expand_as(time)
    return (beta - 1) / (beta.pow(time if start == 1 else 1 + (time - 1) / start) - 1)


def learn(
    eigs: Tensor,
    W: Tensor,
    *,
    rate: Rate,
    basis_rate: Rate | None = None,
    decay: float = 1.0,
    damping: Rate = 0.0,
    residual: Tensor | None = None,
    rotation: Rotation = bounded,
    orthogonal: Orthogonal = cayley,
    positive: Positive = exp,
    rayleigh: bool = False,
    sweeps: int = 1,
    dtype: torch.dtype | None = None,
) -> Learned:
    """Take one step in eigen-coordinates; what is not explained here is an argument of ``update``,
    too.

    Args: eigs: ``d``, shape ``(*batch, n)``. W: curvature in the eigenbasis, shape ``(*batch, n,
        n)``; or ``(*batch, n)``, its diagonal, to turn no basis. rate: the paper's beta-2.
        basis_rate: rate of the average that the basis turns towards; ``rate`` if left out. decay:
        the paper's gamma. damping: the paper's ``Lambda / (alpha k)``, added to the eigenvalues of
        ``W``. residual: ``M``, if the factor keeps one; then the new one is returned. rotation:
        which generator turns the basis. orthogonal: map from generators to orthogonal matrices.
        positive: map that moves ``d`` towards where the linear update would put it. rayleigh:
        whether to read the eigenvalues off in the turned basis. sweeps: how many times to turn.
        dtype: number format in which ``Q`` is computed, such as a bfloat16 basis's own; by default
        that of ``W``.
    """
    if W.ndim == eigs.ndim:
        return Learned(positive(eigs, blend(eigs, W + damping, rate, decay)), residual=residual)
    target = blend(eigs, diagonal(W) + damping, rate, decay)
    basis_rate = rate if basis_rate is None else basis_rate
    # One for each matrix
    pull = basis_rate[..., None] if isinstance(basis_rate, Tensor) else basis_rate
    # Exactly symmetric, or where eigenvalues are equal the rounding of W would make generators that
    # are not skew.
    turned = average = W.add(W.mT).mul_(0.5 * pull)
    if residual is None:  # the past is diagonal, as damping is
        diagonal(average).add_(blend(eigs, damping, basis_rate, decay))
    else:
        average.add_((1 - decay * pull) * residual)
        diagonal(average).add_(basis_rate * damping)
    turn = None
    for left in reversed(range(sweeps)):
        generator = rotation(eigs, turned)
        speed = torch.linalg.matrix_norm(generator)
        q = orthogonal(generator if dtype is None else generator.to(dtype))
        del generator  # as large as a basis
        turn = q if turn is None else matmul(turn, q)
        if left or rayleigh or residual is not None:
            turned = symmetrize(matmul(matmul(q.mT, turned), q))
    if rayleigh:
        target = target + diagonal(turned) - diagonal(average)
    return Learned(positive(eigs, target), turn, None if residual is None else turned, speed)


def normalize(factors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Scale vectors of eigenvalues to the product one."""
    centered, means = [], []
    for eigs in factors:
        logs = eigs.log()
        means.append(logs.mean(-1, keepdim=True))
        centered.append(centered_exp(logs, means[-1]))
    return centered, torch.stack(means)[..., 0]


def update(
    S: Structure,
    curvature: Curvature,
    *,
    lr: float,
    basis_lr: float | None = None,
    decay: float = 1.0,
    damping: float | Tensor = 0.0,
    rotation: str | Rotation = "bounded",
    orthogonal: str | Orthogonal = "cayley",
    positive: str | Positive = "exp",
    rayleigh: bool = False,
    sweeps: int = 1,
    reorthonormalized: bool = True,
) -> Structure:
    """Return ``S`` after one step of ``S <- (1 - lr decay) S + lr H``, to first order in ``lr``, in
    spectral form.

    Args: S: the matrix that learns: ``Full``, ``Diagonal`` or ``Kronecker``. curvature: what it
        learns from, ``H``. lr: the paper's beta-2, step size of the eigenvalues, and of the basis
        unless ``basis_lr`` is given. basis_lr: step size of the basis (the paper's beta-bar-2 is of
        this kind, too); with 0 it stays as it is. decay: the paper's gamma between 0 (sum up
        curvature) and 1 (running average). damping: the paper's lambda: ``H`` counts as ``H +
        damping I`` (Kronecker factors get the paper's Lambda). A number, or one for each matrix of
        a batch, shape ``(*batch,)``. rotation: "bounded", "pairwise", "normalized", "moore_penrose"
        or a function (``eigenstep.core.generators``). orthogonal: map from generators to orthogonal
        matrices: "cayley", "truncated_cayley", "quadratic" or a function. positive: map that moves
        the eigenvalues: "exp" for any curvature or "truncated_exp", cheaper and closer to the
        linear update, for curvature without negative eigenvalues; or a function. rayleigh: read the
        new eigenvalues off in the new basis (Rayleigh quotients) instead of the old one, as the
        paper does. Better when curvature is exact; with noisy curvature it fits the noise. sweeps:
        how many times the basis turns towards the same average, which pays while it is far from
        eigenvectors. reorthonormalized: mend the basis by a Newton-Schulz step: orthogonal in any
        precision. The paper does not.
    """
    basis_lr = lr if basis_lr is None else basis_lr
    rotation, orthogonal = (
        choose(rotation, ROTATIONS, "rotation"),
        choose(orthogonal, ORTHOGONAL, "orthogonal"),
    )
    positive = choose(positive, POSITIVE, "positive")
    projected = project(S, curvature)
    check_rates(lr, basis_lr, decay)
    if positive is truncated_exp:
        check_linear(bool(curvature.semidefinite), lr, basis_lr, decay, rayleigh)
    check_size(sweeps, "sweeps")
    check_damping(damping, scale_of(S))
    how: Any = {
        "rate": lr,
        "basis_rate": basis_lr,
        "decay": decay,
        "rayleigh": rayleigh,
        "sweeps": sweeps,
    }
    how |= {"rotation": rotation, "orthogonal": orthogonal, "positive": positive}
    one_step: Callable[..., Learned] = partial(learn, **how)
    factors: list[Full | Diagonal] = []
    for factor, W, identity in zip(factors_of(S), projected, project_identity(S), strict=True):
        level = saturate(damping * identity)[..., None]
        if not isinstance(factor, Full):
            factors.append(replace(factor, eigs=one_step(factor.eigs, W, damping=level).eigs))
            continue
        W = W if basis_lr > 0 else diagonal(W)
        eigs, turn, residual, _ = one_step(factor.eigs, W, damping=level, residual=factor.residual)
        basis = factor.basis
        if turn is not None:
            wide = accumulation_dtype(basis.dtype)
            basis = basis.to(wide) @ turn.to(wide)
            basis = (reorthonormalize(basis) if reorthonormalized else basis).to(factor.basis.dtype)
        factors.append(Full(basis, eigs, residual))
    return cast(
        Structure, _with_unit_determinants(S, factors) if isinstance(S, Kronecker) else factors[0]
    )


def _with_unit_determinants(S: Kronecker, factors: list[Full | Diagonal]) -> Kronecker:
    """Scale the factors back to determinant one; the mean of their logarithms goes to the scale."""
    scale = (
        S.scale.log() + torch.stack([factor.eigs.log().mean(-1) for factor in factors]).mean(0)
    ).exp()
    scale = scale.clamp(torch.finfo(scale.dtype).tiny, largest(scale.dtype))
    return Kronecker(scale, tuple(factor.with_unit_determinant() for factor in factors))
