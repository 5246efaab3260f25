"""The posterior from the optimizer: against exact posteriors and its own covariance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigenstep import Spectral
from eigenstep.posterior import SpectralPosterior

SQUARED = {"ess": 50.0, "batch_size": 10.0}


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def step(optimizer: SpectralPosterior, loss: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    with optimizer.sampled_params(train=True):
        loss().backward()
    optimizer.step()


def trained(param: nn.Parameter, **options: Any) -> SpectralPosterior:
    """Train on a random quadratic function, so that all of the state is something."""
    optimizer = Spectral.posterior([param], **{**SQUARED, "lr": 0.01, **options})
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        noise = torch.randn(param.shape, generator=generator)
        step(optimizer, lambda noise=noise: ((param - 1) * noise).square().mean())  # type: ignore[misc]
    return optimizer


def dense_covariance(optimizer: SpectralPosterior, param: Tensor) -> Tensor:
    """Put ``(ess S)^-1`` together from bases and eigenvalues, for one block or a vector."""
    state = optimizer.state[param]
    group = optimizer.param_groups[0]
    if "scale" not in state:
        floor = group["prior_precision"] / group["ess"]
        return torch.diag(1 / (state["second_moment"].flatten() + floor)) / group["ess"]
    eigs = torch.ones(1)
    basis = torch.ones(1, 1)
    for axis in range(sum(name.startswith("eigs_") for name in state)):
        own = state[f"eigs_{axis}"][0, 0]
        eigs = torch.kron(eigs, own)
        kept = state.get(f"basis_{axis}")
        basis = torch.kron(basis, torch.eye(len(own)) if kept is None else kept[0, 0])
    if "second_moment" in state:
        eigs = state["second_moment"][0, 0].flatten()
    return (basis / eigs) @ basis.T / (group["ess"] * state["scale"].square())


@pytest.mark.parametrize("eigenvalues", ["corrected", "kronecker"])
@pytest.mark.parametrize(
    ("shape", "options"), [((5,), {"structure": "full"}), ((2, 3), {}), ((4,), {})], ids=str
)
def test_covariance_is_the_inverse_of_what_bases_and_eigenvalues_say(
    shape: tuple[int, ...], options: dict[str, Any], eigenvalues: str
) -> None:
    param = nn.Parameter(torch.randn(shape))
    optimizer = trained(param, eigenvalues=eigenvalues, **options)
    order = torch.arange(param.numel()).view(shape)
    order = (order.T if shape == (2, 3) else order).flatten()  # laid out transposed
    want = dense_covariance(optimizer, param)
    covariance = optimizer.covariance(param)[order][:, order]
    torch.testing.assert_close(covariance, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "options"),
    [((2, 5), {}), ((2, 5), {"eigenvalues": "kronecker"}), ((), {}), ((9, 2), {"max_ratio": 3.0})],
    ids=str,
)
def test_draws_have_this_covariance(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    param = nn.Parameter(torch.randn(shape))
    optimizer = trained(param, **options)
    mean = param.detach().clone()
    deviations = []
    for number in range(4000):
        with optimizer.sampled_params(generator=torch.Generator().manual_seed(number)):
            deviations.append((param.detach() - mean).flatten())
    root = torch.linalg.cholesky(torch.linalg.inv(optimizer.covariance(param)))
    white = torch.stack(deviations) @ root  # standard normal
    error = white.T @ white / len(white) - torch.eye(white.shape[1])
    assert error.abs().max() < 0.13  # 5 standard deviations of a variance
    assert torch.equal(param, mean)


def divergence(mean: Tensor, covariance: Tensor, other_mean: Tensor, precision: Tensor) -> float:
    """Return the Kullback-Leibler divergence of two Gaussians in nats."""
    away = mean - other_mean
    product = precision @ covariance
    total = product.trace() - len(mean) + away @ precision @ away - torch.logdet(product)
    return 0.5 * total.item()


class Regression:
    """Bayesian linear regression, whose posterior is known."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(40, 4, generator=generator) * torch.linspace(0.5, 2, 4)
        weights = torch.randn(4, generator=generator)
        self.targets = self.inputs @ weights + torch.randn(40, generator=generator)
        self.precision = self.inputs.T @ self.inputs + 2 * torch.eye(4)
        self.mean = torch.linalg.solve(self.precision, self.inputs.T @ self.targets)
        self.param = nn.Parameter(torch.zeros(4))

    def loss(self) -> Tensor:
        return (self.inputs @ self.param - self.targets).square().mean() / 2

    def distance(self, optimizer: SpectralPosterior) -> float:
        covariance = optimizer.covariance(self.param)
        return divergence(self.param.detach(), covariance, self.mean, self.precision)

    def optimizer(self, **options: Any) -> SpectralPosterior:
        return Spectral.posterior(
            [self.param],
            ess=40,
            batch_size=40,
            prior_precision=2.0,
            structure="full",
            interval=1,
            **options,
        )


