import math
from dataclasses import replace

import pytest
import torch

from eigenstep import Full, OuterProducts
from eigenstep.search.sampling import default_population
from eigenstep_lab.baselines import cholesky, eigen, rates, van_loan
from eigenstep_lab.baselines.cholesky import Cholesky
from eigenstep_lab.baselines.nes import CholeskyNES, ExponentialNES
from eigenstep_lab.baselines.rates import DistanceRates, FixedRates
from eigenstep_lab.baselines.van_loan import nearest_kronecker
from eigenstep_lab.figures import gradient_free

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
    want = (
        kron(matrices)
        if not batch
        else torch.stack([kron([m[b] for m in matrices]) for b in range(2)])
    )
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
            Cholesky.from_dense(matrix),
            OuterProducts(vectors),
            lr=lr,
            decay=decay,
            truncated=truncated,
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


def random_strategies(batch=()):
    mean, covariance = torch.randn(*batch, 4), spd(4, batch)
    lower = torch.linalg.cholesky(torch.linalg.inv(covariance))
    return (
        covariance,
        ExponentialNES(mean, torch.linalg.cholesky(covariance)),
        CholeskyNES(mean, lower),
    )


def covariance_of(strategy):
    root = (
        strategy.root
        if isinstance(strategy, ExponentialNES)
        else torch.linalg.inv(strategy.factor).mT
    )
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
    # In the covariance V, the natural gradient of sum u log N(w; m, V) is sum u (dev dev^T - V),
    # whatever the factor.
    moment = torch.einsum("k...,k...i,k...j->...ij", utilities, deviation, deviation)
    direction = moment - utilities.sum(0)[..., None, None] * covariance
    assert torch.einsum("k...i,...ij,k...j->k...", deviation, inverse, deviation).allclose(
        z.square().sum(-1)
    )
    errors = []
    for lr in (1e-3, 1e-5):
        moved = strategy.update(z, utilities, lr=lr)
        torch.testing.assert_close(
            moved.mean, strategy.mean + (utilities[..., None] * deviation).sum(0)
        )
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
    utilities = rates.rank_utilities(values)
    torch.testing.assert_close(utilities, rates.rank_utilities(values.exp()))
    assert utilities.argsort(descending=True)[:1].tolist() == [1]
    assert float(utilities.sum()) == pytest.approx(0)
    assert utilities[4] == utilities.min()


def test_xnes_is_invariant_under_rotations_of_the_space():
    turn = torch.linalg.qr(torch.randn(4, 4))[0]
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    plain, turned = (
        ExponentialNES(torch.ones(4), torch.eye(4)),
        ExponentialNES(turn @ torch.ones(4), turn),
    )
    for _ in range(30):
        z = torch.randn(8, 4)
        values, others = (
            (weights * plain.sample(z) ** 2).sum(-1),
            (weights * (turned.sample(z) @ turn) ** 2).sum(-1),
        )
        plain = plain.update(z, rates.rank_utilities(values), lr=0.2)
        turned = turned.update(z, rates.rank_utilities(others), lr=0.2)
    torch.testing.assert_close(turned.mean, turn @ plain.mean)


def test_xnes_has_its_published_rate_population_and_utilities():
    """Wierstra et al. (2014), table 1, at d = 10."""
    d, population = 10, default_population(10)
    assert population == 4 + 6
    _, step = FixedRates().next(torch.randn(population, d), torch.arange(float(population)))
    assert step.lr == step.lr_size == pytest.approx(3 * (3 + math.log(d)) / (5 * d * math.sqrt(d)))
    raw = [
        max(0.0, math.log(population / 2 + 1) - math.log(rank)) for rank in range(1, population + 1)
    ]
    torch.testing.assert_close(
        step.utilities, torch.tensor([u / sum(raw) - 1 / population for u in raw])
    )


@pytest.mark.parametrize(
    ("length", "size", "shape"),
    [(1.01, 1.0, 22 / 162), (0.99, (1 + 12 / 22) / 2, 12 / 162), (0.05, 1 + 12 / 22, 12 / 162)],
)
def test_dx_nes_has_its_published_rates_in_each_phase(length, size, shape):
    """Fukushima et al. (2011) with d = 5 and twelve samples, for paths of given lengths, of the
    expected one.
    """
    d, population = 5, 12
    expected = math.sqrt(d) * (1 - 1 / (4 * d) + 1 / (21 * d * d))
    z, values = torch.randn(population, d), torch.randn(population)
    fresh, faded = (
        DistanceRates(torch.full((d,), start)).next(z, values)[0].path for start in (0.0, 1.0)
    )
    wanted = torch.eye(d)[0] * length * expected
    after, step = DistanceRates((wanted - fresh) / (faded - fresh)).next(z, values)
    torch.testing.assert_close(after.path, wanted)
    assert float(step.lr_size) == pytest.approx(size)
    assert float(step.lr) == pytest.approx(shape)
    plain = rates.rank_utilities(values)
    assert float(step.utilities.sum()) == pytest.approx(0, abs=1e-12)
    if length < 1:
        torch.testing.assert_close(step.utilities, plain)
    else:
        weight = (plain - plain.min()) * ((0.9 + 0.15 * math.log(d)) * z.norm(dim=-1)).exp()
        torch.testing.assert_close(step.utilities, weight / weight.sum() - 1 / population)


@pytest.mark.parametrize("scheme", ["paper", "ours", "NES", "xNES", "Cholesky NES"])
def test_size_and_shape_learn_at_rates_of_their_own(scheme):
    strategy = gradient_free.strategies(torch.zeros(2, 3))[scheme]
    z, utilities = torch.randn(6, 2, 3), torch.randn(6, 2)
    if scheme in ("paper", "ours"):  # from eigenvalues that are distinct
        strategy = replace(
            strategy, precision=Full.from_dense(torch.diag_embed(torch.tensor([[1.0, 2, 3]] * 2)))
        )
    volume = strategy.log_volume()
    size = (utilities * (z.square().sum(-1) - 3)).sum(0)
    rate = torch.tensor([1e-5, 2e-5])
    moved = strategy.update(z, utilities, lr=0.0, lr_size=rate)
    torch.testing.assert_close(moved.log_volume() - volume, rate * size / 2, rtol=1e-2, atol=0)
    scale = strategy.whiten(moved.sample(z) - moved.mean + strategy.mean) / z
    torch.testing.assert_close(scale, scale[:1, :, :1].expand_as(scale))  # the shape stays
    both, same = (strategy.update(z, utilities, lr=rate, lr_size=lr) for lr in (rate, None))
    torch.testing.assert_close(both.sample(z), same.sample(z))
    shape = strategy.update(z, utilities, lr=rate, lr_size=0.0)
    torch.testing.assert_close(shape.log_volume(), volume, rtol=0, atol=1e-7)
    assert not torch.allclose(shape.whiten(z), strategy.whiten(z), rtol=0, atol=1e-7)
