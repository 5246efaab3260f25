"""The inverse-free Cholesky scheme of Lin et al. (2024), full-matrix and Kronecker-structured.

It learns a factor ``C`` of the *inverse*, ``S = (C C^T)^-1``, so that no inverse is ever taken.
Derivation: with ``C <- C Expm(-beta/2 X)`` and a symmetric ``X``, to first order in ``beta``::

    S^-1 <- C (I - beta X) C^T        hence        S <- C^-T (I + beta X) C^-1

which is the default scheme ``S <- (1 - gamma beta) S + beta H`` if ``C^-T X C^-1 = H - gamma S``,
that is::

    X = C^T H C - gamma I

For a Kronecker product every factor has such a ``C_l`` and its own curvature ``Q_l / k_l``, where
the gradient ``G`` is multiplied by the factors of all other sides and ``k_l`` counts their entries:
with ``Y = C_1^T G C_2``, ``X_1 = Y Y^T / m - gamma I`` and ``X_2 = Y^T Y / n - gamma I``. Each
factor moves at the full rate, so the scale of the product of two factors moves twice as fast as in
the default scheme; the spectral scheme's ``alpha`` does not. The scheme is limited to the powers 1
and -1 of ``S``: this is what spectral factors lift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eigenstep.core.checks import check_number, check_symmetric
from eigenstep.core.curvature import OuterProducts
from eigenstep.core.matrices import contract

from .van_loan import plain_vectors


@dataclass(frozen=True)
class Cholesky:
    """``S = (C1 C1^T)^-1 x ... x (CL CL^T)^-1``, full-matrix with one factor.

    Attributes:
        factors: invertible matrices ``C_l``, not necessarily triangular, each of shape ``(*batch,
            n_l, n_l)``.
    """

    factors: tuple[Tensor, ...]

    @classmethod
    def from_dense(cls, *matrices: Tensor) -> Cholesky:
        """Factorize the inverses of positive-definite matrices with the Kronecker product ``S``."""
        for matrix in matrices:
            check_symmetric(matrix, "matrices")
        return cls(tuple(torch.linalg.cholesky(torch.linalg.inv(matrix)) for matrix in matrices))

    def matmul(self, x: Tensor, power: float = 1.0) -> Tensor:
        """Return ``S^power x`` for the powers 1 and -1, the only ones this scheme has.

        Args:
            x: events, shape ``(*lead, *batch, n_1, ..., n_L)``.
            power: 1 or -1.
        """
        for axis, matrix in enumerate(self._matrices(power), start=-len(self.factors)):
            x = contract(x, matrix, axis, len(self.factors))
        return x

    def dense(self, power: float = 1.0) -> Tensor:
        """Return ``S`` or its inverse as an ordinary matrix, shape ``(*batch, N, N)``."""
        product, *rest = self._matrices(power)
        for matrix in rest:
            size = product.shape[-1] * matrix.shape[-1]
            blocks = product[..., :, None, :, None] * matrix[..., None, :, None, :]
            product = blocks.reshape(*product.shape[:-2], size, size)
        return product

    def _matrices(self, power: float) -> list[Tensor]:
        if power not in (1, -1):
            raise ValueError(
                f"power must be 1 or -1: a Cholesky factor gives no other root, got {power}"
            )
        inverses = [factor @ factor.mT for factor in self.factors]
        return inverses if power == -1 else [torch.linalg.inv(matrix) for matrix in inverses]


def update(
    S: Cholesky, curvature: OuterProducts, *, lr: float, decay: float = 1.0, truncated: bool = False
) -> Cholesky:
    """Return ``S`` after one step of ``S <- (1 - lr decay) S + lr H``, to first order in ``lr``.

    Args:
        S: the matrix that learns.
        curvature: outer products without weights and shift.
        lr: the paper's beta-2.
        decay: the paper's gamma.
        truncated: replace the matrix exponential by its first-order truncation, ``I - lr/2 X``, as
            its authors do for neural networks. Then ``C`` stays invertible only as long as ``lr
            ||X|| < 2``.
    """
    check_number(lr, "lr", 0.0)
    check_number(decay, "decay", 0.0, 1.0)
    count = len(S.factors)
    sides = [factor.shape[-1] for factor in S.factors]
    whitened = plain_vectors(curvature)
    for axis, factor in enumerate(S.factors, start=-count):
        whitened = contract(whitened, factor, axis, count)
    moved = []
    for at, (side, factor) in enumerate(zip(sides, S.factors, strict=True)):
        # (*batch, side, K * others): this factor's axis of Y in front, all others in columns.
        columns = (
            whitened.movedim(whitened.ndim - count + at, factor.ndim - 1)
            .movedim(0, -1)
            .flatten(factor.ndim - 1)
        )
        identity = torch.eye(side, dtype=factor.dtype, device=factor.device)
        others = math.prod(sides) // side
        step = -lr / 2 * (columns @ columns.mT / others - decay * identity)
        moved.append(factor @ (identity + step if truncated else torch.linalg.matrix_exp(step)))
    return Cholesky(tuple(moved))
