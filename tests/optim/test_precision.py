"""Half precision: bases stay orthogonal, small steps happen, training is as in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigenstep import Spectral, Turning
from eigenstep.optim import matrix
from eigenstep.optim.apply import add_stochastically_
from eigenstep.optim.matrix import Matrices
from eigenstep_lab.orthogonality import orthogonality_defect


def bases(optimizer: Spectral) -> list[Tensor]:
    """Return all bases that an optimizer has."""
    tensors = []
    for state in optimizer.state.values():
        tensors += [tensor for name, tensor in state.items() if name.startswith("basis")]
    return tensors


def largest_defect(optimizer: Spectral) -> float:
    return max(orthogonality_defect(basis).amax().item() for basis in bases(optimizer))


def stepped(optimizer: Spectral, w: nn.Parameter, steps: int = 300) -> None:
    for _ in range(steps):
        w.grad = torch.randn(w.shape).to(w.dtype)
        optimizer.step()


class TestBases:
    @pytest.mark.slow
    def test_defect_over_10_000_steps(self) -> None:
        """Straight on the arithmetic, half of it with new eigenvectors all the time, so that the
        bases keep turning.
        """
        shape = (2, 1, 16, 12)
        turning = Turning(dtype=torch.bfloat16)
        optimizer = Spectral([nn.Parameter(torch.ones(1))], turning=turning)
        options = optimizer.options_of(optimizer.param_groups[0])
        options = replace(options, state_dtype=torch.float32)
        state = matrix.new_state(shape, options, has_basis=True, device="cpu")
        rates = Matrices.rates_of(options, state.scale)
        roots = torch.randn(2, 1, 16, 16)
        for step in range(10_000):
            if step % 100 == 0:
                roots[1] = torch.randn(16, 16)
            gradient = roots @ torch.randn(shape)
            matrix.step(Matrices, state, options, rates, gradient, None, True, True)
            if step % 100 == 99:
                for side in state.sides:
                    assert side.basis is not None
                    defect = orthogonality_defect(side.basis)
                    assert (defect <= 1e-2).all(), f"after {step + 1} steps"

    @pytest.mark.parametrize(
        ("turning", "most"),
        [
            (Turning(), 1e-2),
            (Turning(map="truncated_cayley", dtype=torch.bfloat16), 1e-2),
            (Turning(map="cayley"), 1e-6),
            (Turning(map="truncated_cayley"), 1e-4),
        ],
        ids=str,
    )
    def test_defect_over_300_steps(self, turning: Turning, most: float) -> None:
        w = nn.Parameter(torch.randn(16, 12))
        optimizer = Spectral([w], interval=1, turning=turning)
        stepped(optimizer, w)
        assert largest_defect(optimizer) <= most

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("shape", [(2, 3), (16, 12)], ids=str)
    def test_lengths_between_mendings(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        """At every second turn bases are not mended: strong gradients of ever new directions do not
        stretch them.
        """
        w = nn.Parameter(torch.randn(shape))
        turning = Turning(rate=1.0, dtype=dtype)
        optimizer = Spectral([w], interval=[(0, 1)], turning=turning)
        for step in range(400):
            strong = 10.0 ** (step % 7 - 3) * torch.outer(*map(torch.randn, shape))
            w.grad = 1e-3 * torch.randn(shape) + strong
            optimizer.step()
            lengths = torch.cat(
                [torch.linalg.svdvals(x.float()).flatten() for x in bases(optimizer)]
            )
            assert ((lengths > 0.96) & (lengths < 1.04)).all(), f"after {step + 1} steps"

    def test_mended_by_their_own_turns(self) -> None:
        """Not by those of the group: this parameter has a gradient only where others are not
        mended.
        """
        rare = nn.Parameter(torch.randn(16, 12))
        other = nn.Parameter(torch.randn(16, 12))
        optimizer = Spectral([rare, other], interval=[(0, 1)])
        for step in range(400):
            rare.grad = None if step % 2 else torch.randn(16, 12)
            other.grad = torch.randn(16, 12)
            optimizer.step()
        assert largest_defect(optimizer) <= 1e-2

    @pytest.mark.parametrize("steps", [3, 4])
    def test_mending_does_not_depend_on_checkpoints(self, steps: int) -> None:
        def train(reload: bool) -> list[Tensor]:
            torch.manual_seed(0)
            weights = [nn.Parameter(torch.ones(6, 4)) for _ in range(3)]
            optimizer = Spectral(weights, interval=[(0, 1)])
            for step in range(9):
                for at, w in enumerate(weights):
                    gradient = torch.randn(6, 4)
                    w.grad = gradient if step >= at else None
                if reload and step == steps:
                    saved = optimizer.state_dict()
                    optimizer = Spectral(weights, interval=[(0, 1)])
                    optimizer.load_state_dict(saved)
                optimizer.step()
            return [w.detach() for w in weights]

        assert all(map(torch.equal, train(False), train(True)))

    def test_without_mending_bases_drift(self) -> None:
        """So that the tests above mean something."""
        w = nn.Parameter(torch.randn(16, 12).bfloat16())
        turning = Turning(map="truncated_cayley", mend=False, dtype=torch.bfloat16)
        optimizer = Spectral([w], interval=1, turning=turning)
        stepped(optimizer, w)
        assert min(orthogonality_defect(basis).amin() for basis in bases(optimizer)) > 2e-2


class TestStochasticRounding:
    def test_is_unbiased_and_picks_a_neighbor(self) -> None:
        """2**20 draws: the standard error of the mean is a thousandth of the spacing of numbers."""
        for start, addend in [
            (1.0, 0.3 / 128),
            (-1.0, 0.3 / 128),
            (3.0, -1e-3),
            (100.0, 0.1),
            (1e-3, 1e-7),
        ]:
            w = torch.full((1 << 20,), start, dtype=torch.bfloat16)
            base = w[0].double().item()
            add_stochastically_(w, torch.full((1 << 20,), addend))
            low, high = w.double().amin().item(), w.double().amax().item()
            exact = base + addend
            assert low <= exact <= high
            assert torch.unique(w).numel() == 2
            assert abs(w.double().mean().item() - exact) < 5e-3 * (high - low)

    def test_exact_sums_are_kept(self) -> None:
        w = torch.tensor([0.0, 1.0, -2.0], dtype=torch.bfloat16)
        add_stochastically_(w, torch.tensor([0.5, 1.0, 1.0], dtype=torch.float64))
        assert torch.equal(w, torch.tensor([0.5, 2.0, -1.0], dtype=torch.bfloat16))

    def test_small_steps_are_not_lost(self) -> None:
        """A step of a thousandth of a weight, rounded to nearest, never happens."""
        moved = {}
        for stochastic in (False, True):
            w = nn.Parameter(torch.full((4096,), 4.0, dtype=torch.bfloat16))
            optimizer = Spectral([w], lr=4e-3, weight_decay=0.0, stochastic_rounding=stochastic)
            for _ in range(50):
                w.grad = torch.ones_like(w)
                optimizer.step()
            moved[stochastic] = 4.0 - w.detach().double().mean().item()
        assert moved[False] == 0.0
        assert moved[True] == pytest.approx(50 * 4e-3, rel=0.05)

    def test_weight_decay_is_not_lost_either(self) -> None:
        w = nn.Parameter(torch.full((4096,), 4.0, dtype=torch.bfloat16))
        optimizer = Spectral([w], lr=1e-3, weight_decay=1.0, stochastic_rounding=True)
        for _ in range(50):
            w.grad = torch.zeros_like(w)
            optimizer.step()
        assert w.detach().double().mean().item() == pytest.approx(4.0 * 0.999**50, rel=1e-3)


class TestTraining:
    @pytest.mark.parametrize(
        "options",
        [{"turning": Turning(dtype=torch.bfloat16)}, {"state_dtype": torch.bfloat16}],
        ids=["basis", "state"],
    )
    def test_bfloat16_trains_like_float32(self, options: dict[str, Any]) -> None:
        def loss_after(dtype: torch.dtype, **settings: Any) -> float:
            torch.manual_seed(1)
            mixing = torch.randn(12, 12) / 12**0.5
            x = torch.randn(256, 12) @ mixing
            y = torch.tanh(x @ torch.randn(12, 8) / 3)
            w = nn.Parameter((0.1 * torch.randn(12, 8)).to(dtype))
            optimizer = Spectral([w], lr=0.02, weight_decay=0.0, **settings)
            for step in range(400):
                optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 400)
                optimizer.zero_grad()
                loss = (torch.tanh(x @ w.float()) - y).square().mean() + 0.1
                loss.backward()
                optimizer.step()
            return loss.item()

        half = loss_after(torch.bfloat16, stochastic_rounding=True, **options)
        assert half <= 1.01 * loss_after(torch.float32)
