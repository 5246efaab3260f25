"""Kronecker products by projection: take the default step as a whole matrix, then project it back.

The projection is Van Loan's and Pitsianis' (1993), onto the nearest Kronecker product in the Frobenius norm. The
scheme forms and stores the matrix that a Kronecker product is there to avoid: a baseline, no method to use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eigenstep.core.checks import check_number
from eigenstep.core.curvature import OuterProducts
from eigenstep.core.kronecker import Kronecker


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
    return Kronecker.from_dense(step, S.sizes)


def dense_curvature(curvature: OuterProducts, axes: int = 1) -> Tensor:
    """Return outer products as an ordinary matrix ``H``, shape ``(*batch, N, N)``.

    Args:
        curvature: outer products without weights and shift.
        axes: number of axes of one vector, which are flattened in row-major order.
    """
    if curvature.weights is not None or not isinstance(curvature.shift, (int, float)) or curvature.shift != 0:
        raise ValueError("curvature must be outer products without weights and shift to be formed as a matrix")
    flat = curvature.vectors.flatten(-axes)
    return torch.einsum("k...i,k...j->...ij", flat, flat)
