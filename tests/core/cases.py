"""Random matrices and dense oracles that the core's tests share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from eigenstep.core.curvature import Dense, OuterProducts
from eigenstep.core.matrices import SPD, Diagonal, Full, Identity, Kronecker

Batch = Sequence[int]


def random_orthogonal(n: int, batch: Batch = ()) -> Tensor:
    return torch.linalg.qr(torch.randn(*batch, n, n))[0]


def random_skew(n: int, batch: Batch = (), size: float = 1.0) -> Tensor:
    m = size * torch.randn(*batch, n, n)
    return m - m.mT


def random_spd(n: int, batch: Batch = ()) -> Tensor:
    root = torch.randn(*batch, n, 2 * n)
    return root @ root.mT / (2 * n)


def random_symmetric(n: int, batch: Batch = ()) -> Tensor:
    m = torch.randn(*batch, n, n)
    return (m + m.mT) / 2


def spread_eigs(n: int, batch: Batch = ()) -> Tensor:
    """Return eigenvalues that are well apart, in random order, which differ across a batch."""
    eigs = torch.linspace(0.5, 3.0, n) if n > 1 else torch.ones(1)
    order = torch.rand(*batch, n).argsort(-1)
    return eigs[order] * (1 + 0.1 * torch.rand(*batch, 1))


def random_full(n: int, batch: Batch = ()) -> Full:
    return Full(random_orthogonal(n, batch), spread_eigs(n, batch))


def random_diagonal(n: int, batch: Batch = ()) -> Diagonal:
    return Diagonal(spread_eigs(n, batch))


def random_kronecker(
    sizes: Sequence[int], kinds: Sequence[str] | None = None, batch: Batch = ()
) -> Kronecker:
    build: dict[str, Callable[..., Full | Diagonal]] = {
        "full": random_full,
        "diagonal": random_diagonal,
        "identity": Identity.identity,
    }
    factors = [
        build[kind](n, batch) for kind, n in zip(kinds or ["full"] * len(sizes), sizes, strict=True)
    ]
    return Kronecker(0.5 + torch.rand(tuple(batch)), tuple(factors)).normalized()


STRUCTURES: dict[str, Callable[[Batch], SPD]] = {
    "full": lambda batch: random_full(5, batch),
    "full-1": lambda batch: random_full(1, batch),
    "diagonal": lambda batch: random_diagonal(4, batch),
    "diagonal-1": lambda batch: random_diagonal(1, batch),
    "kronecker-1-factor": lambda batch: random_kronecker([4], batch=batch),
    "kronecker-2-factors": lambda batch: random_kronecker([3, 4], batch=batch),
    "kronecker-3-factors": lambda batch: random_kronecker([2, 3, 2], batch=batch),
    "kronecker-4-factors": lambda batch: random_kronecker([2, 1, 3, 2], batch=batch),
    "kronecker-mixed": lambda batch: random_kronecker(
        [3, 2, 3], ["full", "identity", "diagonal"], batch
    ),
    "kronecker-all-diagonal": lambda batch: random_kronecker(
        [3, 4], ["diagonal", "diagonal"], batch
    ),
    "kronecker-one-sided": lambda batch: random_kronecker([4, 3], ["identity", "full"], batch),
}
"""One instance builder for each structure, given the batch dimensions: all that the shared tests
ask of it.
"""

BATCHES: list[tuple[int, ...]] = [(), (3,), (2, 3)]


def kron(matrices: Iterable[Tensor]) -> Tensor:
    """Return the Kronecker product of ordinary matrices."""
    product = torch.ones(1, 1)
    for matrix in matrices:
        rows = product.shape[0] * matrix.shape[0]
        cols = product.shape[1] * matrix.shape[1]
        product = torch.einsum("ij,kl->ikjl", product, matrix).reshape(rows, cols)
    return product


def factor_oracle(factor: Full | Diagonal, index: tuple[int, ...]) -> Tensor:
    """Return one factor of a batch as an ordinary float64 matrix, straight from its definition."""
    values = torch.diag(factor.eigs[index].double())
    if not isinstance(factor, Full):
        return values
    basis = factor.basis[index].double()
    return basis @ values @ basis.T


def dense_oracle(S: SPD) -> Tensor:
    """Return ``S`` as ordinary float64 matrices, straight from the definition, one batch element at
    a time.
    """
    matrices = []
    for index in indices(S):
        if isinstance(S, Kronecker):
            matrix = S.scale[index].double() * kron(
                factor_oracle(factor, index) for factor in S.factors
            )
        else:
            assert isinstance(S, (Full, Diagonal))
            matrix = factor_oracle(S, index)
        matrices.append(matrix)
    size = math.prod(S.sizes)
    return torch.stack(matrices).reshape(*S.batch_shape, size, size)


def matrix_power(matrix: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.pow(power)[..., None, :]) @ vectors.mT


def indices(S: SPD) -> list[tuple[int, ...]]:
    """Return where the single matrices of a batch are."""
    return list(itertools.product(*map(range, S.batch_shape)))


def at(S: SPD, index: tuple[int, ...]) -> SPD:
    """Return one element of a batch of matrices."""
    if isinstance(S, Kronecker):
        return Kronecker(S.scale[index], tuple(at(factor, index) for factor in S.factors))  # type: ignore[misc]
    if isinstance(S, Full):
        return Full(
            S.basis[index], S.eigs[index], None if S.residual is None else S.residual[index]
        )
    assert isinstance(S, Diagonal)
    return type(S)(S.eigs[index])


def parts(S: SPD) -> list[Tensor]:
    """Return all tensors of a matrix, to compare two of the same structure."""
    if isinstance(S, Kronecker):
        return [S.scale, *(part for factor in S.factors for part in parts(factor))]
    if isinstance(S, Full):
        return [S.basis, S.eigs, *([] if S.residual is None else [S.residual])]
    assert isinstance(S, Diagonal)
    return [S.eigs]


def dense_curvature(S: SPD, curvature: OuterProducts) -> Dense:
    """Return ``sum_k w_k v_k v_k^T + shift S`` as an ordinary matrix."""
    count = len(curvature.vectors)
    batch = S.batch_shape
    vectors = curvature.vectors.reshape(count, *batch, math.prod(S.sizes))
    weights = torch.ones(count) if curvature.weights is None else curvature.weights
    weights = weights.reshape(*weights.shape, *[1] * (1 + len(batch) - weights.ndim)).expand(
        count, *batch
    )
    matrix = torch.einsum("k...,k...i,k...j->...ij", weights, vectors, vectors)
    return Dense(matrix + torch.as_tensor(curvature.shift)[..., None, None] * dense_oracle(S))


def defect(basis: Tensor) -> Tensor:
    """Return the largest entry of ``|B^T B - I|``."""
    return (basis.mT @ basis - torch.eye(basis.shape[-1])).abs().amax()
