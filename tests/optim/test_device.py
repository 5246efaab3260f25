"""What makes the step fast on an accelerator: no waiting for the device, compiled programs, little
memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing import assert_close

from eigenstep import Spectral
from eigenstep.optim import kernel
from eigenstep_lab.bench.step import peak_memory

from .problems import Problem, final

VARIANTS: list[dict[str, Any]] = [
    {},
    {"eigenvalues": "kronecker", "residual": True, "nesterov": False},
    {"rotation": "normalized", "maps": "truncated", "reorthonormalize": False, "turn_first": True},
    {"rotation": "moore_penrose", "maps": "exact", "relative_damping": False, "root": 3.0},
    {"grafting": "adam", "clip": 1.0, "structure": "axes", "state_dtype": torch.bfloat16},
    {"grafting": "rms", "structure": "full", "start": 0.0, "betas": (0.0, 0.9), "max_ratio": 1.0},
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
def counting() -> Iterator[Counting]:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


class TestCompile:
    @pytest.mark.parametrize("options", VARIANTS, ids=str)
    def test_no_graph_break_and_no_recompile(
        self, options: dict[str, Any], counting: Counting
    ) -> None:
        problem = Problem([(6, 4), (4, 6)])
        optimizer = Spectral(problem.parameters, 0.03, interval=[(0, 2)], **options)
        optimizer._kernel = torch.compile(
            kernel.step, fullgraph=True, dynamic=False, backend=counting
        )
        # Bases rest, turn, and turn and are mended, if that is not always so
        programs = 2 if "maps" in options else 3
        problem.descend(optimizer, 4)
        assert counting.programs == programs
        optimizer.param_groups[0].update(
            lr=0.01, betas=(options.get("betas", (0.8,))[0], 0.8), damping=1e-6
        )
        with torch._dynamo.config.patch(error_on_recompile=True):
            problem.descend(optimizer, 4)
        assert counting.programs == programs

    def test_many_kinds_of_stacks(
        self, counting: Counting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """More than the eight programs that torch allows for a function by default."""
        compiled = torch.compile
        monkeypatch.setattr(
            torch, "compile", lambda f, **options: compiled(f, **options, backend=counting)
        )
        problem = Problem([(n, n) for n in range(2, 7)])
        optimizer = Spectral(problem.parameters, 0.03, interval=[(0, 2)], compile=True)
        problem.descend(optimizer, 6)
        assert counting.programs == 15

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
        assert copy.deepcopy(optimizer)._kernel is not kernel.step
        assert copy.deepcopy(Spectral([nn.Parameter(torch.ones(2))]))._kernel is kernel.step


def state_bytes(optimizer: Spectral) -> int:
    return sum(
        t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values()
    )


class TestMemory:
    SIZE, COUNT = 128, 3

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
            ({"residual": True}, 12, 5),
            ({"maps": "truncated"}, 13, 5),
        ],
        ids=str,
    )
    def test_peak_of_a_step(self, options: dict[str, Any], turning: int, resting: int) -> None:
        """Temporary memory, in copies of the largest stack in float32; nothing remains
        allocated.
        """
        _, step = self.stepped(**options)
        unit = 4 * self.COUNT * self.SIZE**2
        for most in (turning, resting):
            peak, left = peak_memory(step)
            assert peak <= 1.01 * most * unit
            assert left == 0

    def test_stepping_one_by_one_needs_memory_for_one(self) -> None:
        _, step = self.stepped(foreach=False)
        assert peak_memory(step)[0] <= 1.01 * 12 * 4 * self.SIZE**2

    def test_checkpoint_views_cost_nothing(self) -> None:
        optimizer, _ = self.stepped()
        storages = [
            t.untyped_storage() for state in optimizer.state.values() for t in state.values()
        ]
        assert sum({s.data_ptr(): s.nbytes() for s in storages}.values()) == state_bytes(optimizer)
