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
from eigenstep.optim.layout import STRUCTURES, plan

from .problems import Problem, equal, final

DEFAULT: dict[str, Any] = {"structure": "kronecker", "max_dim": 2048, "max_ratio": 2.0}


class TestLayout:
    @settings(deadline=None, derandomize=True, max_examples=300)
    @given(
        shape=st.lists(st.integers(1, 14), max_size=4).map(tuple),
        structure=st.sampled_from(STRUCTURES),
        max_dim=st.integers(1, 16),
        max_ratio=st.none() | st.floats(1, 5),
        extra=st.sampled_from([(), (2,)]),
    )
    def test_any_shape(
        self, shape: tuple[int, ...], structure: str, max_dim: int, max_ratio: float, extra: Any
    ) -> None:
        whole = plan(shape, structure=structure, max_dim=max_dim, max_ratio=max_ratio)
        tensor = torch.arange(math.prod((*shape, *extra))).view((*shape, *extra))
        stacks = [whole.split(tensor, at) for at in range(len(whole.layouts))]
        for index in range(extra[0] if extra else 1):
            one = [stack[..., index] for stack in stacks] if extra else stacks
            assert torch.equal(whole.join(one), tensor[..., index] if extra else tensor)
        for layout, stack in zip(whole.layouts, stacks, strict=True):
            assert stack.shape == (whole.units, layout.blocks, *layout.sizes, *extra)
            assert all(
                n <= max_dim for n, full in zip(layout.sizes, layout.full, strict=True) if full
            )
            if len(layout.sizes) == 2:
                assert max_ratio is None or layout.sizes[0] <= math.ceil(
                    max_ratio * layout.sizes[1]
                )
                assert all(layout.full), "however long a side is, it has bases"
        if structure == "diagonal":
            assert len(whole.layouts) == whole.layouts[0].blocks == 1
        assert whole.describe()

    @pytest.mark.parametrize(
        ("shape", "options", "text"),
        [
            ((), {}, "diag 1"),
            ((9,), {}, "diag 9"),
            ((9,), {"structure": "full"}, "9"),
            ((9,), {"structure": "full", "max_dim": 8}, "diag 9"),
            ((1, 9), {}, "diag 9"),
            ((6, 4), {}, "6 x 4"),
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
            ((70, 50), {"max_dim": None, "structure": "full"}, "3500"),
            ((8, 4, 3, 3), {"max_ratio": None}, "36 x 8"),
            ((8, 4, 3, 3), {"structure": "axes"}, "8 x 4 x 3 x 3"),
            ((8, 4, 1, 3), {"structure": "axes", "max_dim": 4}, "diag 8 x 4 x diag 1 x 3"),
        ],
        ids=str,
    )
    def test_structures_in_words(
        self, shape: tuple[int, ...], options: dict[str, Any], text: str
    ) -> None:
        assert plan(shape, **{**DEFAULT, **options}).describe() == text

    def test_the_optimizer_uses_them(self) -> None:
        w = nn.Parameter(torch.randn(12, 4))
        w.grad = torch.randn(12, 4)
        optimizer = Spectral([w], max_ratio=1.0)
        optimizer.step()
        assert optimizer.state[w]["basis_0"].shape == (1, 3, 4, 4)
        assert optimizer.state[w]["basis_1"].shape == (1, 1, 4, 4)


class TestStacking:
    @pytest.mark.parametrize(
        "options", [{}, {"max_ratio": 1.0}, {"max_dim": 3}, {"structure": "axes"}], ids=str
    )
    def test_batched_is_looped(self, options: dict[str, Any]) -> None:
        def run(dtype: torch.dtype, foreach: bool) -> list[torch.Tensor]:
            return final(lambda ps: Spectral(ps, 0.03, foreach=foreach, **options), dtype=dtype)

        for together, alone in zip(
            run(torch.float64, True), run(torch.float64, False), strict=True
        ):
            assert_close(together, alone, rtol=1e-10, atol=1e-10)
        for together, alone in zip(
            run(torch.float32, True), run(torch.float32, False), strict=True
        ):
            assert_close(together, alone, rtol=1e-3, atol=1e-3)

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
    def test_each_parameter_counts_its_own_steps(self) -> None:
        """Parameters of one stack that get gradients now and then step as if each had an optimizer
        of its own.
        """
        together, alone = (Problem([(6, 4)] * 3 + [(5,)] * 2, torch.float64) for _ in range(2))
        options: dict[str, Any] = {"lr": 0.03, "interval": 1}
        optimizer = Spectral(together.parameters, **options)
        own = [Spectral([w], **options) for w in alone.parameters]
        for step in range(12):
            together.backward()
            alone.backward()
            for index, (w, single) in enumerate(zip(together.parameters, own, strict=True)):
                if (step * 7 + index * 3) % 4 == 0:
                    w.grad = None
                else:
                    single.step()
            optimizer.step()
        for w, twin in zip(together.parameters, alone.parameters, strict=True):
            assert_close(w, twin, rtol=1e-10, atol=1e-10)

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
    def test_names_are_used(self) -> None:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        optimizer = Spectral(model.named_parameters())
        assert [item.name for item in optimizer.summary()] == [
            "0.weight",
            "0.bias",
            "1.weight",
            "1.bias",
        ]

    def test_unnamed_parameters_are_called_by_their_place(self) -> None:
        optimizer = Spectral(
            [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(3))]}]
        )
        assert [item.name for item in optimizer.summary()] == ["group 0 #0", "group 1 #0"]

    def test_options_per_group_are_those_of_two_optimizers(self) -> None:
        options = [
            {"lr": 0.03, "root": 2.0, "structure": "axes", "interval": 1},
            {
                "lr": 0.01,
                "root": 4.0,
                "structure": "diagonal",
                "betas": (0.5, 0.8),
                "maximize": True,
            },
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

    def test_structure_override(self) -> None:
        head, body = nn.Parameter(torch.randn(10, 4)), nn.Parameter(torch.randn(6, 4))
        optimizer = Spectral([{"params": [body]}, {"params": [head], "structure": "diagonal"}])
        assert [item.structure for item in optimizer.summary()] == ["6 x 4", "diag 40"]

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

    def test_a_parameter_cannot_be_in_two_groups(self) -> None:
        w = nn.Parameter(torch.ones(2))
        with pytest.raises(ValueError, match="more than one parameter group"):
            Spectral([{"params": [w]}, {"params": [w]}])

    def test_interval_schedule(self) -> None:
        w = nn.Parameter(torch.randn(6, 4))
        optimizer = Spectral([w], interval=[(0, 1), (3, 2), (8, 4)])
        turns = []
        for _ in range(16):
            w.grad = torch.randn(6, 4)
            optimizer.step()
            turns.append(int(optimizer.state[w]["turns"]))
        assert turns == [1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7]

    @pytest.mark.parametrize(
        ("options", "count"), [({}, 153), ({"interval": [(0, 3)]}, 70), ({"start": 0.0}, 70)]
    )
    def test_gaps_between_turns_grow(self, options: dict[str, Any], count: int) -> None:
        """From one step by one in 100, to the interval, unless there is a schedule, or no early
        time at all.
        """
        w = nn.Parameter(torch.randn(3, 2))
        optimizer = Spectral([w], **{"interval": 3, **options})
        for _ in range(209):
            w.grad = torch.randn(3, 2)
            optimizer.step()
        assert int(optimizer.state[w]["turns"]) == count
