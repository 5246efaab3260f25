"""Gradients that swing across a valley are trusted less than noisy ones: longer memory, and no
weight of their own.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eigenstep import Spectral
from eigenstep.optim import matrix


def moved(steps: int = 100) -> tuple[float, float]:
    """Step along a valley whose walls send gradients to and fro; return the last step across, and
    the way along.
    """
    torch.manual_seed(0)
    across, along = (
        torch.nn.functional.normalize(torch.randn(12, 8).flatten(), dim=0).view(12, 8)
        for _ in range(2)
    )
    weight = nn.Parameter(torch.zeros(12, 8))
    optimizer = Spectral([weight], lr=1.0, weight_decay=0.0)
    before = weight.detach().clone()
    for at in range(steps):
        weight.grad = across * (-1.0) ** at + 0.03 * along
        before.copy_(weight.detach())
        optimizer.step()
    assert optimizer.state[weight]["agreement"].item() < -0.6
    last = weight.detach() - before
    return (last * across).sum().abs().item(), -(weight.detach() * along).sum().item()


def test_steps_across_a_valley_are_damped_and_those_along_it_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swing, way = moved()
    monkeypatch.setattr(matrix, "NO_TRUST", 2.0)
    restless, slow = moved()
    assert swing < 0.25 * restless
    assert way > 0.9 * slow


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_noise_is_no_swing(size: float) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(24, 16))
    optimizer = Spectral([weight], lr=1e-3)
    for _ in range(100):
        weight.grad = size * torch.randn(24, 16)
        optimizer.step()
        assert optimizer.state[weight]["agreement"].abs().item() < 0.1


def test_zero_gradients_say_nothing() -> None:
    weight = nn.Parameter(torch.zeros(4, 3))
    optimizer = Spectral([weight], lr=1e-3)
    for at in range(60):
        weight.grad = torch.full((4, 3), (-1.0) ** at)
        optimizer.step()
    before = optimizer.state[weight]["agreement"].clone()
    weight.grad = torch.zeros(4, 3)
    optimizer.step()
    assert before.item() < -0.5
    assert optimizer.state[weight]["agreement"].equal(before)


@pytest.mark.parametrize(
    "options", [{"grafting": False}, {"betas": (0.0, 0.95)}, {"root": 1.0}], ids=str
)
def test_only_steps_sized_by_descent_with_momentum_look(options: dict[str, object]) -> None:
    weight = nn.Parameter(torch.zeros(4, 3))
    optimizer = Spectral([weight], lr=1e-3, **options)  # type: ignore[arg-type]
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    assert "agreement" not in optimizer.state[weight]
