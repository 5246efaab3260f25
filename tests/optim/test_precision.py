"""Half precision: bases stay orthogonal, small steps are not lost, and training is as good as in
float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigenstep import Spectral
from eigenstep.optim import kernel
from eigenstep.optim.stacks import add_stochastically
from eigenstep.optim.state import Rates, Rule, new_state
from eigenstep_lab.orthogonality import orthogonality_defect


def defects(optimizer: Spectral) -> Tensor:
    """Return the largest defect of each parameter's bases."""
    return torch.stack(
        [
            orthogonality_defect(t).amax()
            for state in optimizer.state.values()
            for n, t in state.items()
            if "basis" in n
        ]
    )


class TestBases:
    @pytest.mark.slow
    def test_defect_over_10_000_steps(self) -> None:
        """Straight on the kernel, half of it with new eigenvectors all the time, so that the bases
        keep turning.
        """
        rule, shape = Rule(), (2, 1, 16, 12)
        options = {
            "dtype": torch.float32,
            "basis_dtype": torch.bfloat16,
            "device": torch.device("cpu"),
        }
        state = new_state(shape, (True, True), rule, momentum=True, residual=False, **options)
        rates = Rates(*map(torch.tensor, (0.9, 0.95, 0.1, 1e-10)))
        roots = torch.randn(2, 1, 16, 16)
        for step in range(10_000):
            if step % 100 == 0:
                roots[1] = torch.randn(16, 16)
            kernel.step(roots @ torch.randn(shape), None, state, rule, rates, turn=True)
            if step % 100 == 99:
                for axis in (0, 1):
                    assert (orthogonality_defect(state[f"basis_{axis}"]) <= 1e-2).all(), (
                        f"after {step + 1} steps"
                    )

    @pytest.mark.parametrize(
        ("options", "most"),
        [
            ({}, 1e-2),
            ({"basis_dtype": torch.bfloat16, "residual": True}, 1e-2),
            ({"basis_dtype": torch.bfloat16, "maps": "truncated"}, 1e-2),
            ({"maps": "exact"}, 1e-6),
            ({"maps": "truncated"}, 1e-4),
        ],
        ids=str,
    )
    def test_defect_over_300_steps(self, options: dict[str, Any], most: float) -> None:
        w = nn.Parameter(torch.randn(16, 12))
        optimizer = Spectral([w], interval=1, **options)
        for _ in range(300):
            w.grad = torch.randn(16, 12)
            optimizer.step()
        assert (defects(optimizer) <= most).all()

    @pytest.mark.parametrize("basis_dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("shape", [(2, 3), (4, 4), (16, 12), (40, 20)], ids=str)
    def test_lengths_between_mendings(
        self, shape: tuple[int, int], basis_dtype: torch.dtype
    ) -> None:
        """At every second turn bases are not mended: strong gradients of ever new directions do not
        stretch them.
        """
        w = nn.Parameter(torch.randn(shape))
        optimizer = Spectral([w], interval=[(0, 1)], basis_dtype=basis_dtype, basis_lr=1.0)
        for step in range(400):
            w.grad = 1e-3 * torch.randn(shape) + 10.0 ** (step % 7 - 3) * torch.outer(
                *map(torch.randn, shape)
            )
            optimizer.step()
            lengths = [
                torch.linalg.svdvals(t.float())
                for n, t in optimizer.state[w].items()
                if "basis" in n
            ]
            assert all(((x > 0.96) & (x < 1.04)).all() for x in lengths), f"after {step + 1} steps"

    def test_mended_by_their_own_turns(self) -> None:
        """Not by those of the group: this parameter has a gradient only where others are not
        mended.
        """
        rare, other = (nn.Parameter(torch.randn(16, 12)) for _ in range(2))
        optimizer = Spectral([rare, other], interval=[(0, 1)])
        for step in range(400):
            rare.grad, other.grad = (torch.randn(16, 12) for _ in range(2))
            if step % 2:
                rare.grad = None
            optimizer.step()
        assert (defects(optimizer) <= 1e-2).all()

    @pytest.mark.parametrize("steps", [3, 4])
    def test_mending_does_not_depend_on_company_or_checkpoints(self, steps: int) -> None:
        def train(foreach: bool, reload: bool) -> list[Tensor]:
            torch.manual_seed(0)
            weights = [nn.Parameter(torch.ones(6, 4)) for _ in range(3)]
            optimizer = Spectral(weights, interval=[(0, 1)], foreach=foreach)
            for step in range(9):
                for at, w in enumerate(weights):
                    gradient = torch.randn(6, 4)
                    w.grad = gradient if step >= at else None
                if reload and step == steps:
                    saved = optimizer.state_dict()
                    optimizer = Spectral(weights, interval=[(0, 1)], foreach=foreach)
                    optimizer.load_state_dict(saved)
                optimizer.step()
            return [w.detach() for w in weights]

        whole = train(True, False)
        assert all(map(torch.equal, whole, train(True, True)))
        for one, other in zip(whole, train(False, True), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

    def test_without_mending_bases_drift(self) -> None:
        """So that the test above means something."""
        w = nn.Parameter(torch.randn(16, 12).bfloat16())
        optimizer = Spectral(
            [w], interval=1, basis_dtype=torch.bfloat16, maps="truncated", reorthonormalize=False
        )
        for _ in range(300):
            w.grad = torch.randn(16, 12).bfloat16()
            optimizer.step()
        assert (defects(optimizer) > 2e-2).all()


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
            add_stochastically(w, torch.full((1 << 20,), addend))
            low, high = w.double().amin().item(), w.double().amax().item()
            exact = base + addend
            assert low <= exact <= high
            assert torch.unique(w).numel() == 2
            assert abs(w.double().mean().item() - exact) < 5e-3 * (high - low)

    def test_exact_sums_are_kept(self) -> None:
        w = torch.tensor([0.0, 1.0, -2.0], dtype=torch.bfloat16)
        add_stochastically(w, torch.tensor([0.5, 1.0, 1.0]))
        assert torch.equal(w, torch.tensor([0.5, 2.0, -1.0], dtype=torch.bfloat16))

    def test_other_number_formats_of_the_addend(self) -> None:
        w = torch.ones(4, dtype=torch.bfloat16)
        add_stochastically(w, torch.ones(4, dtype=torch.float64))
        assert torch.equal(w, torch.full((4,), 2.0, dtype=torch.bfloat16))

    def test_small_steps_are_not_lost(self) -> None:
        """A step of a thousandth of a weight is below bfloat16's spacing: rounded to nearest, it
        never happens.
        """
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
        [{}, {"basis_dtype": torch.bfloat16}, {"state_dtype": torch.bfloat16}],
        ids=["weights", "and basis", "and state"],
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
