"""The posterior from the optimizer: against exact posteriors, dense Hessians and its own
covariance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigenstep import Spectral
from eigenstep.optim import SpectralPosterior, posterior_kernel
from eigenstep.optim.state import Rates, Rule, new_state

SQUARED = {"ess": 50.0, "batch_size": 10.0}
TRICK = {"ess": 50.0, "curvature": "reparametrization"}


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def step(optimizer: SpectralPosterior, loss: Callable[[], Tensor], draws: int = 1) -> None:
    optimizer.zero_grad()
    for _ in range(draws):
        with optimizer.sampled_params(train=True):
            loss().backward()
    optimizer.step()


def trained(param: nn.Parameter, steps: int = 5, **options: Any) -> SpectralPosterior:
    """Train on a random quadratic function, so that all of the state is something."""
    optimizer = Spectral.posterior([param], **{**SQUARED, "lr": 0.01, **options})
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        noise = torch.randn(param.shape, generator=generator)
        step(optimizer, lambda noise=noise: ((param - 1) * noise).square().mean())  # type: ignore[misc]
    return optimizer


def dense_covariance(optimizer: SpectralPosterior, param: Tensor) -> Tensor:
    """Put ``(ess S)^-1`` together from bases and eigenvalues, for a matrix without blocks or a
    vector.
    """
    state, group = optimizer.state[param], optimizer.param_groups[0]
    if "scale" not in state:
        return torch.diag(1 / (state["second_moment"].flatten() + group["damping"])) / group["ess"]
    axes = [axis for axis in range(2) if f"eigs_{axis}" in state]
    bases = [state.get(f"basis_{axis}", torch.eye(param.numel())[None, None]) for axis in axes]
    basis = bases[0][0, 0] if len(bases) == 1 else torch.kron(bases[0][0, 0], bases[1][0, 0])
    if "second_moment" in state:
        eigs = state["second_moment"][0, 0].flatten()
    else:
        eigs = (
            torch.kron(state["eigs_0"][0, 0], state["eigs_1"][0, 0])
            if len(bases) == 2
            else state["eigs_0"][0, 0]
        )
    return (basis / eigs) @ basis.T / (group["ess"] * state["scale"].square())


@pytest.mark.parametrize("eigenvalues", ["corrected", "kronecker"])
@pytest.mark.parametrize(
    ("shape", "options"), [((4, 3), {}), ((5,), {"structure": "full"}), ((2, 3), {}), ((4,), {})]
)
def test_covariance_is_the_inverse_of_what_bases_and_eigenvalues_say(
    shape: tuple[int, ...], options: dict[str, Any], eigenvalues: str
) -> None:
    param = nn.Parameter(torch.randn(shape))
    optimizer = trained(param, eigenvalues=eigenvalues, **options)
    order = torch.arange(param.numel()).view(shape)
    order = (
        order.T if len(shape) == 2 and shape[0] < shape[1] else order
    ).flatten()  # laid out transposed
    want = dense_covariance(optimizer, param)
    torch.testing.assert_close(
        optimizer.covariance(param)[order][:, order], want, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(
    "options", [SQUARED, TRICK, {**SQUARED, "eigenvalues": "kronecker"}], ids=str
)
@pytest.mark.parametrize("shape", [(3, 2), (2, 5), (4,), (), (9, 2)])
def test_draws_have_this_covariance(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    param = nn.Parameter(torch.randn(shape))
    optimizer = trained(param, **options)
    mean, found = param.detach().clone(), []
    for number in range(4000):
        with optimizer.sampled_params(generator=torch.Generator().manual_seed(number)):
            found.append((param.detach() - mean).flatten())
    draws, want = torch.stack(found), optimizer.covariance(param)
    root = torch.linalg.cholesky(torch.linalg.inv(want))
    white = draws @ root  # standard normal
    error = white.T @ white / len(white) - torch.eye(white.shape[1])
    assert error.abs().max() < 0.13  # 5 standard deviations of a variance
    assert torch.equal(param, mean)


def divergence(mean: Tensor, covariance: Tensor, other_mean: Tensor, precision: Tensor) -> float:
    """Return the Kullback-Leibler divergence of two Gaussians in nats."""
    away, product = mean - other_mean, precision @ covariance
    return (
        0.5 * (product.trace() - len(mean) + away @ precision @ away - torch.logdet(product)).item()
    )


class Regression:
    """Bayesian linear regression, whose posterior is known."""

    def __init__(self, shape: tuple[int, ...] = (4,)) -> None:
        generator = torch.Generator().manual_seed(3)
        size = torch.Size(shape).numel()
        self.inputs = torch.randn(40, size, generator=generator) * torch.linspace(0.5, 2, size)
        self.targets = self.inputs @ torch.randn(size, generator=generator) + torch.randn(
            40, generator=generator
        )
        self.precision = self.inputs.T @ self.inputs + 2 * torch.eye(size)
        self.mean = torch.linalg.solve(self.precision, self.inputs.T @ self.targets)
        self.param = nn.Parameter(torch.zeros(shape))

    def loss(self) -> Tensor:
        return (self.inputs @ self.param.flatten() - self.targets).square().mean() / 2

    def distance(self, optimizer: SpectralPosterior) -> float:
        covariance = optimizer.covariance(self.param)
        return divergence(self.param.detach().flatten(), covariance, self.mean, self.precision)

    def optimizer(self, **options: Any) -> SpectralPosterior:
        return Spectral.posterior(
            [self.param], ess=40, prior_precision=2.0, structure="full", interval=1, **options
        )


@pytest.mark.parametrize("draws", [1, 2])
def test_the_reparametrization_trick_finds_the_exact_posterior(draws: int) -> None:
    problem = Regression()
    optimizer = problem.optimizer(lr=0.2, curvature="reparametrization", antithetic=draws == 2)
    for number in range(1200 if draws == 2 else 2500):
        # Noise of single draws must be averaged
        optimizer.param_groups[0]["lr"] = 0.2 * min(1, 300 / (number + 1)) ** 3
        step(optimizer, problem.loss, draws)
    assert problem.distance(optimizer) < 1e-3


def test_given_curvature_finds_the_exact_posterior() -> None:
    """Columns of the Gauss-Newton matrix, which is the Hessian here."""
    problem = Regression()
    optimizer = problem.optimizer(lr=0.2, batch_size=40, betas=(0.9, 0.95))
    columns = problem.inputs / 40**0.5
    for _ in range(400):
        optimizer.zero_grad()
        problem.loss().backward()
        optimizer.step(curvature={problem.param: columns})
    assert problem.distance(optimizer) < 1e-3


def test_gradients_of_single_examples_find_the_fisher_matrix() -> None:
    """Of a model that explains the data, that is the curvature, up to the noise of the examples."""
    problem = Regression()
    optimizer = problem.optimizer(lr=0.05, batch_size=40, betas=(0.9, 0.99))
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


def quartic(w: Tensor) -> Tensor:
    """A function with negative curvature in some directions."""
    return (w[0] ** 4 + w[0] * w[1] ** 2 - 2 * w[1] ** 2 + 0.3 * w[2] * w[1]).sum()


def test_estimates_of_the_mean_hessian_are_unbiased() -> None:
    """One step from very many draws moves eigenvalues by what autograd's Hessians say, whatever
    their signs.
    """
    ess, prior, count = 30.0, 0.4, 200_000
    rule, like = (
        Rule(eigenvalues="kronecker", grafting=None, nesterov=0.0, root=1.0, start=0.0),
        torch.float64,
    )
    where = {"dtype": like, "basis_dtype": like, "device": torch.device("cpu")}
    state = new_state((1, 1, 3), (True,), rule, momentum=True, residual=False, **where)
    basis = torch.linalg.qr(torch.randn(3, 3))[0]
    eigs = torch.tensor([0.5, 1.0, 2.0])
    state["basis_0"].copy_(basis)
    state["eigs_0"].copy_(eigs)
    state["scale"].fill_(1.3)
    state["momentum"].copy_(torch.randn(3))  # changes nothing but noise
    mean, z = torch.tensor([0.3, -0.2, 0.5]), torch.randn(count, 3)
    draws = mean + (z / (ess * 1.69 * eigs).sqrt()) @ basis.T
    gradients = torch.func.vmap(torch.func.grad(quartic))(draws) + prior / ess * mean
    hessian = torch.func.vmap(torch.func.hessian(quartic))(draws).mean(0) + prior / ess * torch.eye(
        3
    )
    want = (basis.T @ hessian @ basis).diagonal() / (1.69 * eigs) - 1
    assert want.min() < -1  # the mean Hessian has a negative eigenvalue
    rates = Rates(*(torch.tensor(x) for x in (0.9, 0.999, 0.1, prior / ess)))
    vectors = torch.cat([z.T, gradients.T], -1)[None, None]
    posterior_kernel.reparametrized(
        ess, lambda x: x, gradients.mean(0)[None, None], vectors, state, rule, rates, False
    )
    found = (state["scale"].square() * state["eigs_0"][0, 0] / (1.69 * eigs)).log() / 0.001
    torch.testing.assert_close(found, want, atol=0.1, rtol=0.0)


def test_the_estimate_of_a_kronecker_product_is_the_projection_of_the_hessian() -> None:
    z, hessian = torch.randn(1, 1, 3, 2, 100_000), torch.randn(6, 6)
    hessian = hessian + hessian.T
    v = (hessian @ z[0, 0].flatten(0, 1)).view_as(z)
    blocks = hessian.view(3, 2, 3, 2)
    for axis, want in enumerate(
        (blocks.diagonal(0, 1, 3).mean(-1), blocks.diagonal(0, 0, 2).mean(-1))
    ):
        found = posterior_kernel._surplus(z, v, axis, True)[0, 0]
        torch.testing.assert_close((found + found.T) / 2, want, atol=0.06, rtol=0.0)
        diagonal = posterior_kernel._surplus(z, v, axis, False)[0, 0]
        torch.testing.assert_close(diagonal, want.diagonal(), atol=0.06, rtol=0.0)


@pytest.mark.parametrize("shape", [(3, 2), (4,)])
@pytest.mark.parametrize("root", [1.0, 2.0])
def test_a_step_divides_by_the_root_of_the_curvature_with_the_prior(
    root: float, shape: tuple[int, ...]
) -> None:
    """The first one, along the gradient of loss and prior, in units in which a step of root 2 has
    entries of one.
    """
    param, ess, batch, prior = nn.Parameter(torch.randn(shape)), 50.0, 10.0, 4.0
    gradient, before = torch.randn(shape), param.detach().clone()
    options: dict[str, Any] = {
        "root": root,
        "ess": ess,
        "batch_size": batch,
        "prior_precision": prior,
        "nesterov": 0.0,
    }
    optimizer = Spectral.posterior([param], lr=0.01, structure="diagonal", **options)
    param.grad = gradient
    optimizer.step()
    total, floor = gradient + prior / ess * before, prior / ess
    square = batch * total.square()  # an estimate of the curvature
    want = (
        total / (square + floor) if root == 1 else batch**0.5 * total / (square.sqrt() + floor**0.5)
    )
    torch.testing.assert_close(param.detach(), before - 0.01 * want)
    torch.testing.assert_close(
        optimizer.covariance(param), torch.diag(1 / (ess * (square + floor)).flatten())
    )


@pytest.mark.parametrize("options", [SQUARED, TRICK], ids=str)
def test_negative_curvature_leaves_a_posterior(options: dict[str, Any]) -> None:
    param = nn.Parameter(torch.full((4, 3), 0.1))
    optimizer = Spectral.posterior([param], lr=0.01, **options)
    for _ in range(200):
        step(optimizer, lambda: (param.pow(4) - param.square()).mean())
    assert torch.isfinite(param).all()
    assert torch.linalg.eigvalsh(optimizer.covariance(param)).min() > 0
