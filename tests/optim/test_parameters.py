"""Parameters of any shape, alone or stacked, in groups, named, frozen, unused or shared."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from eigenstep import Spectral
from eigenstep.optim.batches import join, split
from eigenstep.optim.options import CHOICES

from .layouts import laid_out
from .problems import SHAPES, Problem, equal, final


class TestLayout:
    @settings(deadline=None, derandomize=True, max_examples=150)
    @given(
        shape=st.lists(st.integers(1, 14), max_size=4).map(tuple),
        structure=st.sampled_from(CHOICES["structure"]),
        max_dim=st.integers(1, 16),
        max_ratio=st.none() | st.floats(1, 5),
        extra=st.sampled_from([(), (2,)]),
    )
    def test_any_shape(
        self, shape: tuple[int, ...], structure: str, max_dim: int, max_ratio: float, extra: Any
    ) -> None:
        plan = laid_out(shape, structure=structure, max_dim=max_dim, max_ratio=max_ratio)
        tensor = torch.arange(math.prod((*shape, *extra))).view((*shape, *extra))
        parts = [split(plan, part, tensor) for part in range(len(plan.layouts))]
        first = [part[..., 0] for part in parts] if extra else parts
        assert torch.equal(join(plan, first), tensor[..., 0] if extra else tensor)
        for layout, part in zip(plan.layouts, parts, strict=True):
            assert part.shape == (plan.units, layout.blocks, *layout.sizes, *extra)
            assert not layout.has_basis or max(layout.sizes) <= max_dim
            if len(layout.sizes) == 2:
                longest = math.inf if max_ratio is None else math.ceil(max_ratio * layout.sizes[1])
                assert layout.sizes[0] <= longest
                assert layout.has_basis, "however long a side is, it has bases"
        if structure == "diagonal":
            assert len(plan.layouts) == plan.layouts[0].blocks == 1
        assert plan.describe()

    @pytest.mark.parametrize(
        ("shape", "options", "text"),
        [
            ((), {}, "diag 1"),
            ((9,), {"structure": "full"}, "9"),
            ((9,), {"structure": "full", "max_dim": 8}, "diag 9"),
            ((1, 9), {}, "diag 9"),
            ((4, 6), {}, "6 x 4"),
            ((6, 4), {"structure": "full"}, "24"),
            ((6, 4), {"structure": "diagonal"}, "diag 24"),
            ((12, 4), {"max_ratio": None}, "12 x 4"),
            ((12, 4), {}, "2 blocks of 6 x 4"),
            ((12, 4), {"max_ratio": 1.0}, "3 blocks of 4 x 4"),
            ((13, 4), {}, "7 x 4 and 6 x 4"),
            ((50000, 64), {}, "343 blocks of 128 x 64 and 48 blocks of 127 x 64"),
            ((50000, 64), {"structure": "auto"}, "diag 3200000"),
            (
                (50000, 20000),
                {"structure": "auto", "max_dim": 20000},
                "2 blocks of 16667 x 20000 and 16666 x 20000",
            ),
            ((64, 64), {"max_dim": 32}, "2 times (2 blocks of 32 x 32)"),
            ((2053, 2053), {}, "1027 x 1027 and 1026 x 1027 and 1027 x 1026 and 1026 x 1026"),
            ((6144, 3000), {"max_dim": None, "max_ratio": None}, "6144 x 3000"),
            ((8, 4, 3, 3), {"max_ratio": None}, "36 x 8"),
        ],
        ids=str,
    )
    def test_structures_in_words(
        self, shape: tuple[int, ...], options: dict[str, Any], text: str
    ) -> None:
        defaults = {"structure": "kronecker", "max_dim": 2048}
        assert laid_out(shape, **{**defaults, **options}).describe() == text

    def test_the_optimizer_uses_them(self) -> None:
        w = nn.Parameter(torch.randn(12, 4))
        w.grad = torch.randn(12, 4)
        optimizer = Spectral([w], max_ratio=1.0)
        optimizer.step()
        assert optimizer.state[w]["basis_0"].shape == (1, 3, 4, 4)
        assert optimizer.state[w]["basis_1"].shape == (1, 1, 4, 4)


class TestBatches:
    @pytest.mark.parametrize("options", [{}, {"max_ratio": 1.0}, {"max_dim": 3}], ids=str)
    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-3)], ids=str
    )
    def test_each_parameter_steps_as_if_it_were_alone(
        self, dtype: torch.dtype, tolerance: float, options: dict[str, Any]
    ) -> None:
        """Also those that get gradients only now and then."""
        together = Problem([*SHAPES, (5,)], dtype)
        alone = Problem([*SHAPES, (5,)], dtype)
        optimizer = Spectral(together.parameters, 0.03, **options)
        own = [Spectral([w], 0.03, **options) for w in alone.parameters]
        for step in range(10):
            together.backward()
            alone.backward()
            for index, (w, single) in enumerate(zip(together.parameters, own, strict=True)):
                if (step * 7 + index * 3) % 4 == 0:
                    w.grad = None
                else:
                    single.step()
            optimizer.step()
        for w, twin in zip(together.parameters, alone.parameters, strict=True):
            assert_close(w, twin, rtol=tolerance, atol=tolerance)

    def test_tall_and_wide_share_a_stack_and_are_transposed(self) -> None:
        tall = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
        wide = nn.Parameter(tall.detach().T.clone())
        optimizer = Spectral([tall, wide], 0.03)
        for _ in range(6):
            tall.grad = torch.randn(6, 4, dtype=torch.float64)
            wide.grad = tall.grad.T.clone()
            optimizer.step()
        assert optimizer.state[tall]["scale"].untyped_storage().data_ptr() == (
            optimizer.state[wide]["scale"].untyped_storage().data_ptr()
        )
        assert_close(wide, tall.T, rtol=1e-12, atol=1e-12)

    def test_gradients_need_not_be_contiguous(self) -> None:
        problems = Problem(), Problem()
        for problem, strange in zip(problems, (False, True), strict=True):
            optimizer = Spectral(problem.parameters, 0.03)
            for _ in range(4):
                problem.backward()
                for w in problem.parameters:
                    if strange and w.ndim == 2:
                        w.grad = w.grad.T.contiguous().T
                optimizer.step()
        assert equal(problems[0].snapshot(), problems[1].snapshot())

    def test_number_formats_side_by_side(self) -> None:
        dtypes = [torch.float32, torch.bfloat16, torch.float64]
        problems = [Problem([(6, 4)], dtype) for dtype in dtypes]
        together = Spectral([w for problem in problems for w in problem.parameters], 0.03)
        for _ in range(5):
            for problem in problems:
                problem.backward()
            together.step()
        alone = [
            final(lambda ps: Spectral(ps, 0.03), steps=5, shapes=[(6, 4)], dtype=dtype)
            for dtype in dtypes
        ]
        assert all(
            equal(problem.snapshot(), own) for problem, own in zip(problems, alone, strict=True)
        )


class TestSomeTimesUnused:
    def test_no_gradient_at_all(self) -> None:
        problem = Problem()
        optimizer = Spectral(problem.parameters)
        before = problem.snapshot()
        optimizer.step()
        assert equal(problem.snapshot(), before)
        assert not optimizer.state

    def test_frozen(self) -> None:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        model[0].requires_grad_(False)
        before = model[0].weight.detach().clone()
        optimizer = Spectral(model.parameters(), 0.1)
        for step in range(6):
            if step == 3:  # thawed half-way
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
            assert torch.equal(model[0].weight, before) == (step < 3)

    def test_shared(self) -> None:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        model = nn.Sequential(first, nn.Tanh(), second)
        optimizer = Spectral(model.parameters(), 0.05)
        assert len(optimizer.param_groups[0]["params"]) == 3
        x = torch.randn(16, 4)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            losses.append(model(x).square().mean())
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < losses[0] / 2
        assert second.weight is first.weight


class TestGroups:
    def test_names_are_used_or_places(self) -> None:
        named = Spectral(nn.Linear(4, 6).named_parameters())
        assert [item.name for item in named.summary()] == ["weight", "bias"]
        groups = [{"params": [nn.Parameter(torch.ones(size))]} for size in (2, 3)]
        names = [item.name for item in Spectral(groups).summary()]
        assert names == ["group 0 #0", "group 1 #0"]

    def test_options_per_group_are_those_of_two_optimizers(self) -> None:
        options = [
            {"lr": 0.03, "structure": "kronecker", "interval": 1},
            {"lr": 0.01, "root": 4.0, "structure": "diagonal", "maximize": True},
        ]
        problems = [Problem(seed=seed) for seed in range(2)]
        together = Spectral(
            [{"params": p.parameters, **o} for p, o in zip(problems, options, strict=True)]
        )
        for _ in range(5):
            for problem in problems:
                problem.backward()
            together.step()
        for seed, (problem, own) in enumerate(zip(problems, options, strict=True)):
            assert equal(
                problem.snapshot(),
                final(lambda ps, own=own: Spectral(ps, **own), steps=5, seed=seed),
            )

    def test_add_param_group(self) -> None:
        first, second = Problem([(6, 4)]), Problem([(6, 4), (3,)], seed=1)
        optimizer = Spectral(first.parameters, 0.03)
        first.descend(optimizer, 3)
        optimizer.add_param_group({"params": second.parameters, "lr": 0.01})
        for _ in range(4):
            first.backward()
            second.backward()
            optimizer.step()
        assert equal(
            first.snapshot(), final(lambda ps: Spectral(ps, 0.03), steps=7, shapes=[(6, 4)])
        )
        alone = final(lambda ps: Spectral(ps, 0.01), steps=4, shapes=[(6, 4), (3,)], seed=1)
        assert equal(second.snapshot(), alone)

    def test_interval_schedule(self) -> None:
        w = nn.Parameter(torch.randn(6, 4))
        optimizer = Spectral([w], interval=[(0, 1), (3, 2), (8, 4)])
        turns = []
        for _ in range(16):
            w.grad = torch.randn(6, 4)
            optimizer.step()
            turns.append(int(optimizer.state[w]["turns"]))
        assert turns == [1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7]

    @pytest.mark.parametrize(("interval", "count"), [(3, 153), ([(0, 3)], 70)], ids=str)
    def test_gaps_between_turns_grow(self, interval: Any, count: int) -> None:
        """From one step by one in 100, to the interval; but schedules are kept to the letter."""
        w = nn.Parameter(torch.randn(3, 2))
        optimizer = Spectral([w], interval=interval)
        for _ in range(209):
            w.grad = torch.randn(3, 2)
            optimizer.step()
        assert int(optimizer.state[w]["turns"]) == count
