"""What every setting of every option promises, for every shape and number format."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from eigenstep import Spectral, Turning
from eigenstep.core.step import moore_penrose, truncated_cayley
from eigenstep.optim import Fused

from .problems import SHAPES, Problem, equal, fell, final

LR = 0.03
PAPERS_ROTATION = partial(moore_penrose, gap=0.1)
CAREFUL = partial(truncated_cayley, cap=0.1)
OTHERS: dict[str, list[Any]] = {
    "lr": [torch.tensor(0.03)],
    "betas": [(0.0, 0.9), (0.95, 0.9)],
    "weight_decay": [0.1, torch.tensor(0.1)],
    "cautious_weight_decay": [True],
    "root": [1.5, 3.0, 4],
    "interval": [1, 5, [(0, 1), (4, 3)]],
    "eigenvalues": ["kronecker"],
    "nesterov": [False, True, 0.5],
    "clip": [0.5],
    "grafting": [False],
    "eps": [0.0, 1e-3],
    "structure": ["kronecker", "full", "diagonal"],
    "fused": [Fused(batch_dims=0), Fused(batch_dims=1), Fused(heads=1, axis=1)],
    "max_dim": [1, 2, 4, None],
    "max_ratio": [None, 1.0],
    "damping": [0.0, 1e-2],
    "turning": [
        Turning(rotation="normalized"),
        Turning(rotation=PAPERS_ROTATION),
        Turning(rate=1.0),
        Turning(map="truncated_cayley"),
        Turning(map="cayley"),
        Turning(map="truncated_cayley", mend=False),
    ],
    "state_dtype": [torch.bfloat16, torch.float32, torch.int8],
    "stochastic_rounding": [True],
    "maximize": [True],
    "nonfinite": ["skip", "ignore"],
}
"""Values of every option besides its default, but for those that are about how to compile."""
FORMATS = [
    {},
    {"turning": Turning(dtype=torch.bfloat16)},
    {"turning": Turning(dtype=torch.float64)},
    *({"state_dtype": dtype} for dtype in OTHERS["state_dtype"]),
    {"stochastic_rounding": True},
    {"root": 3.0},
    {"structure": "full"},
]
"""Options that number formats may make a difference to."""
OTHER_DTYPES = [torch.float64, torch.bfloat16, torch.float16]


def check_contract(options: dict[str, Any], dtype: torch.dtype, shapes: Any = SHAPES) -> None:
    """Assert that all losses stay finite and fall, and that the same seed gives the
    same numbers.
    """
    scale = -1.0 if options.get("maximize") else 1.0

    def start() -> tuple[Problem, Spectral]:
        torch.manual_seed(0)
        problem = Problem(shapes, dtype)
        return problem, Spectral(problem.parameters, **{"lr": LR, "weight_decay": 0.0, **options})

    problem, optimizer = start()
    history = problem.descend(optimizer, 3, scale)
    weights = problem.snapshot()
    history += problem.descend(optimizer, 6, scale)
    assert all(math.isfinite(loss) for losses in history for loss in losses)
    for shape, before, after in zip(shapes, history[0], history[-1], strict=True):
        assert after < before or 0 in shape, (
            f"the loss of the parameter of shape {shape} rose: {before} to {after}"
        )
    problem, optimizer = start()
    problem.descend(optimizer, 3, scale)
    assert equal(weights, problem.snapshot()), "the second run gave other numbers"


class TestContract:
    def test_no_option_is_left_out(self) -> None:
        group = Spectral([nn.Parameter(torch.ones(2))]).param_groups[0]
        assert set(OTHERS) == set(group) - {"params", "count", "capturable"}
        assert not any(group[name] == value for name, values in OTHERS.items() for value in values)

    @pytest.mark.parametrize(
        "options", [{name: value} for name, values in OTHERS.items() for value in values], ids=str
    )
    def test_every_value_of_every_option(self, options: dict[str, Any]) -> None:
        check_contract(options, torch.float32)

    @pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
    @pytest.mark.parametrize("options", FORMATS, ids=str)
    def test_every_format(self, options: dict[str, Any], dtype: torch.dtype) -> None:
        check_contract(options, dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, *OTHER_DTYPES], ids=str)
    @pytest.mark.parametrize("recipe", [Spectral.paper, Spectral.fast])
    def test_recipes(self, recipe: Any, dtype: torch.dtype) -> None:
        problem = Problem(dtype=dtype)
        assert fell(problem.descend(recipe(problem.parameters, LR), 12))

    @settings(
        deadline=None,
        derandomize=True,
        max_examples=60,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        options=st.fixed_dictionaries(
            {}, optional={name: st.sampled_from(values) for name, values in OTHERS.items()}
        ),
        shapes=st.lists(st.lists(st.integers(0, 6), max_size=4).map(tuple), min_size=1, max_size=4),
        dtype=st.sampled_from([torch.float32, *OTHER_DTYPES]),
    )
    def test_any_combination(
        self, options: dict[str, Any], shapes: list[tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        # A scalar that starts within a step of its target cannot be asked to come nearer.
        starts = [loss.item() for loss in Problem(shapes, dtype).losses()]
        assume(all(loss > LR**2 or 0 in shape for loss, shape in zip(starts, shapes, strict=True)))
        turning = options.get("turning") or Turning()
        if not turning.mend or turning.rate == 1.0 or options.get("damping") == 0:
            # Without any safeguard, bases drift or degenerate
            options = {**options, "turning": replace(turning, map=CAREFUL)}
        check_contract(options, dtype, shapes)

    def test_state_needs_no_gradient(self) -> None:
        problem = Problem()
        optimizer = Spectral(problem.parameters)
        problem.descend(optimizer, 2)
        tensors = [t for state in optimizer.state.values() for t in state.values()]
        assert not any(tensor.requires_grad for tensor in tensors)


WITH_BASES = [s for s in SHAPES if len(s) > 1 and 0 not in s and 1 < s[0] < math.prod(s)]
"""What has no basis is AdamW, whose ``eps`` and squares make the size of gradients count."""


def shapes_for(options: dict[str, Any]) -> Any:
    return SHAPES if "eigenvalues" in options else WITH_BASES


def after_a_jump(
    problem: Problem, optimizer: Spectral, jump: float, steps: int
) -> list[list[float]]:
    """Return the losses after a gradient of another size."""
    problem.descend(optimizer, 5)
    problem.descend(optimizer, 1, jump)
    return problem.descend(optimizer, steps)


class TestScale:
    @pytest.mark.parametrize("options", [{}, {"eigenvalues": "kronecker"}, {"grafting": False}])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    def test_powers_of_two_change_no_bit(self, dtype: torch.dtype, options: dict[str, Any]) -> None:
        runs = []
        for power in (0, 1, -7, 80, -80):
            problem = Problem(shapes_for(options), dtype)
            problem.descend(Spectral(problem.parameters, LR, **options), 10, 2.0**power)
            runs.append(problem.snapshot())
        for run in runs[1:]:
            assert equal(runs[0], run)

    @pytest.mark.parametrize("scale", [1e-38, 1e-10, 1e10, 1e35])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"eigenvalues": "kronecker"},
            {"turning": Turning(rotation="normalized"), "interval": 3},
            {"turning": Turning(rotation=PAPERS_ROTATION, map="cayley")},
            {"grafting": False, "clip": 1.0},
            {"damping": 0.0},
        ],
        ids=str,
    )
    def test_huge_and_tiny_gradients(self, scale: float, options: dict[str, Any]) -> None:
        problem = Problem(shapes_for(options))
        assert fell(problem.descend(Spectral(problem.parameters, LR, **options), 12, scale))

    @pytest.mark.parametrize("scale", [1e-30, 1e30])
    def test_huge_and_tiny_gradients_with_the_paper_recipe(self, scale: float) -> None:
        """Its damping is absolute: tiny gradients then move hardly anything, but must not break
        anything either.
        """
        problem = Problem()
        history = problem.descend(Spectral.paper(problem.parameters, LR), 12, scale)
        for before, after in zip(history[0], history[-1], strict=True):
            assert after < before if before and scale > 1 else after <= before

    @pytest.mark.parametrize(
        "options",
        [{}, {"eigenvalues": "kronecker"}, {"turning": Turning(map="cayley")}],
        ids=str,
    )
    @pytest.mark.parametrize("jump", [1e30, 1e-30])
    def test_one_jump_is_forgotten(self, jump: float, options: dict[str, Any]) -> None:
        problem = Problem([(6, 4), (5,)])
        optimizer = Spectral(problem.parameters, LR, betas=(0.5, 0.5), weight_decay=0.0, **options)
        history = after_a_jump(problem, optimizer, jump, 280)
        assert all(math.isfinite(loss) for losses in history for loss in losses)
        assert fell(history)

    @pytest.mark.parametrize("jump", [1e30, 1e-30])
    def test_the_exponential_map_survives_a_jump(self, jump: float) -> None:
        """It takes eigenvalues to the limit of their number format, from where they come back only
        slowly.
        """
        problem = Problem([(6, 4), (5,)])
        optimizer = Spectral.paper(
            problem.parameters, LR, betas=(0.5, 0.5), weight_decay=0.0, exact=True
        )
        history = after_a_jump(problem, optimizer, jump, 50)
        assert all(after <= before for before, after in zip(history[0], history[-1], strict=True))
        tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
        assert all(torch.isfinite(tensor).all() for tensor in tensors)

    def test_from_the_smallest_to_the_largest_numbers(self) -> None:
        problem = Problem()
        optimizer = Spectral(problem.parameters, LR)
        problem.descend(optimizer, 3, 1e-37)
        before = problem.snapshot()
        problem.descend(optimizer, 3, 1e36)
        for old, new in zip(before, problem.snapshot(), strict=True):
            assert ((new - old).abs() < 30 * LR).all()


class TestZeros:
    def test_zero_gradients_move_nothing_and_do_no_harm(self) -> None:
        problem = Problem()
        optimizer = Spectral(problem.parameters, LR, weight_decay=0.0)
        start = problem.snapshot()
        problem.descend(optimizer, 100, scale=0.0)
        assert equal(problem.snapshot(), start)
        assert fell(problem.descend(optimizer, 12))

    @pytest.mark.parametrize("options", [{}, {"eigenvalues": "kronecker", "damping": 0.0}])
    def test_zeros_in_between(self, options: dict[str, Any]) -> None:
        """For so long that the curvature decays below the smallest numbers."""
        problem = Problem([(6, 4), (5,)])
        optimizer = Spectral(problem.parameters, LR, betas=(0.5, 0.5), weight_decay=0.0, **options)
        problem.descend(optimizer, 5)
        problem.descend(optimizer, 300, scale=0.0)
        assert fell(problem.descend(optimizer, 30))

    def test_rows_that_come_late(self) -> None:
        """Rare rows of an embedding: nothing explodes when they get their first gradient."""
        embedding = nn.Embedding(20, 4)
        optimizer = Spectral(embedding.parameters(), LR, weight_decay=0.0)
        for step in range(60):
            before = embedding.weight.detach().clone()
            rows = torch.arange(10) if step < 30 else torch.arange(5, 20)
            optimizer.zero_grad()
            (embedding(rows) - 1).square().sum().backward()
            optimizer.step()
            assert (embedding.weight - before).abs().amax() < 30 * LR


class TestNonfinite:
    @staticmethod
    def spoil(problem: Problem, value: float) -> None:
        problem.parameters[5].grad[2, 1] = value  # type: ignore[index]

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_raise_changes_nothing(self, value: float) -> None:
        problem = Problem()
        named = [(f"w{i}", w) for i, w in enumerate(problem.parameters)]
        optimizer = Spectral(named, LR, nonfinite="raise")
        problem.descend(optimizer, 3)
        weights = problem.snapshot()
        state = copy.deepcopy(optimizer.state_dict())
        problem.backward()
        self.spoil(problem, value)
        with pytest.raises(ValueError, match=r"gradient of w5 has NaN or infinite entries"):
            optimizer.step()
        assert equal(problem.snapshot(), weights)
        assert_same_state(optimizer.state_dict(), state)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("nonfinite", ["skip", "ignore"])
    def test_skip_has_no_step_and_ignore_counts_such_entries_as_zero(
        self, nonfinite: str, value: float
    ) -> None:
        runs = []
        for entry in (0.0, value):
            problem = Problem()
            groups = [{"params": problem.parameters[:4]}, {"params": problem.parameters[4:]}]
            optimizer = Spectral(groups, LR, nonfinite=nonfinite)
            problem.descend(optimizer, 3)
            problem.backward()
            self.spoil(problem, entry)
            if entry or nonfinite == "ignore":
                optimizer.step()
            problem.descend(optimizer, 3)
            runs.append(problem.snapshot())
        assert equal(*runs)

    def test_curvature_counts_too(self) -> None:
        w = nn.Parameter(torch.ones(3))
        w.grad = torch.ones(3)
        optimizer = Spectral([w])
        with pytest.raises(ValueError, match="the curvature has NaN or infinite entries"):
            optimizer.step(curvature={w: torch.full((2, 3), math.nan)})


def assert_same_state(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["state"].keys() == second["state"].keys()
    for index, state in first["state"].items():
        other = second["state"][index]
        assert all(torch.equal(tensor, other[name]) for name, tensor in state.items())
    assert first["param_groups"] == second["param_groups"]


IMPOSSIBLE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lr": math.nan}, ValueError, "lr must be finite"),
    ({"lr": "fast"}, TypeError, "lr must be a number, got str"),
    ({"lr": torch.ones(2)}, ValueError, "one element"),
    ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] must be less than 1"),
    ({"weight_decay": -1}, ValueError, "weight_decay"),
    ({"root": 0}, ValueError, "root must be greater than 0"),
    ({"interval": [(5, 2)]}, ValueError, "interval must be"),
    ({"interval": True}, ValueError, "interval must be"),
    ({"eigenvalues": "exact"}, ValueError, "must be one of 'corrected', 'kronecker'"),
    ({"clip": 0.0}, ValueError, "clip must be greater than 0"),
    ({"grafting": "sgd"}, TypeError, "grafting must be True or False, got 'sgd'"),
    ({"structure": "dense"}, ValueError, "structure must be one of"),
    ({"max_dim": 0}, ValueError, "max_dim must be a whole number, at least 1"),
    ({"max_ratio": 0.5}, ValueError, "max_ratio must be finite and at least 1"),
    ({"damping": -1e-3}, ValueError, "damping"),
    ({"turning": "cayley"}, TypeError, r"turning must be None or a Turning\(...\), got 'cayley'"),
    ({"turning": Turning(rate=0.0)}, ValueError, "rate of Turning must be greater than 0"),
    ({"turning": Turning(rate=1.5)}, ValueError, "and at most 1, got 1.5"),
    ({"turning": Turning(rayleigh=True)}, ValueError, "is for eigenstep.update"),
    ({"fused": (8, 8)}, TypeError, r"fused must be None or a Fused\(...\), .* got \(8, 8\)"),
    ({"state_dtype": "bf16"}, ValueError, "state_dtype must be"),
    ({"nesterov": 1.5}, ValueError, "nesterov must be finite and between 0.0 and 1.0, got 1.5"),
    ({"maximize": "yes"}, TypeError, "maximize must be True or False, got 'yes'"),
    ({"capturable": True}, ValueError, "capturable=True needs interval=1"),
    ({"amsgrad": True}, ValueError, "cannot do amsgrad=True: its second moments can fall"),
    ({"nonfinite": "warn"}, ValueError, "nonfinite must be one of"),
]


class TestErrors:
    @pytest.mark.parametrize(("options", "error", "message"), IMPOSSIBLE, ids=str)
    def test_impossible_options(
        self, options: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        w = nn.Parameter(torch.ones(2, 2))
        with pytest.raises(error, match=message):
            Spectral([w], **options)
        with pytest.raises(error, match=message):
            Spectral([{"params": [w], **options}])
        optimizer = Spectral([nn.Parameter(torch.ones(1))])
        with pytest.raises(error, match=message):
            optimizer.add_param_group({"params": [w], **options})
        assert len(optimizer.param_groups) == 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"gamma": 1.5}, "gamma must be finite and between 0"),
            ({"gap": -0.1}, "gap must be finite and between 0"),
            ({"basis_lr": 0.0}, "basis_lr must be greater than 0"),
            ({"basis_lr": 2.0}, "basis_lr must be .* less than 2, got 2.0"),
            ({"damping": 0.0}, "damping must be greater than 0: .* hardly seen a gradient"),
            ({"basis_dtype": torch.int8}, "dtype must be None, float64, float32 or bfloat16"),
        ],
        ids=str,
    )
    def test_impossible_options_of_the_paper(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Spectral.paper([nn.Parameter(torch.ones(2, 2))], **options)

    def test_what_torch_has_without_effect(self) -> None:
        options = {"foreach": False, "fused": True, "amsgrad": False, "differentiable": False}
        assert equal(
            final(lambda ps: Spectral(ps, **options)),  # type: ignore[arg-type]
            final(Spectral),
        )

    def test_sparse_gradient(self) -> None:
        embedding = nn.Embedding(5, 3, sparse=True)
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(
            TypeError, match=r"shape \(5, 3\) is sparse; Spectral needs dense gradients"
        ):
            Spectral(embedding.parameters()).step()

    def test_complex_gradient_damages_nothing(self) -> None:
        good = nn.Parameter(torch.ones(3))
        bad = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        optimizer = Spectral([good, bad])
        (good.sum() + bad.abs().sum()).backward()
        with pytest.raises(TypeError, match="real floating point"):
            optimizer.step()
        assert torch.equal(good, torch.ones(3))
        assert not optimizer.state

    def test_no_parameters(self) -> None:
        with pytest.raises(ValueError, match="empty parameter list"):
            Spectral([])


def test_stochastic_rounding_needs_the_seed() -> None:
    """Other seeds give other numbers, so that the test of determinism means something."""

    def weights(seed: int) -> list[torch.Tensor]:
        problem = Problem(dtype=torch.bfloat16)
        torch.manual_seed(seed)
        optimizer = Spectral(problem.parameters, 1e-3, stochastic_rounding=True)
        problem.descend(optimizer, 8)
        return problem.snapshot()

    assert not equal(weights(0), weights(1))
