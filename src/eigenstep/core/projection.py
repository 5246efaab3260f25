"""The Kronecker product nearest to a matrix in the Frobenius norm (Van Loan and Pitsianis, 1993)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .numerics import diagonal, symmetrize

MAX_SWEEPS = 1000


def nearest_kronecker(matrix: Tensor, sizes: Sequence[int], kinds: Sequence[str]) -> list[Tensor]:
    """Return factors ``S1, ..., SL`` whose Kronecker product is nearest to a positive-definite matrix.

    Alternating least squares: with the other factors fixed, the best ``Sl`` is the matrix contracted with
    them. Contracting a positive-definite matrix with positive-definite factors gives a positive-definite
    factor again, so every iterate is one. For two full factors this is the power iteration for the leading
    singular vectors of the rearranged matrix, which solve the problem.

    Args:
        matrix: symmetric positive definite, shape ``(*batch, N, N)`` with ``N`` the product of ``sizes``.
        sizes: size of each factor.
        kinds: "full", "diagonal" or "identity" for each factor; the last stands for multiples of the identity.
    """
    batch, count = matrix.shape[:-2], len(sizes)
    tensor = matrix.reshape(*batch, *sizes, *sizes)
    factors = [torch.eye(n, dtype=matrix.dtype, device=matrix.device).expand(*batch, n, n) for n in sizes]
    rows, cols = "abcdefghijkl"[:count], "mnopqrstuvwx"[:count]
    for _ in range(MAX_SWEEPS):
        before = list(factors)
        for at, kind in enumerate(kinds):
            others = [k for k in range(count) if k != at]
            spec = ",".join([f"...{rows}{cols}", *(f"...{rows[k]}{cols[k]}" for k in others)])
            inner = torch.einsum(f"{spec}->...{rows[at]}{cols[at]}", tensor, *(factors[k] for k in others))
            norms = [torch.linalg.matrix_norm(factors[k], keepdim=True) ** 2 for k in others]
            factors[at] = _restrict(inner / math.prod(norms, start=torch.ones_like(inner[..., :1, :1])), kind)
        changes = [((f - b).abs().amax() / f.abs().amax()) for f, b in zip(factors, before, strict=True)]
        if max(changes) < 16 * torch.finfo(matrix.dtype).eps:
            break
    return factors


def _restrict(matrix: Tensor, kind: str) -> Tensor:
    if kind == "full":
        return symmetrize(matrix)
    values = diagonal(matrix)
    return torch.diag_embed(values if kind == "diagonal" else values.mean(-1, keepdim=True).expand_as(values))
