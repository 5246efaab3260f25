import math

import pytest
import torch

from eigenstep import Full, OuterProducts
from eigenstep_lab.baselines import cholesky, eigen, nes, van_loan
from eigenstep_lab.baselines.cholesky import Cholesky
from eigenstep_lab.baselines.nes import CholeskyNES, ExponentialNES
from eigenstep_lab.baselines.van_loan import nearest_kronecker

SIZES = [(5,), (3, 4), (2, 3, 2)]


@pytest.fixture(autouse=True)
def float64():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(default)


def spd(n, batch=()):
    root = torch.randn(*batch, n, 2 * n)
    return root @ root.mT / (2 * n)


def kron(matrices):
    product, *rest = matrices
    for matrix in rest:
        product = torch.kron(product, matrix)
    return product


def slope(errors, factor):
    """Order of an error that shrinks from first to last when the step shrinks by `factor`."""
    return math.log(errors[0] / errors[-1]) / math.log(factor)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_cholesky_is_the_matrix_it_was_made_from(sizes, batch):
    matrices = [spd(n, batch) for n in sizes]
    S = Cholesky.from_dense(*matrices)
    want = kron(matrices) if not batch else torch.stack([kron([m[b] for m in matrices]) for b in range(2)])
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
        S = cholesky.update(
            Cholesky.from_dense(matrix), OuterProducts(vectors), lr=lr, decay=decay, truncated=truncated
        )
        want = eigen.update(Full.from_dense(matrix), OuterProducts(vectors), lr=lr, decay=decay)
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
            others = [torch.linalg.inv(m) if k != at else torch.zeros_like(m) for k, m in enumerate(matrices)]
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


def random_strategies(batch=()):
    mean, covariance = torch.randn(*batch, 4), spd(4, batch)
    lower = torch.linalg.cholesky(torch.linalg.inv(covariance))
    return covariance, ExponentialNES(mean, torch.linalg.cholesky(covariance)), CholeskyNES(mean, lower)


def covariance_of(strategy):
    root = strategy.root if isinstance(strategy, ExponentialNES) else torch.linalg.inv(strategy.factor).mT
    return root @ root.mT


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_nes_baselines_follow_the_natural_gradient_to_first_order(which, batch):
    covariance, *strategies = random_strategies(batch)
    strategy = strategies[which - 1]
    z, utilities = torch.randn(7, *batch, 4), torch.randn(7, *batch)
    samples = strategy.sample(z)
    deviation = samples - strategy.mean
    inverse = torch.linalg.inv(covariance)
    # In the covariance V, the natural gradient of sum u log N(w; m, V) is sum u (dev dev^T - V), whatever the factor.
    moment = torch.einsum("k...,k...i,k...j->...ij", utilities, deviation, deviation)
    direction = moment - utilities.sum(0)[..., None, None] * covariance
    assert torch.einsum("k...i,...ij,k...j->k...", deviation, inverse, deviation).allclose(z.square().sum(-1))
    errors = []
    for lr in (1e-3, 1e-5):
        moved = strategy.update(z, utilities, lr=lr)
        torch.testing.assert_close(moved.mean, strategy.mean + (utilities[..., None] * deviation).sum(0))
        errors.append(float((covariance_of(moved) - covariance - lr * direction).norm()))
    assert slope(errors, 100) == pytest.approx(2, abs=0.05)


def test_the_cholesky_factor_stays_triangular_with_a_positive_diagonal():
    strategy = CholeskyNES(torch.zeros(4), torch.eye(4))
    for _ in range(20):
        strategy = strategy.update(torch.randn(6, 4), torch.randn(6), lr=5.0)
        assert strategy.factor.equal(strategy.factor.tril())
        assert (strategy.factor.diagonal() > 0).all()


def test_utilities_depend_on_the_order_alone():
    values = torch.tensor([3.0, -1.0, 10.0, 0.5, torch.nan])
    utilities = nes.rank_utilities(values)
    torch.testing.assert_close(utilities, nes.rank_utilities(values.exp()))
    assert utilities.argsort(descending=True)[:1].tolist() == [1]
    assert float(utilities.sum()) == pytest.approx(0)
    assert utilities[4] == utilities.min()


def test_xnes_is_invariant_under_rotations_of_the_space():
    turn = torch.linalg.qr(torch.randn(4, 4))[0]
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    plain, turned = ExponentialNES(torch.ones(4), torch.eye(4)), ExponentialNES(turn @ torch.ones(4), turn)
    for _ in range(30):
        z = torch.randn(8, 4)
        values, others = (weights * plain.sample(z) ** 2).sum(-1), (weights * (turned.sample(z) @ turn) ** 2).sum(-1)
        plain = plain.update(z, nes.rank_utilities(values), lr=0.2)
        turned = turned.update(z, nes.rank_utilities(others), lr=0.2)
    torch.testing.assert_close(turned.mean, turn @ plain.mean)
