"""`SPDParameter` in ordinary training loops."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from eigenstep import Kronecker
from eigenstep.manifold import SPDParameter, minimize_spd

from .problems import random_spd, structures


def train(
    parameter: SPDParameter, optimizer: torch.optim.Optimizer, data: Tensor, steps: int
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (-parameter().log_prob(data, power=1).mean()).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.7, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.8, 0.9)),
    ],
)
def test_optimizers_learn_a_covariance(make: object) -> None:
    data = torch.randn(300, 4) @ torch.randn(4, 4)
    parameter = SPDParameter(torch.eye(4))
    optimizer = make(parameter.parameters())  # type: ignore[operator]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for _ in range(200):
        train(parameter, optimizer, data, 1)
        scheduler.step()
    covariance = data.T @ data / len(data)
    assert_close(
        torch.linalg.solve(covariance, parameter.matrix.dense()), torch.eye(4), rtol=0, atol=2e-3
    )


@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("structure", structures())
def test_sgd_is_riemannian_gradient_descent(structure: str, momentum: float) -> None:
    """The module with torch's SGD takes the very steps of `minimize_spd` with fixed step sizes."""
    S = structures()[structure]
    target = 2 * S.dense() + torch.eye(S.dense().shape[-1])

    def loss(S: Tensor) -> Tensor:
        return (torch.linalg.inv(S) * target).sum() + torch.logdet(S).sum()

    parameter = SPDParameter(S)
    optimizer = torch.optim.SGD(parameter.parameters(), lr=0.05, momentum=momentum)
    for _ in range(5):
        optimizer.zero_grad()
        loss(parameter().dense()).backward()
        optimizer.step()
    result = minimize_spd(loss, S, lr=0.05 / 2, momentum=momentum, max_iter=5)
    assert_close(parameter.matrix.dense(), result.S.dense())


def test_learns_beside_other_parameters() -> None:
    """A metric and a linear map in one model, with one optimizer."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.metric = SPDParameter(torch.eye(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return (y * self.metric().matmul(y)).sum(-1)

    model = Model()
    assert {name for name, _ in model.named_parameters()} == {
        "linear.weight",
        "linear.bias",
        "metric.tangents.0",
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    x = torch.randn(100, 3)
    target = (x @ random_spd(3)).square().sum(-1)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]
    assert (model.metric.matrix.spectrum > 0).all()


@pytest.mark.parametrize("structure", structures())
def test_checkpoint_resumes_exactly(structure: str) -> None:
    S = structures()[structure]
    size = tuple(S.spectrum.shape)

    def make() -> tuple[SPDParameter, torch.optim.Optimizer]:
        parameter = SPDParameter(S)
        return parameter, torch.optim.SGD(parameter.parameters(), lr=0.1, momentum=0.9)

    data = torch.randn(10, *size)
    straight, optimizer = make()
    train(straight, optimizer, data, 6)
    for settle in (False, True):
        first, optimizer = make()
        train(first, optimizer, data, 3)
        if settle:
            first.matrix  # noqa: B018 (follows the last step)
        buffer = io.BytesIO()
        torch.save([first.state_dict(), optimizer.state_dict()], buffer)
        buffer.seek(0)
        second, optimizer = make()
        states = torch.load(buffer, weights_only=True)
        second.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        train(second, optimizer, data, 3)
        assert torch.equal(second.matrix.dense(), straight.matrix.dense())


def test_changes_number_format_with_the_model() -> None:
    parameter = SPDParameter(Kronecker.identity((2, 3), kinds=("full", "identity"))).float()
    assert parameter.matrix.spectrum.dtype == torch.float32
    optimizer = torch.optim.SGD(parameter.parameters(), lr=0.1)
    train(parameter, optimizer, torch.randn(10, 2, 3, dtype=torch.float32), 2)
    assert parameter().dense().dtype == torch.float32


def test_steps_written_past_autograd_are_followed() -> None:
    """Some optimizers write to ``.data``, which changes no version counter."""
    parameter = SPDParameter(torch.eye(2))
    before = parameter.matrix.dense()
    parameter.tangents[0].data.add_(torch.diag(torch.tensor([0.5, -1.0])))
    assert_close(parameter().dense().detach(), torch.diag(torch.tensor([0.5, -1.0]).exp()))
    assert_close(before, torch.eye(2))
    assert not parameter.tangents[0].any()


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="positive definite"):
        SPDParameter(-torch.eye(2))
    parameter = SPDParameter(torch.eye(2, dtype=torch.float32))
    with torch.no_grad():
        parameter.tangents[0].add_(1e4 * torch.eye(2))
    with pytest.raises(FloatingPointError, match="cannot hold"):
        parameter()