def test_given_curvature_finds_the_exact_posterior() -> None:
    """Columns of the Gauss-Newton matrix, which is the Hessian here."""
    problem = Regression()
    optimizer = problem.optimizer(lr=0.2, betas=(0.9, 0.95))
    columns = problem.inputs / 40**0.5
    for _ in range(400):
        optimizer.zero_grad()
        problem.loss().backward()
        optimizer.step(curvature={problem.param: columns})
    assert problem.distance(optimizer) < 1e-3


def test_gradients_of_single_examples_find_the_fisher_matrix() -> None:
    """Of a model that explains the data, that is the curvature, up to the noise of the examples."""
    problem = Regression()
    optimizer = problem.optimizer(lr=0.05, betas=(0.9, 0.99))
    for _ in range(800):
        optimizer.zero_grad()
        problem.loss().backward()
        residuals = (problem.inputs @ problem.param.detach() - problem.targets)[:, None]
        optimizer.step(curvature={problem.param: residuals * problem.inputs / 40**0.5})
    residuals = (problem.inputs @ problem.mean - problem.targets)[:, None]
    want = (residuals * problem.inputs).T @ (residuals * problem.inputs) + 2 * torch.eye(4)
    error = torch.linalg.inv(optimizer.covariance(problem.param)) - want
    assert error.norm() < 0.01 * want.norm()


@pytest.mark.parametrize(("root", "lr"), [(1.0, 0.05), (2.0, 0.01)])
def test_squared_gradients_find_the_curvature_of_a_model_that_explains_the_data(
    root: float, lr: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20_000, 3, generator=generator) * torch.tensor([1.0, 2.0, 0.5])
    param = nn.Parameter(torch.ones(3))  # far from it, the gradient's mean would count, too
    options: dict[str, Any] = {"root": root, "lr": lr, "structure": "full", "betas": (0.9, 0.999)}
    optimizer = Spectral.posterior([param], ess=20_000, batch_size=20, **options)
    for _ in range(1500):
        some = inputs[torch.randint(20_000, (20,), generator=generator)]
        targets = some.sum(1) + torch.randn(20, generator=generator)
        step(optimizer, lambda x=some, y=targets: (x @ param - y).square().mean() / 2)  # type: ignore[misc]
    precision = torch.linalg.inv(optimizer.covariance(param)) / 20_000
    want = inputs.T @ inputs / 20_000
    assert (precision - want).norm() < 0.15 * want.norm()


@pytest.mark.parametrize("root", [1.0, 2.0])
def test_a_step_divides_by_the_root_of_the_curvature_with_the_prior(root: float) -> None:
    """The first one, along the gradient of loss and prior, in units in which a step of root 2 has
    entries of one.
    """
    param = nn.Parameter(torch.randn(3, 2))
    gradient = torch.randn(3, 2)
    before = param.detach().clone()
    options: dict[str, Any] = {"ess": 50.0, "batch_size": 10.0, "prior_precision": 4.0}
    optimizer = Spectral.posterior([param], 0.01, root=root, structure="diagonal", **options)
    param.grad = gradient
    optimizer.step()
    floor = 4.0 / 50.0
    total = gradient + floor * before
    square = 10.0 * total.square()  # an estimate of the curvature
    want = total / (square + floor)
    if root == 2:
        want = 10.0**0.5 * total / (square.sqrt() + floor**0.5)
    torch.testing.assert_close(param.detach(), before - 0.01 * want)
    covariance = torch.diag(1 / (50.0 * (square + floor)).flatten())
    torch.testing.assert_close(optimizer.covariance(param), covariance)


def test_negative_curvature_leaves_a_posterior() -> None:
    param = nn.Parameter(torch.full((4, 3), 0.1))
    optimizer = Spectral.posterior([param], lr=0.01, **SQUARED)
    for _ in range(200):
        step(optimizer, lambda: (param.pow(4) - param.square()).mean())
    assert torch.isfinite(param).all()
    assert torch.linalg.eigvalsh(optimizer.covariance(param)).min() > 0
