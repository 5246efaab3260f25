"""Models against torch's distributions and dense derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal
from torch.func import hessian
from torch.testing import assert_close

from eigenstep import OuterProducts
from eigenstep.inference import Supervised
from eigenstep_lab.extras import Minibatches
from eigenstep_lab.problems.regressions import classifier, linear_regression, logistic_regression

from .problems import small_logistic


def dense(curvature: object) -> Tensor:
    assert isinstance(curvature, OuterProducts)
    vectors = curvature.vectors.flatten(1)
    return vectors.T @ vectors


def test_log_densities() -> None:
    inputs, labels = small_logistic()
    w = torch.randn(3)
    targets = torch.randn(40)
    prior = Normal(0, 2.0**-0.5).log_prob(w).sum()
    linear = linear_regression(inputs, targets, noise=0.3, prior_precision=2.0)
    assert_close(linear(w), Normal(inputs @ w, 0.3).log_prob(targets).sum() + prior)
    logistic = logistic_regression(inputs, labels, prior_precision=2.0)
    assert_close(logistic(w), Bernoulli(logits=inputs @ w).log_prob(labels).sum() + prior)


def test_empirical_fisher() -> None:
    inputs, targets = small_logistic()
    points = torch.randn(2, 3)
    gradients = ((inputs @ points.T).sigmoid() - targets[:, None]).T[..., None] * inputs
    found = logistic_regression(inputs, targets).empirical_fisher(points)
    assert_close(dense(found), torch.einsum("kni,knj->ij", gradients, gradients) / 2)


@pytest.fixture
def network() -> tuple[Supervised, dict[str, Tensor]]:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    return classifier(net, torch.randn(10, 4), torch.randint(3, (10,)), prior_precision=0.5)


def test_network(network: tuple[Supervised, dict[str, Tensor]]) -> None:
    model, start = network
    hidden = (model.inputs @ start["0.weight"].T + start["0.bias"]).tanh()
    logits = hidden @ start["2.weight"].T + start["2.bias"]
    prior = sum(Normal(0, 2.0**0.5).log_prob(p).sum() for p in start.values())
    assert_close(model(start), Categorical(logits=logits).log_prob(model.targets).sum() + prior)
    # The last layer enters linearly: there, Gauss-Newton is the Hessian.
    found = model.gauss_newton({name: p[None] for name, p in start.items()})
    assert isinstance(found, dict)
    want = hessian(lambda w: -model({**start, "2.weight": w}))(start["2.weight"]).reshape(
        9, 9
    ) - 0.5 * torch.eye(9)
    assert_close(dense(found["2.weight"]), want)


def test_minibatches_have_the_right_mean() -> None:
    model = logistic_regression(*small_logistic(8), prior_precision=2.0)
    w = torch.randn(3)
    batches = Minibatches(model, 4)
    values = torch.stack([batches(w) for _ in range(400)])
    assert (values.mean() - model(w)).abs() < 4 * values.std() / 20
    assert values.std() > 0.1
    assert_close(Minibatches(model, 8)(w), model(w))
    assert_close(
        dense(Minibatches(model, 8).gauss_newton(w[None])), dense(model.gauss_newton(w[None]))
    )
