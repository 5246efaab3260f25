"""Riemannian gradient descent over dense positive-definite matrices, as usually done.

Both schemes agree with ``S <- S - 2 lr S (dl/dS) S`` to first order in ``lr``, the paper's beta-2,
and stay positive definite for every step size. Neither gives roots of ``S``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import diagonal

from eigenstep.core.checks import check_number, check_symmetric
from eigenstep.core.step import symmetrize


def retraction_step(S: Tensor, gradient: Tensor, lr: float) -> Tensor:
    """Return ``S + V + V S^-1 V / 2`` with ``V = -2 lr S (dl/dS) S``, a retraction.

    Args:
        S: the current matrix, shape ``(*batch, n, n)``.
        gradient: ``dl/dS``, symmetric, same shape.
        lr: step size.
    """
    check_symmetric(gradient, "gradient")
    check_number(lr, "lr", 0.0)
    # V = S change, so that V S^-1 V = S change change: no inverse is needed
    change = -2 * lr * gradient @ S
    return symmetrize(S + S @ (change + change @ change / 2))


def cholesky_step(C: Tensor, gradient: Tensor, lr: float) -> Tensor:
    """Return the Cholesky factor of the next ``S = C C^T`` (Lin et al., 2023).

    ``C <- C Expm(-lr L)``, where ``L`` is the lower triangle of ``2 X`` with its diagonal halved,
    so that ``L + L^T = 2 X``, and ``X = C^T (dl/dS) C`` is the gradient in the local coordinates of
    the factor. Products of lower triangular matrices with a positive diagonal are such matrices
    again.

    Args:
        C: lower triangular with a positive diagonal, shape ``(*batch, n, n)``.
        gradient: ``dl/dS`` at ``S = C C^T``, symmetric, same shape.
        lr: step size.
    """
    check_symmetric(gradient, "gradient")
    check_number(lr, "lr", 0.0)
    local = C.mT @ gradient @ C
    lower = 2 * local.tril() - torch.diag_embed(diagonal(local))
    return C @ torch.linalg.matrix_exp(-lr * lower)
