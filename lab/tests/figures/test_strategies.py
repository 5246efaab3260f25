"""Natural evolution strategies: their Gaussians, their steps, and techniques that spare samples."""

import math
from dataclasses import replace

import pytest
import torch

from eigenstep import Full, Turning
from eigenstep.search.sampling import default_population
from eigenstep_lab.baselines import rates
from eigenstep_lab.baselines.nes import (
    CholeskyNES,
    ExponentialNES,
    PlainNES,
    Population,
    log_density,
)
from eigenstep_lab.baselines.rates import DistanceRates, FixedRates
from eigenstep_lab.figures import gradient_free
from eigenstep_lab.figures.matching import random_covariances

pytestmark = pytest.mark.usefixtures("float64")
BUILD = {
    "plain": PlainNES,
    "exponential": lambda mean, cov: ExponentialNES(mean, torch.linalg.cholesky(cov)),
    "Cholesky": lambda mean, cov: CholeskyNES(mean, torch.linalg.cholesky(torch.linalg.inv(cov))),
    "paper": lambda mean, cov: spectral("paper", mean, cov),
    "ours": lambda mean, cov: spectral("ours", mean, cov),
}
EVERY = pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)


def spectral(name, mean, covariance):
    strategy = gradient_free.strategies(mean)[name]
    return replace(strategy, precision=Full.from_dense(torch.linalg.inv(covariance)))


def gaussian(build):
    """Two Gaussians, side by side."""
    covariance = random_covariances(4, 2, 5.0, torch.Generator().manual_seed(0))
    mean = torch.randn(2, 4)
    return mean, covariance, build(mean, covariance)


def covariance_of(strategy):
    """The covariance, from the images of the unit vectors."""
    z = torch.eye(4)[:, None].expand(4, 2, 4)
    root = (strategy.sample(z) - strategy.mean).permute(1, 2, 0)
    return root @ root.mT


@EVERY
def test_densities_are_those_of_a_gaussian(build):
    mean, covariance, strategy = gaussian(build)
    z = torch.randn(7, 2, 4)
    points = strategy.sample(z)
    torch.testing.assert_close(strategy.whiten(points), z)
    torch.testing.assert_close(covariance_of(strategy), covariance)
    wanted = torch.distributions.MultivariateNormal(mean, covariance).log_prob(points)
    constant = math.log(2 * math.pi) * 4 / 2
    torch.testing.assert_close(log_density(strategy, points) - constant, wanted)


@EVERY
def test_steps_follow_the_natural_gradient_to_first_order(build):
    """In the covariance V it is ``sum u (dev dev^T - V)``, whatever the factor."""
    mean, covariance, strategy = gaussian(build)
    z, utilities = torch.randn(7, 2, 4), torch.randn(7, 2)
    deviation = strategy.sample(z) - mean
    moment = torch.einsum("k...,k...i,k...j->...ij", utilities, deviation, deviation)
    direction = moment - utilities.sum(0)[..., None, None] * covariance
    errors = []
    for lr in (1e-3, 1e-5):
        moved = strategy.update(z, utilities, lr=lr)
        wanted = mean + (utilities[..., None] * deviation).sum(0)
        torch.testing.assert_close(moved.mean, wanted)
        errors.append(float((covariance_of(moved) - covariance - lr * direction).norm()))
    if isinstance(strategy, PlainNES):
        assert max(errors) < 1e-12
    else:
        assert math.log(errors[0] / errors[1], 100) == pytest.approx(2, abs=0.05)


def test_plain_nes_stays_positive_definite():
    _, _, strategy = gaussian(PlainNES)
    far = strategy.update(torch.randn(6, 2, 4), torch.randn(6, 2), lr=1e3).covariance
    assert (torch.linalg.eigvalsh(far) > 0).all()


def test_the_cholesky_factor_stays_triangular_with_a_positive_diagonal():
    strategy = CholeskyNES(torch.zeros(4), torch.eye(4))
    for _ in range(20):
        strategy = strategy.update(torch.randn(6, 4), torch.randn(6), lr=5.0)
        assert strategy.factor.equal(strategy.factor.tril())
        assert (strategy.factor.diagonal() > 0).all()


def test_the_paper_does_not_mend_its_bases():
    paper, ours = (gradient_free.strategies(torch.zeros(1, 2))[name] for name in ("paper", "ours"))
    assert not paper.turning.mend
    assert ours.turning.mend is Turning().mend is True


def test_utilities_depend_on_the_order_alone():
    values = torch.tensor([3.0, -1.0, 10.0, 0.5, torch.nan])
    utilities = rates.rank_utilities(values)
    torch.testing.assert_close(utilities, rates.rank_utilities(values.exp()))
    assert utilities.argmax() == 1
    assert float(utilities.sum()) == pytest.approx(0)
    assert utilities[4] == utilities.min()


