"""The default scheme with eigendecompositions against the same scheme with ordinary matrices."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.linalg import diagonal
from torch.testing import assert_close

from core.cases import random_diagonal, random_full, random_kronecker, random_symmetric
from eigenstep.core.curvature import Dense, OuterProducts, project, project_identity
from eigenstep.core.matrices import Diagonal, Full, Kronecker
from eigenstep.core.step import truncated_exp
from eigenstep.core.update import update
from eigenstep_lab.baselines import eigen
from eigenstep_lab.orthogonality import orthogonality_defect

pytestmark = pytest.mark.usefixtures("float64")
close = partial(assert_close, rtol=1e-9, atol=1e-9)


def test_full_matrix_is_the_running_average():
    S, want = Full.identity(6, (2,)), torch.eye(6).expand(2, 6, 6)
    for _ in range(30):
        gradients = torch.randn(3, 2, 6)
        S = eigen.update(S, OuterProducts(gradients), lr=0.1, decay=0.9, damping=0.01)
        outer = torch.einsum("kbi,kbj->bij", gradients, gradients)
        want = (1 - 0.1 * 0.9) * want + 0.1 * (outer + 0.01 * torch.eye(6))
    close(S.dense(), want)
    assert orthogonality_defect(S.basis).max() < 1e-12


def test_kronecker_is_kl_shampoo():
    S = Kronecker.identity([5, 3])
    left, right = torch.eye(5), torch.eye(3)
    for _ in range(30):
        gradient = torch.randn(5, 3) * torch.tensor([1.0, 2.0, 3.0])
        S = eigen.update(S, OuterProducts(gradient[None]), lr=0.1)
        new_left = gradient @ torch.linalg.inv(right) @ gradient.T / 3
        new_right = gradient.T @ torch.linalg.inv(left) @ gradient / 5
        left, right = 0.9 * left + 0.1 * new_left, 0.9 * right + 0.1 * new_right
    close(S.dense(), torch.kron(left, right))
    for factor in S.factors:
        close(factor.logdet(), torch.zeros(()))


def test_diagonal_is_the_spectral_update():
    S, curvature = Diagonal.identity(4), OuterProducts(torch.randn(2, 4))
    close(
        eigen.update(S, curvature, lr=0.3).eigs,
        update(S, curvature, lr=0.3, positive=truncated_exp).spectrum,
    )


def test_negative_eigenvalues_are_refused():
    with pytest.raises(ValueError, match="curvature took an eigenvalue of S to -"):
        eigen.update(Full.identity(3), Dense(-torch.eye(3)), lr=0.6)
    assert (eigen.update(Full.identity(3), Dense(-torch.eye(3)), lr=0.3).eigs > 0).all()


def test_a_half_precision_basis_stays_one():
    S = Kronecker.identity([5, 3], dtype=torch.float32).to(torch.bfloat16)
    new = eigen.update(S, OuterProducts(torch.randn(1, 5, 3, dtype=torch.float32)), lr=0.5)
    for factor in new.factors:
        assert isinstance(factor, Full)
        assert factor.basis.dtype == torch.bfloat16
        assert factor.eigs.dtype == torch.float32


@pytest.mark.parametrize(
    "build",
    [
        lambda: random_full(4, (2,)),
        lambda: random_diagonal(4),
        lambda: random_kronecker([4, 3], batch=(2,)),
        lambda: random_kronecker([3, 2, 4], ["full", "diagonal", "full"]),
    ],
)
def test_damping_is_the_projection_of_the_identity(
    build,
):
    S = build()
    size = S.dense().shape[-1]
    identity = Dense(torch.eye(size).expand(*S.batch_shape, size, size))
    factors = S.factors if isinstance(S, Kronecker) else (S,)
    for factor, w, one in zip(factors, project(S, identity), project_identity(S), strict=True):
        values = diagonal(w) if isinstance(factor, Full) else w
        close(values, one[..., None].expand_as(values))


def test_it_is_what_the_spectral_update_equals_to_first_order():
    S, H = random_full(5), random_symmetric(5)
    gaps = [
        (update(S, Dense(H), lr=lr).dense() - eigen.update(S, Dense(H), lr=lr).dense()).norm()
        for lr in (1e-3, 1e-4)
    ]
    assert 90 < gaps[0] / gaps[1] < 110
