"""What makes the step fast on an accelerator: no waiting for the device, compiled programs, little
memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing import assert_close

from eigenstep import Spectral, Turning
from eigenstep.core.step import moore_penrose
from eigenstep.optim import Fused, matrix
from eigenstep_lab.bench.step import peak_memory

from .problems import Problem, final

TRUNCATED = Turning(rotation="normalized", map="truncated_cayley", mend=False)
EXACT = Turning(rotation=partial(moore_penrose, gap=0.1), map="cayley")
VARIANTS: list[dict[str, Any]] = [
    {},
    {"eigenvalues": "kronecker", "nesterov": False, "turning": EXACT, "root": 3.0},
    {"grafting": False, "clip": 1.0, "state_dtype": torch.bfloat16, "turning": TRUNCATED},
    {"structure": "full", "betas": (0.0, 0.9), "max_ratio": 1.0},
]


class TestNoSync:
    """Fake tensors have no numbers, so reading one raises an error: whatever runs on them never
    waits for a device.
    """

    @pytest.mark.parametrize("options", VARIANTS, ids=str)
    def test_a_step_reads_nothing_back(self, options: dict[str, Any]) -> None:
        dtype = options.get("state_dtype", torch.float32)
        with FakeTensorMode():
            shapes: list[tuple[int, ...]] = [(5,), (6, 4), (12, 3), (3, 4, 2)]
            parameters = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
            lr = torch.empty(())
            optimizer = Spectral(
                parameters, lr, nonfinite="ignore", stochastic_rounding=True, **options
            )
            for step in range(3):
                for w in parameters:
                    w.grad = torch.empty_like(w)
                vectors = {w: torch.empty(3, *w.shape) for w in parameters}
                optimizer.step(curvature=vectors if step == 2 else None)
            assert all(len(optimizer.state[w]) > 1 for w in parameters)

    def test_reading_would_be_noticed(self) -> None:
        with FakeTensorMode():
            w = nn.Parameter(torch.empty(3))
            w.grad = torch.empty(3)
            with pytest.raises(DataDependentOutputException):
                Spectral([w], nonfinite="raise").step()


class Counting:
    """A compiler that counts programs and runs them as they are."""

    def __init__(self) -> None:
        self.programs = 0

    def __call__(self, graph: Any, _: Any) -> Callable[..., Any]:
        self.programs += 1
        return graph.forward


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    """Make ``torch.compile`` use a compiler that counts."""
    torch._dynamo.reset()
    counter = Counting()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    yield counter
    torch._dynamo.reset()


LAYOUTS: list[tuple[int, ...]] = [
    (16, 32),
    (16, 3, 3, 3),
    (8, 16, 16),
    (60, 9),
    (1024, 32),
    (7,),
    (1, 9),
    (24, 6),
]
ALIKE = Turning(map="truncated_cayley")
"""Quadratic maps are rounded otherwise in compiled programs, and bfloat16 makes more of it."""
RECIPES: list[tuple[type[Spectral], dict[str, Any]]] = [
    (Spectral, {}),
    (Spectral.fast, {}),
    (Spectral.paper, {}),
    (Spectral, {"eigenvalues": "kronecker"}),
    (Spectral, {"state_dtype": torch.int8, "turning": ALIKE}),
    (Spectral, {"turning": replace(ALIKE, dtype=torch.bfloat16)}),
]


class TestCompile:
    @pytest.mark.parametrize("options", VARIANTS, ids=str)
    def test_no_graph_break_and_no_recompile(
        self, options: dict[str, Any], counting: Counting
    ) -> None:
        problem = Problem([(6, 4), (4, 6)])
        optimizer = Spectral(problem.parameters, 0.03, interval=[(0, 2)], compile=True, **options)
        # Bases rest, turn, and turn and are mended, if that is not always so
        programs = 2 if "turning" in options else 3
        problem.descend(optimizer, 4)
        assert counting.programs == programs
        optimizer.param_groups[0].update(
            lr=0.01, betas=(options.get("betas", (0.8,))[0], 0.8), damping=1e-6
        )
        with torch._dynamo.config.patch(error_on_recompile=True):
            problem.descend(optimizer, 4)
        assert counting.programs == programs

    @pytest.mark.parametrize(("kind", "options"), RECIPES, ids=str)
    def test_steps_are_those_without(
        self, kind: type[Spectral], options: dict[str, Any], counting: Counting
    ) -> None:
        """Whatever matrices a parameter holds, and however its state is kept."""
        weights = []
        for compiled in (False, True):
            problem = Problem(LAYOUTS)
            *others, fused = problem.parameters
            groups: list[dict[str, Any]] = [
                {"params": others},
                {"params": [fused], "fused": Fused(sizes=(12, 8, 4), heads=(3, 2, 1))},
            ]
            optimizer = kind(groups, 0.03, interval=1, compile=compiled, **options)
            problem.descend(optimizer, 3)
            weights.append(problem.snapshot())
        assert counting.programs > 1
        for eager, twin in zip(*weights, strict=True):
            assert_close(twin, eager, rtol=1e-5, atol=1e-5)

    def test_many_kinds_of_batches(self, counting: Counting) -> None:
        """More than the eight programs that torch allows for a function by default."""
        problem = Problem([(n, n) for n in range(2, 5)])
        optimizer = Spectral(problem.parameters, 0.03, interval=[(0, 2)], compile=True)
        problem.descend(optimizer, 6)
        assert counting.programs == 9

    @pytest.mark.slow
    def test_inductor_gives_the_same_numbers(self) -> None:
        torch._dynamo.reset()
        shapes: list[tuple[int, ...]] = [(6, 4), (4, 6)]
        eager = final(lambda ps: Spectral(ps, 0.03), shapes=shapes)
        compiled = final(lambda ps: Spectral(ps, 0.03, compile=True), shapes=shapes)
        for w, twin in zip(compiled, eager, strict=True):
            assert_close(w, twin, rtol=1e-5, atol=1e-5)

    def test_copies_stay_compiled(self) -> None:
        optimizer = Spectral([nn.Parameter(torch.ones(2))], compile=True)
        plain = Spectral([nn.Parameter(torch.ones(2))])
        assert copy.deepcopy(optimizer)._arithmetic.program is not matrix.step
        assert copy.deepcopy(plain)._arithmetic.program is matrix.step


def state_bytes(optimizer: Spectral) -> int:
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.numel() * t.element_size() for t in tensors)


class TestMemory:
    SIZE = 128
    COUNT = 3

    def stepped(self, **options: Any) -> tuple[Spectral, Callable[[], Tensor]]:
        weights = [nn.Parameter(torch.randn(self.SIZE, self.SIZE)) for _ in range(self.COUNT)]
        optimizer = Spectral(weights, interval=[(0, 2)], **options)
        for w in weights:
            w.grad = torch.randn(self.SIZE, self.SIZE)
        for _ in range(2):
            optimizer.step()
        return optimizer, optimizer.step

    @pytest.mark.parametrize(
        ("options", "most"),
        [
            ({}, 16.1),
            ({"eigenvalues": "kronecker"}, 12.1),
            ({"state_dtype": torch.bfloat16}, 8.1),
            ({"betas": (0.0, 0.95), "eigenvalues": "kronecker"}, 8.1),
        ],
        ids=str,
    )
    def test_state_per_parameter(self, options: dict[str, Any], most: float) -> None:
        """On square matrices: at most 20 bytes by default and 10 in bfloat16; AdamW has 8."""
        optimizer, _ = self.stepped(**options)
        assert state_bytes(optimizer) / (self.COUNT * self.SIZE**2) <= most

    @pytest.mark.parametrize(
        ("options", "turning", "resting"),
        [
            ({}, 12, 5),
            ({"eigenvalues": "kronecker"}, 12, 5),
            ({"state_dtype": torch.bfloat16}, 12, 7),
            ({"turning": Turning(map="truncated_cayley")}, 13, 5),
        ],
        ids=str,
    )
    def test_peak_of_a_step(self, options: dict[str, Any], turning: int, resting: int) -> None:
        """Temporary memory, in copies of the largest batch in float32; nothing remains
        allocated.
        """
        _, step = self.stepped(**options)
        unit = 4 * self.COUNT * self.SIZE**2
        for most in (turning, resting):
            peak, left = peak_memory(step)
            assert peak <= 1.01 * most * unit
            assert left == 0

    def test_checkpoint_views_cost_nothing(self) -> None:
        optimizer, _ = self.stepped()
        tensors = [t for state in optimizer.state.values() for t in state.values()]
        storages = [t.untyped_storage() for t in tensors]
        assert sum({s.data_ptr(): s.nbytes() for s in storages}.values()) == state_bytes(optimizer)