def test_xnes_is_invariant_under_rotations_of_the_space():
    turn = torch.linalg.qr(torch.randn(4, 4))[0]
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    plain = ExponentialNES(torch.ones(4), torch.eye(4))
    turned = ExponentialNES(turn @ torch.ones(4), turn)
    for _ in range(30):
        z = torch.randn(8, 4)
        values = (weights * plain.sample(z) ** 2).sum(-1)
        others = (weights * (turned.sample(z) @ turn) ** 2).sum(-1)
        plain = plain.update(z, rates.rank_utilities(values), lr=0.2)
        turned = turned.update(z, rates.rank_utilities(others), lr=0.2)
    torch.testing.assert_close(turned.mean, turn @ plain.mean)


def test_xnes_has_its_published_rate_population_and_utilities():
    """Wierstra et al. (2014), table 1, at d = 10."""
    d, population = 10, default_population(10)
    assert population == 4 + 6
    _, step = FixedRates().next(torch.randn(population, d), torch.arange(float(population)))
    assert step.lr == step.lr_size == pytest.approx(3 * (3 + math.log(d)) / (5 * d * math.sqrt(d)))
    ranks = torch.arange(1.0, population + 1)
    raw = (math.log(population / 2 + 1) - ranks.log()).clamp_min(0)
    torch.testing.assert_close(step.utilities, raw / raw.sum() - 1 / population)


@pytest.mark.parametrize(
    ("length", "size", "shape"),
    [(1.01, 1.0, 22 / 162), (0.99, (1 + 12 / 22) / 2, 12 / 162), (0.05, 1 + 12 / 22, 12 / 162)],
)
def test_dx_nes_has_its_published_rates_in_each_phase(length, size, shape):
    """Fukushima et al. (2011), d = 5 and twelve samples, for paths of given relative lengths."""
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
    utilities = rates.rank_utilities(values)
    if length > 1:
        far = ((0.9 + 0.15 * math.log(d)) * z.norm(dim=-1)).exp()
        weight = (utilities - utilities.min()) * far
        utilities = weight / weight.sum() - 1 / population
    torch.testing.assert_close(step.utilities, utilities)


@pytest.mark.parametrize("scheme", ["paper", "ours", "NES", "xNES", "Cholesky NES"])
def test_size_and_shape_learn_at_rates_of_their_own(scheme):
    strategy = gradient_free.strategies(torch.zeros(2, 3))[scheme]
    z, utilities = torch.randn(6, 2, 3), torch.randn(6, 2)
    if scheme in ("paper", "ours"):  # from eigenvalues that are distinct
        eigs = torch.diag_embed(torch.tensor([[1.0, 2, 3]] * 2))
        strategy = replace(strategy, precision=Full.from_dense(eigs))
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


def test_mixed_populations_are_distributed_as_the_new_gaussian():
    """Mean and covariance of many, though most samples are those of before."""
    searches, generator = 4000, torch.Generator().manual_seed(1)
    eye = torch.eye(2).expand(searches, 2, 2)
    before = ExponentialNES(torch.zeros(searches, 2), eye)
    move, stretch = torch.tensor([0.4, 0.0]), torch.tensor([1.2, 0.8])
    after = ExponentialNES(before.mean + move, eye * stretch[:, None])

    def normal():
        return torch.randn(10, searches, 2, generator=generator)

    first = Population.first(before, normal)
    mixed = first.mixed(after, 0.1, normal, generator)
    assert 0.1 <= float(mixed.new.double().mean()) < 0.5
    assert torch.equal(mixed.points[~mixed.new], first.points[~mixed.new])
    flat = mixed.points.reshape(-1, 2)
    torch.testing.assert_close(flat.mean(0), move, atol=0.02, rtol=0)
    torch.testing.assert_close(flat.T.cov(), torch.diag(stretch**2), atol=0.03, rtol=0)
    assert first.mixed(after, 1.0, normal, generator).new.all()


def test_the_techniques_that_spare_evaluations_have_rows_of_their_own():
    """No verdict is about them: the paper does not say which it uses."""
    settings = gradient_free.Settings(dimension=2, seeds=2, generations=2)
    result = gradient_free.run(settings, seed=0, device=torch.device("cpu"))
    rows = {"paper", "ours", "NES", "xNES", "Cholesky NES"}
    rows |= {f"{name}, {how}" for name in ("paper", "xNES") for how in ("mixed", "DX")}
    for panel in result.panels:
        assert panel.curves.keys() == rows
    assert rows < set(result.tables[0].columns)
    assert {verdict.scheme for verdict in result.verdicts} == {"paper", "ours"}
