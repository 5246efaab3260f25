"""Curvature as data: the two kinds agree, and their projection is what the paper's formulas say."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from eigenstep.core.curvature import Curvature, Dense, OuterProducts, project
from eigenstep.core.matrices import SPD, Diagonal, Full, Identity, Kronecker, factors_of

from .cases import (
    STRUCTURES,
    at,
    dense_curvature,
    indices,
    random_kronecker,
)


def variants(S: SPD) -> list[OuterProducts]:
    vectors = torch.randn(5, *S.batch_shape, *S.sizes)
    weights = torch.randn(5, *S.batch_shape)
    return [
        OuterProducts(vectors),
        OuterProducts(vectors, torch.randn(5)),
        OuterProducts(vectors, weights),
        OuterProducts(vectors, weights, shift=0.7),
        OuterProducts(vectors, shift=torch.randn(tuple(S.batch_shape))),
        OuterProducts(vectors[:0]),
    ]


def test_outer_products_and_dense_agree(S: SPD) -> None:
    """And both have one matrix for a full factor, a vector for a diagonal one."""
    for curvature in variants(S):
        dense = project(S, dense_curvature(S, curvature))
        for factor, a, b in zip(factors_of(S), project(S, curvature), dense, strict=True):
            n = factor.sizes[0]
            assert a.shape == (*S.batch_shape, *([n, n] if isinstance(factor, Full) else [n]))
            assert_close(a, b, rtol=1e-12, atol=1e-12)
            if isinstance(factor, Identity):
                assert_close(a, a.mean(-1, keepdim=True).expand_as(a))


def test_batched_equals_looped(S: SPD) -> None:
    vectors = torch.randn(3, *S.batch_shape, *S.sizes)
    weights = torch.randn(3, *S.batch_shape)
    shift = torch.randn(tuple(S.batch_shape))
    outer = OuterProducts(vectors, weights, shift)
    both: list[Curvature] = [outer, dense_curvature(S, outer)]
    for curvature in both:
        projected = project(S, curvature)
        for index in indices(S):
            lead: tuple[slice | int, ...] = (slice(None), *index)
            one: Curvature = (
                OuterProducts(vectors[lead], weights[lead], shift[index])
                if isinstance(curvature, OuterProducts)
                else Dense(curvature.matrix[index])
            )
            for a, b in zip(projected, project(at(S, index), one), strict=True):
                assert_close(a[index], b)


def test_matrix_itself_projects_to_its_eigenvalues(S: SPD) -> None:
    """Where ``S`` is its own curvature, ``W = Diag(d)`` for every factor: learning rests there."""
    factors = S.factors if isinstance(S, Kronecker) else (S,)
    curvatures: list[Curvature] = [
        Dense(S.dense()),
        OuterProducts(torch.zeros(1, *S.batch_shape, *S.sizes), shift=1.0),
    ]
    for curvature in curvatures:
        for factor, w in zip(factors, project(S, curvature), strict=True):
            assert isinstance(factor, (Full, Diagonal))
            want = torch.diag_embed(factor.eigs) if isinstance(factor, Full) else factor.eigs
            assert_close(w, want, rtol=1e-11, atol=1e-11)


class TestAgainstThePapersFormulas:
    def test_kronecker(self) -> None:
        """``W_C = B_C^T G S_K^-1 G^T B_C / (alpha m)`` and its mirror image."""
        n = 3
        m = 4
        S = random_kronecker([n, m])
        G = torch.randn(n, m)
        C, K = S.factors
        assert isinstance(C, Full)
        assert isinstance(K, Full)
        W_C, W_K = project(S, OuterProducts(G[None]))
        assert_close(W_C, C.basis.T @ G @ K.dense(-1) @ G.T @ C.basis / (S.scale * m))
        assert_close(W_K, K.basis.T @ G.T @ C.dense(-1) @ G @ K.basis / (S.scale * n))


class TestSemidefiniteness:
    """What may be used with truncated maps is known from how the curvature was made."""

    def test_outer_products(self) -> None:
        v = torch.randn(3, 4)
        assert OuterProducts(v).semidefinite
        assert OuterProducts(v, shift=0.5).semidefinite
        assert OuterProducts(v, shift=1).semidefinite
        assert not OuterProducts(v, shift=-0.5).semidefinite
        assert not OuterProducts(v, shift=torch.tensor(0.5)).semidefinite
        assert not OuterProducts(v, torch.ones(3)).semidefinite
        assert OuterProducts(v, torch.ones(3), semidefinite=True).semidefinite

    def test_dense(self) -> None:
        assert not Dense(torch.eye(2)).semidefinite
        assert Dense(torch.eye(2), semidefinite=True).semidefinite


class TestNumberFormats:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_lower_precision(self, structure: str, dtype: torch.dtype) -> None:
        """Projections have the format of eigenvalues; half-precision bases cost a relative 1 %."""
        S = STRUCTURES[structure]((3,))
        outer = OuterProducts(torch.randn(5, *S.batch_shape, *S.sizes))
        low = S.to(dtype)
        pairs: list[tuple[Curvature, Curvature]] = [
            (outer, OuterProducts(outer.vectors.to(dtype))),
            (dense_curvature(S, outer), Dense(dense_curvature(S, outer).matrix.to(dtype))),
        ]
        for exact, rounded in pairs:
            for a, b in zip(project(S, exact), project(low, rounded), strict=True):
                assert b.dtype == torch.float32
                assert (a - b).norm() <= (1e-5 if dtype == torch.float32 else 0.02) * a.norm()


def test_directions_of_vanishing_eigenvalues_do_not_spoil_the_others() -> None:
    """Products of eigenvalues below the number format's range: their inverses are cut, and zero
    times them is zero.
    """
    eigs = torch.tensor([1e-150, 1.0, 1e150])
    S = Kronecker(
        torch.tensor(1.0), (Diagonal(eigs), Diagonal(eigs), Diagonal(eigs), Diagonal(eigs))
    )
    vectors = torch.zeros(1, 3, 3, 3, 3)
    vectors[0, 1, 1, 1, 1] = 2.0
    for curvature in (
        OuterProducts(vectors),
        Dense(torch.outer(vectors.flatten(), vectors.flatten())),
    ):
        for w in project(S, curvature):
            assert_close(w, torch.tensor([0.0, 4.0 / 27, 0.0]))
