"""`Spectral.metrics`: the numbers are right, are plain, and are read back once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigenstep import Spectral


def trained(**options: Any) -> tuple[nn.Module, Spectral, list[Tensor]]:
    """Return a network, its optimizer, and its weights before the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    optimizer = Spectral(model.named_parameters(), **{"lr": 0.1, "weight_decay": 0.0, **options})
    optimizer.metrics()
    before: list[Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
    return model, optimizer, before


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=str)
def test_norms_are_those_of_the_last_step(lr: float | Tensor) -> None:
    model, optimizer, before = trained(lr=lr)
    numbers = optimizer.metrics()
    assert all(type(value) in (float, int) for value in numbers.values())
    for (name, param), old in zip(model.named_parameters(), before, strict=True):
        assert param.grad is not None
        sizes = {"weight": param, "gradient": param.grad, "update": param - old}
        for kind, tensor in sizes.items():
            rel = 1e-3 if kind == "update" else 1e-5
            assert numbers[f"{kind}_norm/{name}"] == pytest.approx(tensor.norm().item(), rel=rel)
    assert (numbers["steps"], numbers["skipped_steps"]) == (3, 0)


def test_condition_and_speed_are_those_of_the_spectra() -> None:
    _, optimizer, _ = trained()
    numbers = optimizer.metrics()
    for name, spectrum in optimizer.spectra().items():
        product = (spectrum["condition_0"] * spectrum["condition_1"]).max().item()
        assert numbers[f"condition/{name}"] == pytest.approx(product, rel=1e-5)
        assert numbers[f"condition/{name}"] > 1
        fastest = max(spectrum[f"speed_{axis}"].mean().item() for axis in (0, 1))
        assert numbers[f"rotation_speed/{name}"] == pytest.approx(fastest) != 0
    assert "condition/0.bias" not in numbers


def test_skipped_steps_are_counted() -> None:
    model, optimizer, _ = trained(nonfinite="skip")
    for param in model.parameters():
        param.grad = torch.full_like(param, torch.nan)
    optimizer.step()
    assert (optimizer.metrics()["skipped_steps"], optimizer.metrics()["steps"]) == (1, 3)


def test_numbers_are_read_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer, _ = trained()
    reads = []
    read = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: reads.append(tensor) or read(tensor))
    for name in ("item", "__float__", "__bool__", "__int__"):
        monkeypatch.setattr(Tensor, name, lambda _: pytest.fail("one number was read back"))
    optimizer.metrics()
    assert len(reads) == 1


def test_names_before_the_first_step_are_good_for_every_logger() -> None:
    """MLflow takes no ``#``, for example."""
    optimizer = Spectral([nn.Parameter(torch.full((2, 2), 3.0)), nn.Parameter(torch.ones(0))])
    assert optimizer.metrics() == {"weight_norm/group 0.0": 6.0, "steps": 0, "skipped_steps": 0}


def test_nothing_is_measured_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "eigenstep.optim.spectral.note_sizes", lambda *_: pytest.fail("a norm was computed")
    )
    param = nn.Parameter(torch.ones(2, 2))
    param.grad = torch.ones(2, 2)
    Spectral([param]).step()
