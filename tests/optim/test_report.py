"""What the optimizer tells about itself: summaries and spectra."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from eigenstep import Kronecker, Spectral


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))


def train(model: nn.Module, optimizer: Spectral, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(32, 12)
        (model(x) - x[:, :4].sin()).square().mean().backward()
        optimizer.step()


class TestSummary:
    def test_is_a_table(self) -> None:
        model = network()
        optimizer = Spectral(model.named_parameters())
        train(model, optimizer, 1)
        lines = str(optimizer.summary()).splitlines()
        assert lines[0].split() == ["parameter", "shape", "structure", "state", "KiB", "MFLOP/step"]
        assert lines[2].startswith("0.weight   16x12  16 x 12")
        assert lines[-1].startswith("total      276")
        assert len({len(line) for line in lines}) == 1

    def test_is_a_list(self) -> None:
        optimizer = Spectral(network().named_parameters())
        summary = optimizer.summary()
        assert len(summary) == 4
        assert summary[0].shape == (16, 12)

    def test_tells_memory_before_the_first_step(self) -> None:
        model = network()
        optimizer = Spectral(model.named_parameters(), max_dim=9)
        before = optimizer.summary()
        train(model, optimizer, 1)
        assert before == optimizer.summary()
        assert before[0].state_bytes > 0

    @pytest.mark.parametrize("shape", [(), (9,), (6, 4), (3, 4, 2)], ids=str)
    def test_bytes_are_those_of_the_state(self, shape: tuple[int, ...]) -> None:
        w = nn.Parameter(torch.randn(shape))
        w.grad = torch.randn(shape)
        optimizer = Spectral([w])
        optimizer.step()
        state = optimizer.state_dict()["state"][0]
        assert optimizer.summary()[0].state_bytes == sum(
            t.numel() * t.element_size() for t in state.values()
        )

    @pytest.mark.parametrize(
        "shape", [(40,), (64, 64), (96, 48), (128, 32), (32, 8, 3, 3)], ids=str
    )
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"interval": [(0, 3)]},
            {"maps": "truncated"},
            {"residual": True},
            {"maps": "truncated", "reorthonormalize": False},
            {"turn_first": True},
            {"structure": "axes"},
            {"structure": "full", "max_dim": 64},
            {"betas": (0.0, 0.9)},
            {"grafting": "adam"},
            {"max_dim": 32},
            {"eigenvalues": "kronecker"},
            {"state_dtype": torch.bfloat16},
        ],
        ids=str,
    )
    def test_work_is_what_torch_counts(
        self, shape: tuple[int, ...], options: dict[str, Any]
    ) -> None:
        w = nn.Parameter(torch.randn(shape))
        w.grad = torch.randn(shape)
        optimizer = Spectral([w], **{"interval": [(0, 2)], **options})
        with FlopCounterMode(display=False) as counter:
            for _ in range(12):
                optimizer.step()
        counted = counter.get_total_flops() / 12
        assert abs(optimizer.summary()[0].flops - counted) <= 0.02 * counted


class TestSpectra:
    def test_are_those_of_the_matrix(self) -> None:
        model = network()
        optimizer = Spectral(model.named_parameters(), max_ratio=None)
        train(model, optimizer, 20)
        found = optimizer.spectra()
        assert list(found) == ["0.weight", "2.weight"]
        S = Kronecker.identity((16, 12))
        scale = found["0.weight"]["scale"].item()
        for axis, size in enumerate(S.sizes):
            eigs = found["0.weight"][f"eigenvalues_{axis}"][0]
            assert eigs.shape == (size,)
            assert (eigs.diff() <= 0).all()
            assert_close(eigs.log().mean(), torch.tensor(0.0), rtol=0, atol=1e-4)
            assert_close(found["0.weight"][f"condition_{axis}"].item(), (eigs[0] / eigs[-1]).item())
            assert found["0.weight"][f"speed_{axis}"].item() > 0
        mean_square = model[0].weight.grad.square().mean().item()
        assert mean_square / 100 < scale < mean_square * 100

    def test_before_the_first_step(self) -> None:
        assert Spectral(network().parameters()).spectra() == {}

    def test_speed_falls_where_the_curvature_stands_still(self) -> None:
        w = nn.Parameter(torch.zeros(8, 8))
        optimizer, root = Spectral([w], interval=1), torch.randn(8, 8)
        speeds = []
        for _ in range(300):
            w.grad = root @ torch.randn(8, 8)
            optimizer.step()
            speeds.append(optimizer.spectra()["group 0 #0"]["speed_0"].item())
        assert sum(speeds[-50:]) / 50 < sum(speeds[:20]) / 20 / 2
