"""``update`` written out for one matrix ``S``: curvature as an ordinary matrix, loops over factors,
numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch

from eigenstep import Dense, Diagonal, Full, Identity, Kronecker, OuterProducts

from .formulas import Array, factor_curvature, newton_schulz, unit_determinant


@dataclass
class Piece:
    """A factor ``B Diag(d) B^T``; ``B`` is ``None`` for diagonal ones, ``tied`` says that all ``d``
    are the same.
    """

    d: Array
    B: Array | None = None
    M: Array | None = None
    tied: bool = False


@dataclass
class Matrix:
    """``S = alpha S_1 x ... x S_L``; ``alpha`` is ``None`` for a matrix without factors."""

    alpha: float | None
    pieces: list[Piece]

    def dense(self) -> Array:
        factors = [
            p.B @ np.diag(p.d) @ p.B.T if p.B is not None else np.diag(p.d) for p in self.pieces
        ]
        return (self.alpha or 1.0) * reduce(np.kron, factors)

    def basis(self) -> Array:
        return reduce(np.kron, [np.eye(len(p.d)) if p.B is None else p.B for p in self.pieces])


def read(S: Full | Diagonal | Kronecker) -> Matrix:
    """Copy a matrix of the library."""

    def array(x: torch.Tensor | None) -> Array | None:
        return None if x is None else x.double().numpy().copy()

    def piece(factor: Full | Diagonal) -> Piece:
        if isinstance(factor, Full):
            return Piece(array(factor.eigs), array(factor.basis), array(factor.residual))
        return Piece(array(factor.eigs), tied=isinstance(factor, Identity))

    if isinstance(S, Kronecker):
        return Matrix(float(S.scale), [piece(factor) for factor in S.factors])
    return Matrix(None, [piece(S)])


def curvature_matrix(S: Matrix, curvature: Dense | OuterProducts) -> Array:
    """Return ``H`` as an ordinary matrix."""
    if isinstance(curvature, Dense):
        return curvature.matrix.numpy()
    vectors = curvature.vectors.numpy().reshape(len(curvature.vectors), -1)
    weights = np.ones(len(vectors)) if curvature.weights is None else curvature.weights.numpy()
    return (
        sum(w * np.outer(v, v) for w, v in zip(weights, vectors, strict=True))
        + float(curvature.shift) * S.dense()
    )


def update(
    S: Matrix,
    H: Array,
    *,
    generator: Callable[[Array, Array], Array],
    orthogonal: Callable[[Array], Array],
    positive: Callable[[Array, Array], Array],
    lr: float,
    decay: float = 1.0,
    damping: float = 0.0,
    rate: float | None = None,
    mend: bool = True,
    sweeps: int = 1,
    rayleigh: bool = False,
) -> Matrix:
    """Return ``S`` after a step towards ``H``; the arguments are those of ``eigenstep.update``, and
    of ``Turning``.
    """
    rate = lr if rate is None else rate
    d = [piece.d for piece in S.pieces]
    basis = S.basis()
    projected = (basis.T @ H @ basis + damping * np.eye(len(H))) / (S.alpha or 1.0)
    pieces = []
    for at, piece in enumerate(S.pieces):
        W = factor_curvature(projected, d, at)
        if piece.tied:
            W = np.eye(len(W)) * np.trace(W) / len(W)
        h = lr * (np.diag(W) - decay * piece.d)
        if piece.B is not None and rate > 0:
            past = np.diag(piece.d) if piece.M is None else piece.M
            A = turned = (1 - rate * decay) * past + rate * W
            for _ in range(sweeps):
                Q = orthogonal(generator(piece.d, turned))
                turned = Q.T @ turned @ Q
                piece = replace(piece, B=newton_schulz(piece.B @ Q) if mend else piece.B @ Q)
            if rayleigh:
                h = h + np.diag(turned) - np.diag(A)
            piece = replace(piece, M=None if piece.M is None else turned)
        pieces.append(replace(piece, d=positive(piece.d, h)))
    return Matrix(None, pieces) if S.alpha is None else normalize(S.alpha, pieces)


def normalize(alpha: float, pieces: list[Piece]) -> Matrix:
    """Give all factors determinant one; the mean of the logarithms of what they lose goes to
    ``alpha``.
    """
    unit = []
    means = []
    for piece in pieces:
        d, mean = unit_determinant(piece.d)
        unit.append(replace(piece, d=d, M=None if piece.M is None else piece.M / mean))
        means.append(mean)
    return Matrix(alpha * math.prod(means) ** (1 / len(means)), unit)


def assert_equal(S: Full | Diagonal | Kronecker, expected: Matrix, tolerance: float = 1e-9) -> None:
    """Assert that all parts of a matrix of the library are as expected, relative to the largest
    entry of each.
    """
    found = read(S)
    pairs = [(np.array(found.alpha or 1.0), np.array(expected.alpha or 1.0))]
    for piece, wanted in zip(found.pieces, expected.pieces, strict=True):
        assert (piece.M is None) == (wanted.M is None)
        pairs += [(piece.d, wanted.d)]
        pairs += [(a, b) for a, b in ((piece.B, wanted.B), (piece.M, wanted.M)) if b is not None]
    for a, b in pairs:
        assert a.shape == b.shape
        assert abs(a - b).max() <= tolerance * abs(b).max()
