"""What the optimizer tells about itself: summaries, spectra and its options."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from eigenstep import Kronecker, Spectral, Turning
from eigenstep.optim import Fused


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

    def test_tells_memory_before_the_first_step(self) -> None:
        model = network()
        optimizer = Spectral(model.named_parameters(), max_dim=9)
        before = optimizer.summary()
        train(model, optimizer, 1)
        assert before == optimizer.summary()
        assert before[0].state_bytes > 0

    @pytest.mark.parametrize("shape", [(), (9,), (3, 4, 2)], ids=str)
    def test_bytes_are_those_of_the_state(self, shape: tuple[int, ...]) -> None:
        w = nn.Parameter(torch.randn(shape))
        w.grad = torch.randn(shape)
        optimizer = Spectral([w])
        optimizer.step()
        state = optimizer.state_dict()["state"][0]
        size = sum(t.numel() * t.element_size() for t in state.values())
        assert optimizer.summary()[0].state_bytes == size

    @pytest.mark.parametrize("shape", [(40,), (96, 48), (128, 32), (32, 8, 3, 3)], ids=str)
    @pytest.mark.parametrize(
        "options",
        [
            {"interval": [(0, 2)]},
            {"interval": [(0, 3)], "turning": Turning(map="truncated_cayley")},
            {"interval": [(0, 2)], "turning": Turning(map="truncated_cayley", mend=False)},
            {"interval": [(0, 2)], "structure": "full", "max_dim": 64},
            {"interval": [(0, 2)], "betas": (0.0, 0.9), "max_dim": 32},
            {"interval": [(0, 2)], "eigenvalues": "kronecker"},
        ],
        ids=str,
    )
    def test_work_is_what_torch_counts(
        self, shape: tuple[int, ...], options: dict[str, Any]
    ) -> None:
        w = nn.Parameter(torch.randn(shape))
        w.grad = torch.randn(shape)
        optimizer = Spectral([w], **options)
        with FlopCounterMode(display=False) as counter:
            for _ in range(12):
                optimizer.step()
        counted = counter.get_total_flops() / 12
        assert abs(optimizer.summary()[0].flops - counted) <= 0.02 * counted


class TestRepr:
    def test_shows_what_differs_from_the_defaults(self) -> None:
        weights = [nn.Parameter(torch.ones(4, 3)) for _ in range(3)]
        groups: list[dict[str, Any]] = [
            {"params": weights[:1], "name": "embedding", "structure": "diagonal"},
            {"params": weights[1:2], "lr": 0.2, "fused": Fused(heads=2)},
            {"params": weights[2:]},
        ]
        optimizer = Spectral(groups, 0.1, nesterov=0.0, turning=Turning(rate=0.2, map="cayley"))
        expected = """
Spectral(lr=0.1, nesterov=0.0, turning=Turning(map='cayley', rate=0.2))
  group 0 'embedding': 1 parameters, 12 weights, structure='diagonal'
  group 1: 1 parameters, 12 weights, lr=0.2, fused=Fused(heads=2)
  group 2: 1 parameters, 12 weights
"""
        assert repr(optimizer) == expected.strip()

    @pytest.mark.parametrize(
        "make",
        [Spectral, Spectral.fast, Spectral.paper, partial(Spectral.posterior, ess=9, batch_size=3)],
    )
    def test_is_short(self, make: Any) -> None:
        weights = [nn.Parameter(torch.ones(4, 3)) for _ in range(3)]
        optimizer = make([{"params": [w]} for w in weights])
        for w in weights:
            w.grad = torch.ones(4, 3)
        optimizer.step()
        for twin in (optimizer, copy.deepcopy(optimizer)):
            lines = repr(twin).splitlines()
            assert len(lines) == 4
            assert max(map(len, lines)) <= 100
            assert "grafting" not in repr(twin)


class TestSpectra:
    def test_are_those_of_the_matrix(self) -> None:
        model = network()
        optimizer = Spectral(model.named_parameters(), max_ratio=None)
        assert optimizer.spectra() == {}
        train(model, optimizer, 20)
        spectra = optimizer.spectra()
        assert list(spectra) == ["0.weight", "2.weight"]
        S = Kronecker.identity((16, 12))
        scale = spectra["0.weight"]["scale"].item()
        for axis, size in enumerate(S.sizes):
            eigs = spectra["0.weight"][f"eigenvalues_{axis}"][0]
            assert eigs.shape == (size,)
            assert (eigs.diff() <= 0).all()
            assert_close(eigs.log().mean(), torch.tensor(0.0), rtol=0, atol=1e-4)
            assert_close(
                spectra["0.weight"][f"condition_{axis}"].item(), (eigs[0] / eigs[-1]).item()
            )
            assert spectra["0.weight"][f"speed_{axis}"].item() > 0
        mean_square = model[0].weight.grad.square().mean().item()
        assert mean_square / 100 < scale < mean_square * 100

    def test_speed_falls_where_the_curvature_stands_still(self) -> None:
        w = nn.Parameter(torch.zeros(8, 8))
        optimizer = Spectral([w], interval=1)
        root = torch.randn(8, 8)
        speeds = []
        for _ in range(300):
            w.grad = root @ torch.randn(8, 8)
            optimizer.step()
            speeds.append(optimizer.spectra()["group 0 #0"]["speed_0"].item())
        assert sum(speeds[-50:]) / 50 < sum(speeds[:20]) / 20 / 2
