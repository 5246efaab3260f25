import functools
import math

import pytest
import torch

from eigenstep import Full, OuterProducts
from eigenstep_lab.baselines import cholesky, eigen, van_loan
from eigenstep_lab.baselines.cholesky import Cholesky
from eigenstep_lab.baselines.van_loan import nearest_kronecker

SIZES = [(5,), (3, 4), (2, 3, 2)]


pytestmark = pytest.mark.usefixtures("float64")


def spd(n, batch=()):
    root = torch.randn(*batch, n, 2 * n)
    return root @ root.mT / (2 * n)


def slope(errors, factor):
    """Order of an error that shrinks from first to last when the step shrinks by `factor`."""
    return math.log(errors[0] / errors[-1]) / math.log(factor)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_cholesky_is_the_matrix_it_was_made_from(sizes, batch):
    matrices = [spd(n, batch) for n in sizes]
    S = Cholesky.from_dense(*matrices)
    want = functools.reduce(torch.func.vmap(torch.kron) if batch else torch.kron, matrices)
    torch.testing.assert_close(S.dense(), want)
    torch.testing.assert_close(S.dense(-1), torch.linalg.inv(want))
    x = torch.randn(3, *batch, *sizes)
    flat = torch.einsum("...ij,...j->...i", want, x.flatten(-len(sizes)))
    torch.testing.assert_close(S.matmul(x), flat.reshape(x.shape))
    torch.testing.assert_close(S.matmul(S.matmul(x), -1), x)


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_the_cholesky_scheme_equals_the_default_scheme_to_first_order(decay, truncated):
    matrix, vectors = spd(6, (2,)), torch.randn(3, 2, 6)
    errors = []
    for lr in (1e-3, 1e-5):
        options = {"lr": lr, "decay": decay}
        start = Cholesky.from_dense(matrix)
        S = cholesky.update(start, OuterProducts(vectors), truncated=truncated, **options)
        want = eigen.update(Full.from_dense(matrix), OuterProducts(vectors), **options)
        errors.append(float((S.dense() - want.dense()).norm()))
    assert slope(errors, 100) == pytest.approx(2, abs=0.02)


@pytest.mark.parametrize("sizes", [(3, 4), (2, 3, 2)])
def test_every_cholesky_factor_follows_its_own_default_scheme(sizes):
    matrices, vectors = [spd(n) for n in sizes], torch.randn(2, *sizes)
    errors = []
    for lr in (1e-3, 1e-5):
        S = cholesky.update(Cholesky.from_dense(*matrices), OuterProducts(vectors), lr=lr)
        error = 0.0
        for at, factor in enumerate(S.factors):
            others = [
                torch.linalg.inv(m) if k != at else torch.zeros_like(m)
                for k, m in enumerate(matrices)
            ]
            curvature = torch.zeros_like(matrices[at])
            for v in vectors:
                solved = v
                for axis, inverse in enumerate(others):
                    if axis != at:
                        solved = torch.tensordot(inverse, solved, ([1], [axis])).movedim(0, axis)
                axes = [k for k in range(len(sizes)) if k != at]
                curvature = curvature + torch.tensordot(solved, v, (axes, axes))
            count = math.prod(sizes) // sizes[at]
            want = (1 - lr) * matrices[at] + lr * curvature / count
            error += float((torch.linalg.inv(factor @ factor.mT) - want).norm())
        errors.append(error)
    assert slope(errors, 100) == pytest.approx(2, abs=0.02)


def test_the_cholesky_scheme_says_what_it_cannot_do():
    S = Cholesky.from_dense(spd(3))
    with pytest.raises(ValueError, match="power must be 1 or -1"):
        S.dense(-0.5)
    with pytest.raises(ValueError, match="without weights"):
        cholesky.update(S, OuterProducts(torch.randn(2, 3), torch.ones(2)), lr=0.1)
    with pytest.raises(ValueError, match="lr must be finite"):
        cholesky.update(S, OuterProducts(torch.randn(2, 3)), lr=-0.1)
    with pytest.raises(ValueError, match="symmetric"):
        Cholesky.from_dense(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))


def test_the_van_loan_step_is_the_leading_singular_pair_of_the_rearranged_step():
    S = nearest_kronecker(torch.kron(spd(3), spd(4)), (3, 4))
    vectors = torch.randn(2, 3, 4)
    step = 0.9 * S.dense() + 0.1 * torch.einsum("ki,kj->ij", vectors.flatten(1), vectors.flatten(1))
    blocks = step.reshape(3, 4, 3, 4).transpose(1, 2).reshape(9, 16)
    u, s, v = torch.linalg.svd(blocks)
    want = torch.kron(u[:, 0].reshape(3, 3), v[0].reshape(4, 4)) * s[0]
    torch.testing.assert_close(van_loan.update(S, OuterProducts(vectors), lr=0.1).dense(), want)
