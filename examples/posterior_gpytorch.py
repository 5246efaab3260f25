"""A variational Gaussian for GPyTorch that works with any optimizer.

Sparse Gaussian process regression: what is learned is a Gaussian over the function's values at 20
inducing points. GPyTorch's natural parametrization takes natural gradient steps, but with plain
gradient descent alone: its parameters are a matrix that must stay negative definite, which nothing
guards when Adam rescales gradients. Here the covariance is held by eigenvalues and an eigenbasis,
and each step follows the manifold of positive-definite matrices, whatever the optimizer is. The
best Gaussian is known in closed form; the gap to its bound is what is printed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    NaturalVariationalDistribution,
    VariationalStrategy,
)
from torch import Tensor, nn

from eigenstep import SPDParameter, Spectral

STEPS, INDUCING, NOISE = 300, 20, 0.05


class SPDVariationalDistribution(gpytorch.variational._VariationalDistribution):
    """A multivariate normal whose covariance stays positive definite."""

    def __init__(self, num_inducing_points: int) -> None:
        super().__init__(num_inducing_points)
        self.mean = nn.Parameter(torch.zeros(num_inducing_points))
        self.covariance = SPDParameter(torch.eye(num_inducing_points))

    def forward(self) -> MultivariateNormal:
        return MultivariateNormal(self.mean, self.covariance().dense())

    def initialize_variational_distribution(self, prior_dist: MultivariateNormal) -> None:
        self.covariance = SPDParameter(prior_dist.covariance_matrix.detach())


class SparseGP(gpytorch.models.ApproximateGP):
    """A Gaussian process with a fixed kernel."""

    def __init__(self, distribution: nn.Module, inducing: Tensor) -> None:
        super().__init__(
            VariationalStrategy(self, inducing, distribution, learn_inducing_locations=False)
        )
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.RBFKernel()
        self.covar_module.lengthscale = 0.3

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(
            self.mean_module(x), self.covar_module(x) + 1e-4 * torch.eye(len(x))
        )


def best_bound(x: Tensor, y: Tensor, model: SparseGP, inducing: Tensor) -> float:
    """Return the bound of the best Gaussian, per example: the collapsed bound of Titsias."""
    kernel = model.covar_module
    K = kernel(inducing).to_dense() + 1e-4 * torch.eye(len(inducing))
    cross, own = kernel(inducing, x).to_dense(), 1 + 1e-4
    explained = cross.T @ torch.linalg.solve(K, cross)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(len(x)), explained + NOISE * torch.eye(len(x))
    )
    return (
        (marginal.log_prob(y) - (own - explained.diagonal()).sum() / (2 * NOISE)) / len(x)
    ).item()


def gap(
    distribution: Callable[[int], nn.Module],
    optimizer: Callable[[list[Any]], torch.optim.Optimizer],
) -> float:
    """Train, and return how many nats per example the bound falls short of the best."""
    torch.manual_seed(0)
    x = torch.linspace(0, 3, 200)
    y = torch.sin(4 * x) + NOISE**0.5 * torch.randn(200)
    inducing = torch.linspace(0, 3, INDUCING)
    model = SparseGP(distribution(INDUCING), inducing)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = NOISE
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    model(x)  # GPyTorch sets the Gaussian to the prior at the first call
    opt = optimizer(list(model.variational_strategy._variational_distribution.parameters()))
    rate = opt.param_groups[0]["lr"]
    try:
        for step in range(STEPS):
            # The second half falls to zero
            opt.param_groups[0]["lr"] = rate * min(1.0, 2 * (1 - step / STEPS))
            opt.zero_grad()
            loss = -bound(model(x), y)
            loss.backward()
            opt.step()
        found = bound(model(x), y).item()
    except (ValueError, RuntimeError):  # such as: not positive definite
        return float("inf")
    return best_bound(x, y, model, inducing) - found if found == found else float("inf")


def main() -> None:
    torch.set_default_dtype(torch.float64)
    gpytorch.settings.cholesky_jitter._set_value(None, 1e-10, None)
    adam = partial(torch.optim.Adam, lr=0.1)
    rows = [
        ("GPyTorch, natural, its own gradient descent", NaturalVariationalDistribution,
         lambda params: gpytorch.optim.NGD(params, num_data=200, lr=0.1)),
        ("GPyTorch, natural, Adam", NaturalVariationalDistribution, adam),
        ("GPyTorch, Cholesky, Adam", CholeskyVariationalDistribution, adam),
        ("SPDParameter, Adam", SPDVariationalDistribution, adam),
        ("SPDParameter, SGD with momentum", SPDVariationalDistribution,
         lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)),
        (
            "SPDParameter, Spectral",
            SPDVariationalDistribution,
            lambda params: Spectral(params, lr=0.1),
        ),
    ]  # fmt: skip
    for name, distribution, optimizer in rows:
        print(
            f"{name:45s} {gap(distribution, optimizer):.2e} nats per example below the best "
            "Gaussian"
        )
    torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    main()
