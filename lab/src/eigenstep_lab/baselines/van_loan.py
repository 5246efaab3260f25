"""Kronecker products by projection: take the default step as a whole matrix, then project it back.

The projection is Van Loan's and Pitsianis' (1993), onto the nearest Kronecker product in the
Frobenius norm. The scheme forms and stores the matrix that a Kronecker product is there to avoid: a
baseline, no method to use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import diagonal

from eigenstep.core.checks import check_dense, check_number, check_sizes
from eigenstep.core.curvature import OuterProducts
from eigenstep.core.matrices import KINDS, Kronecker
from eigenstep.core.step import symmetrize

MAX_SWEEPS = 1000


def update(S: Kronecker, curvature: OuterProducts, *, lr: float, decay: float = 1.0) -> Kronecker:
    """Return the Kronecker product nearest to ``(1 - lr decay) S + lr H``.

    Args:
        S: the matrix that learns.
        curvature: outer products.
        lr: the paper's beta-2.
        decay: the paper's gamma.
    """
    check_number(lr, "lr", 0.0)
    check_number(decay, "decay", 0.0, 1.0)
    step = (1 - lr * decay) * S.dense() + lr * dense_curvature(curvature, len(S.sizes))
    return nearest_kronecker(step, S.sizes)


def dense_curvature(curvature: OuterProducts, axes: int = 1) -> Tensor:
    """Return outer products as an ordinary matrix ``H``, shape ``(*batch, N, N)``.

    Args:
        curvature: outer products without weights and shift.
        axes: number of axes of one vector, which are flattened in row-major order.
    """
    flat = plain_vectors(curvature).flatten(-axes)
    return torch.einsum("k...i,k...j->...ij", flat, flat)


def plain_vectors(curvature: OuterProducts) -> Tensor:
    """Return the vectors of outer products without weights and shift."""
    shift = curvature.shift
    plain = curvature.weights is None and isinstance(shift, (int, float)) and shift == 0
    if not plain:
        raise ValueError("curvature must be outer products without weights and shift")
    return curvature.vectors


def nearest_kronecker(
    matrix: Tensor, sizes: Sequence[int], kinds: Sequence[str] | None = None
) -> Kronecker:
    """Return the nearest Kronecker product (Frobenius norm) of given sizes and kinds.

    Args:
        matrix: positive definite, shape ``(*batch, N, N)``.
        sizes: those of the factors, whose product is ``N``.
        kinds: "full" (the default), "diagonal" or "identity" for each factor.
    """
    check_dense(matrix)
    kinds = ["full"] * len(sizes) if kinds is None else kinds
    check_sizes(sizes, kinds)
    if matrix.shape[-1] != math.prod(sizes):
        raise ValueError(
            f"sizes {tuple(sizes)} multiply to {math.prod(sizes)}, but matrix is "
            f"{tuple(matrix.shape)}"
        )
    nearest = nearest_factors(matrix, sizes, kinds)
    factors = (KINDS[kind].from_dense(factor) for kind, factor in zip(kinds, nearest, strict=True))
    return Kronecker(torch.ones_like(matrix[..., 0, 0]), tuple(factors)).normalized()


def nearest_factors(matrix: Tensor, sizes: Sequence[int], kinds: Sequence[str]) -> list[Tensor]:
    """Return factors ``S1, ..., SL`` whose Kronecker product is nearest to a matrix.

    Alternating least squares: with the other factors fixed, the best ``Sl`` is the matrix
    contracted with them, which is positive definite if they are. For two full factors this is the
    power iteration for the leading singular vectors of the rearranged matrix, which solve the
    problem. The kind "identity" stands for multiples of the identity.
    """
    batch = matrix.shape[:-2]
    count = len(sizes)
    tensor = matrix.reshape(*batch, *sizes, *sizes)
    factors = [torch.eye(n, dtype=matrix.dtype, device=matrix.device) for n in sizes]
    rows, cols = "abcdefghijkl"[:count], "mnopqrstuvwx"[:count]
    for _ in range(MAX_SWEEPS):
        before = list(factors)
        for at, kind in enumerate(kinds):
            others = [k for k in range(count) if k != at]
            spec = ",".join([f"...{rows}{cols}", *(f"...{rows[k]}{cols[k]}" for k in others)])
            inner = torch.einsum(
                f"{spec}->...{rows[at]}{cols[at]}", tensor, *(factors[k] for k in others)
            )
            norms = [torch.linalg.matrix_norm(factors[k], keepdim=True) ** 2 for k in others]
            factors[at] = _restrict(inner / math.prod(norms), kind)
        changes = [
            ((f - b).abs().amax() / f.abs().amax()) for f, b in zip(factors, before, strict=True)
        ]
        if max(changes) < 16 * torch.finfo(matrix.dtype).eps:
            break
    return factors


def _restrict(matrix: Tensor, kind: str) -> Tensor:
    if kind == "full":
        return symmetrize(matrix)
    values = diagonal(matrix)
    return torch.diag_embed(
        values if kind == "diagonal" else values.mean(-1, keepdim=True).expand_as(values)
    )
