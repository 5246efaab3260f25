"""Estimates of gradient and Hessian under a Gaussian: no bias, and no noise where the posterior is
Gaussian.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from eigenstep import Dense, Diagonal, Full, OuterProducts
from eigenstep.core.curvature import project
from eigenstep.inference import Gaussian
from eigenstep.inference.estimates import Estimate, combine, estimate
from eigenstep.inference.gaussian import ONLY
from eigenstep.inference.models import Target
from eigenstep_lab.problems.regressions import logistic_regression

from .problems import Quadrature, quadratic, random_spd, small_logistic

UNBIASED = ["hessian", "gauss-newton", "reparametrization", "reinforce"]


def dense(q: Gaussian, found: Estimate) -> Tensor:
    S = q.precisions[ONLY]
    assert isinstance(S, Full)
    (w,) = project(S, found.curvatures[ONLY])
    return S.basis @ w @ S.basis.T + found.damping * torch.eye(q.size)


@pytest.mark.parametrize("source", UNBIASED)
def test_no_bias(source: str) -> None:
    """The mean over many points against quadrature, in units of what the spread of ten estimates
    lets expect.
    """
    inputs, targets = small_logistic()
    model = logistic_regression(inputs, targets, prior_precision=0.5)
    q = Gaussian.start(torch.tensor([0.3, -0.2, 0.1]), Full.from_dense(2 * random_spd(3, 3.0)))
    exact = Quadrature(inputs, targets, 0.5)
    gradient, hessian = exact.moments(q.mean, q.covariance())
    generator = torch.Generator().manual_seed(3)
    found = [estimate(Target(model), q, source, 2000, generator) for _ in range(10)]
    for got, want in (
        (torch.stack([each.gradients[ONLY] for each in found]), gradient),
        (torch.stack([dense(q, each) for each in found]), hessian),
    ):
        error = (got.mean(0) - want).abs()
        assert (error <= 5 * got.std(0) / 10**0.5 + 1e-9).all()
        assert error.max() < 0.1 * want.abs().max()
    bound = -torch.tensor([each.value for each in found])
    assert bound.mean().item() == pytest.approx(
        exact.elbo(q.mean, q.covariance()), abs=5 * found[0].error / 10**0.5
    )
    assert 0.3 < bound.std().item() / found[0].error < 3


@pytest.mark.parametrize(
    "S", [Full.from_dense(torch.eye(3).double()), Diagonal(torch.ones(3).double())]
)
def test_what_a_model_gives_is_summed_up(S: Full | Diagonal) -> None:
    inputs, targets = small_logistic()
    model = logistic_regression(inputs, targets, prior_precision=0.5)
    q = Gaussian.start(torch.zeros(3), S)
    found = estimate(Target(model), q, "gauss-newton", 2, torch.Generator().manual_seed(3))
    half = q.deviations(1, torch.Generator().manual_seed(3))[ONLY]
    raw = model.gauss_newton(torch.cat([half, -half]))
    assert isinstance(raw, OuterProducts)
    assert isinstance(found.curvatures[ONLY], Dense)
    assert_close(project(S, found.curvatures[ONLY]), project(S, raw))


@pytest.mark.parametrize("source", ["hessian", "gradient-outer-product"])
def test_combined_estimates_are_their_mean(source: str) -> None:
    inputs, targets = small_logistic()
    model = logistic_regression(inputs, targets, prior_precision=0.5)
    q = Gaussian.start(torch.zeros(3), Full.from_dense(random_spd(3, 3.0)))
    generator = torch.Generator().manual_seed(3)
    found = [estimate(Target(model), q, source, 8, generator) for _ in range(3)]
    both = combine(found)
    assert both.value == pytest.approx(sum(each.value for each in found) / 3)
    assert both.error == pytest.approx(sum(each.error**2 for each in found) ** 0.5 / 3)
    assert_close(
        both.gradients[ONLY], torch.stack([each.gradients[ONLY] for each in found]).mean(0)
    )
    assert_close(dense(q, both), torch.stack([dense(q, each) for each in found]).mean(0))


@pytest.mark.parametrize(
    "source", ["hessian", "reparametrization", "reinforce", "gradient-outer-product"]
)
def test_no_noise_at_a_gaussian_posterior(source: str) -> None:
    H = random_spd(5)
    center = torch.randn(5)
    q = Gaussian.start(center, Full.from_dense(H))
    found = estimate(Target(quadratic(H, center)), q, source, 6, torch.Generator().manual_seed(0))
    assert_close(dense(q, found), H)
    assert_close(found.gradients[ONLY], torch.zeros(5), atol=1e-12, rtol=0)
    assert found.error < 1e-12
    assert found.value == pytest.approx(
        0.5 * torch.logdet(H).item() - 2.5 * torch.log(torch.tensor(2 * torch.pi)).item()
    )


def test_functions_of_the_parameters_as_curvature() -> None:
    H = random_spd(4)
    center = torch.zeros(2, 2)
    q = Gaussian.start(center, "full")
    root = torch.linalg.cholesky(H).T
    for curvature in (lambda w: Dense(H), lambda w: OuterProducts(root.reshape(4, 2, 2))):
        found = estimate(
            Target(quadratic(H, center)), q, curvature, 2, torch.Generator().manual_seed(0)
        )
        assert_close(dense(q, found), H)


def test_counts_and_loops_in_place_of_vmap() -> None:
    H = random_spd(4)
    center = torch.zeros(4)
    q = Gaussian.start(center, "full")
    counts = {}
    for source in ("hessian", "reparametrization", "reinforce"):
        fast = Target(quadratic(H, center))
        slow = Target(quadratic(H, center), vectorize=False)
        a, b = (estimate(t, q, source, 6, torch.Generator().manual_seed(0)) for t in (fast, slow))
        assert a.value == pytest.approx(b.value)
        assert_close(dense(q, a), dense(q, b))
        assert (fast.ngrad, fast.nfev) == (slow.ngrad, slow.nfev)
        counts[source] = fast.ngrad, fast.nfev
    assert counts == {"hessian": (6 + 6 * 4, 0), "reparametrization": (6, 0), "reinforce": (0, 6)}
