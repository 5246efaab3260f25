"""What every setting of every option promises, for every shape and number format."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from eigenstep import Spectral
from eigenstep.core.step import cayley, truncated_cayley

from .problems import SHAPES, Problem, equal, final

LR = 0.03
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
    "grafting": ["adam", "rms", None],
    "eps": [0.0, 1e-3],
    "structure": ["kronecker", "axes", "full", "diagonal"],
    "batch_dims": [0, 1],
    "split_sizes": [],  # in test_shapes: it must fit every parameter of a group
    "num_heads": [1],
    "split_dim": [1],
    "max_dim": [1, 2, 4, None],
    "max_ratio": [None, 1.0],
    "decay": [0.5, 0.0],
    "damping": [0.0, 1e-2],
    "relative_damping": [False],
    "start": [0.0, 2.0],
    "turn_first": [True],
    "eigenvalues_wait": [True],
    "rotation": ["normalized", "moore_penrose"],
    "basis_lr": [None, 1.0],
    "maps": ["truncated", "exact"],
    "reorthonormalize": [False],
    "residual": [True],
    "basis_dtype": [torch.bfloat16, torch.float64],
    "state_dtype": [torch.bfloat16, torch.float32, torch.int8],
    "offload": [True],
    "stochastic_rounding": [True],
    "maximize": [True],
    "foreach": [False, True],
    "fused": [False, True],
    "nonfinite": ["skip", "ignore"],
}
"""Values of every option besides its default, but for those that are about how to compile."""
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CASES: list[dict[str, Any]] = [
    {},
    *({name: value} for name, values in OTHERS.items() for value in values),
]
CASES[CASES.index({"reorthonormalize": False})]["maps"] = "truncated"  # others must be mended


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
        assert set(OTHERS) == set(group) - {
            "params",
            "count",
            "capturable",
            "amsgrad",
            "differentiable",
        }
        assert not any(group[name] == value for name, values in OTHERS.items() for value in values)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("options", CASES, ids=str)
    def test_every_value_of_every_option(self, options: dict[str, Any], dtype: torch.dtype) -> None:
        check_contract(options, dtype)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("recipe", [Spectral.paper, Spectral.fast])
    def test_recipes(self, recipe: Any, dtype: torch.dtype) -> None:
        problem = Problem(dtype=dtype)
        history = problem.descend(recipe(problem.parameters, LR), 12)
        assert all(
            after < before for before, after in zip(history[0], history[-1], strict=True) if before
        )

    @settings(
        deadline=None,
        derandomize=True,
        max_examples=60,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        options=st.fixed_dictionaries(
            {},
            optional={name: st.sampled_from(values) for name, values in OTHERS.items() if values},
        ),
        shapes=st.lists(st.lists(st.integers(0, 6), max_size=4).map(tuple), min_size=1, max_size=4),
        dtype=st.sampled_from(DTYPES),
    )
    def test_any_combination(
        self, options: dict[str, Any], shapes: list[tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        # A scalar that starts within a step of its target cannot be asked to come nearer.
        starts = [loss.item() for loss in Problem(shapes, dtype).losses()]
        assume(all(loss > LR**2 or 0 in shape for loss, shape in zip(starts, shapes, strict=True)))
        if (
            "reorthonormalize" in options
            or options.get("damping") == 0
            or options.get("basis_lr") == 1.0
        ):
            # Without any safeguard, bases drift or degenerate
            options = {
                **options,
                "maps": partial(truncated_cayley, cap=0.1),
                "relative_damping": True,
            }
        check_contract(options, dtype, shapes)

    def test_state_needs_no_gradient(self) -> None:
        problem = Problem()
        optimizer = Spectral(problem.parameters)
        problem.descend(optimizer, 2)
        assert not any(
            t.requires_grad for state in optimizer.state.values() for t in state.values()
        )


WITH_BASES = [s for s in SHAPES if len(s) > 1 and 0 not in s and 1 < s[0] < math.prod(s)]
"""What has no basis is AdamW, whose ``eps`` and squares make the size of gradients count."""


class TestScale:
    @pytest.mark.parametrize(
        "options", [{}, {"eigenvalues": "kronecker"}, {"residual": True}, {"grafting": "adam"}]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("power", [1, -7, 80, -80])
    def test_powers_of_two_change_no_bit(
        self, power: int, dtype: torch.dtype, options: dict[str, Any]
    ) -> None:
        runs = []
        for scale in (1.0, 2.0**power):
            problem = Problem(SHAPES if "eigenvalues" in options else WITH_BASES, dtype)
            problem.descend(Spectral(problem.parameters, LR, **options), 10, scale)
            runs.append(problem.snapshot())
        assert equal(*runs)

    @pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-10, 1e10, 1e30, 1e35])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"eigenvalues": "kronecker"},
            {"residual": True, "interval": 3},
            {"rotation": "normalized"},
            {"rotation": "moore_penrose", "maps": "exact"},
            {"grafting": "adam", "clip": 1.0},
            {"grafting": "rms"},
            {"damping": 0.0},
        ],
        ids=str,
    )
    def test_huge_and_tiny_gradients(self, scale: float, options: dict[str, Any]) -> None:
        problem = Problem(SHAPES if "eigenvalues" in options else WITH_BASES)
        history = problem.descend(Spectral(problem.parameters, LR, **options), 12, scale)
        assert all(
            after < before for before, after in zip(history[0], history[-1], strict=True) if before
        )

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
        "options", [{}, {"eigenvalues": "kronecker"}, {"residual": True}, {"maps": cayley}]
    )
    @pytest.mark.parametrize("jump", [1e30, 1e-30])
    def test_one_jump_is_forgotten(self, jump: float, options: dict[str, Any]) -> None:
        problem = Problem([(6, 4), (5,)])
        optimizer = Spectral(problem.parameters, LR, betas=(0.5, 0.5), weight_decay=0.0, **options)
        problem.descend(optimizer, 5)
        problem.descend(optimizer, 1, jump)
        kicked = [loss.item() for loss in problem.losses()]
        history = problem.descend(optimizer, 280)
        assert all(math.isfinite(loss) for losses in history for loss in losses)
        assert all(after < before for before, after in zip(kicked, history[-1], strict=True))

    @pytest.mark.parametrize("jump", [1e30, 1e-30])
    def test_the_exponential_map_survives_a_jump(self, jump: float) -> None:
        """It takes eigenvalues to the limit of their number format, from where they come back only
        slowly.
        """
        problem = Problem([(6, 4), (5,)])
        optimizer = Spectral(
            problem.parameters, LR, betas=(0.5, 0.5), weight_decay=0.0, maps="exact"
        )
        problem.descend(optimizer, 5)
        problem.descend(optimizer, 1, jump)
        kicked = [loss.item() for loss in problem.losses()]
        history = problem.descend(optimizer, 50)
        assert all(after <= before for before, after in zip(kicked, history[-1], strict=True))
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        assert all(torch.isfinite(tensor).all() for tensor in states)

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
        history = problem.descend(optimizer, 12)
        assert all(
            after < before for before, after in zip(history[0], history[-1], strict=True) if before
        )

    @pytest.mark.parametrize(
        "options", [{}, {"residual": True}, {"eigenvalues": "kronecker", "damping": 0.0}]
    )
    def test_zeros_in_between(self, options: dict[str, Any]) -> None:
        """For so long that the curvature decays below the smallest numbers."""
        problem = Problem([(6, 4), (5,)])
        optimizer = Spectral(problem.parameters, LR, betas=(0.5, 0.5), weight_decay=0.0, **options)
        problem.descend(optimizer, 5)
        problem.descend(optimizer, 300, scale=0.0)
        history = problem.descend(optimizer, 30)
        assert all(after < before for before, after in zip(history[0], history[-1], strict=True))

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
        weights, state = problem.snapshot(), copy.deepcopy(optimizer.state_dict())
        problem.backward()
        self.spoil(problem, value)
        with pytest.raises(ValueError, match=r"gradient of w5 has NaN or infinite entries"):
            optimizer.step()
        assert equal(problem.snapshot(), weights)
        assert_same_state(optimizer.state_dict(), state)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_skip_is_as_if_the_step_had_not_been(self, value: float) -> None:
        runs = []
        for spoiled in (False, True):
            problem = Problem()
            groups = [{"params": problem.parameters[:4]}, {"params": problem.parameters[4:]}]
            optimizer = Spectral(groups, LR, nonfinite="skip")
            problem.descend(optimizer, 3)
            if spoiled:
                problem.backward()
                self.spoil(problem, value)
                optimizer.step()
            problem.descend(optimizer, 3)
            runs.append(problem.snapshot())
        assert equal(*runs)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_ignore_counts_such_entries_as_zero(self, value: float) -> None:
        runs = []
        for entry in (0.0, value):
            problem = Problem()
            optimizer = Spectral(problem.parameters, LR, nonfinite="ignore")
            problem.descend(optimizer, 3)
            problem.backward()
            self.spoil(problem, entry)
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
        assert all(
            torch.equal(tensor, second["state"][index][name]) for name, tensor in state.items()
        )
    assert first["param_groups"] == second["param_groups"]


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"lr": -1.0}, ValueError, "lr must be finite and at least 0"),
            ({"lr": math.nan}, ValueError, "lr must be finite"),
            ({"lr": "fast"}, TypeError, "lr must be a number, got str"),
            ({"lr": torch.ones(2)}, ValueError, "one element"),
            ({"betas": 0.9}, ValueError, "betas must be a pair"),
            ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] must be less than 1"),
            ({"betas": (-0.1, 0.9)}, ValueError, r"betas\[0\]"),
            ({"weight_decay": -1}, ValueError, "weight_decay"),
            ({"root": 0}, ValueError, "root must be greater than 0"),
            ({"root": None}, TypeError, "root must be a number"),
            ({"interval": 0}, ValueError, "interval must be a positive integer"),
            ({"interval": [(5, 2)]}, ValueError, "interval must be"),
            ({"interval": True}, ValueError, "interval must be"),
            (
                {"eigenvalues": "exact"},
                ValueError,
                "eigenvalues must be one of 'corrected', 'kronecker'",
            ),
            ({"clip": 0.0}, ValueError, "clip must be greater than 0"),
            (
                {"grafting": "sgd"},
                ValueError,
                "grafting must be one of 'descent', 'adam', 'rms', None, got 'sgd'",
            ),
            ({"structure": "dense"}, ValueError, "structure must be one of"),
            ({"max_dim": 0}, ValueError, "max_dim must be a whole number, at least 1"),
            ({"max_dim": 2.5}, ValueError, "max_dim must be a whole number"),
            ({"max_ratio": 0.5}, ValueError, "max_ratio must be finite and at least 1"),
            ({"decay": 1.5}, ValueError, "decay must be finite and between 0"),
            ({"damping": -1e-3}, ValueError, "damping"),
            ({"start": -1.0}, ValueError, "start"),
            ({"rotation": "jacobi"}, ValueError, "rotation must be one of"),
            ({"basis_lr": 0.0}, ValueError, "basis_lr must be greater than 0"),
            ({"basis_lr": 1.5}, ValueError, "basis_lr must be at most 1"),
            (
                {"basis_lr": 2.0, "rotation": "normalized"},
                ValueError,
                "basis_lr must be less than 2",
            ),
            ({"maps": "eigh"}, ValueError, "maps must be one of"),
            ({"reorthonormalize": 1}, TypeError, "reorthonormalize must be True or False, got 1"),
            (
                {"basis_dtype": torch.int8},
                ValueError,
                "basis_dtype must be None, float64, float32 or bfloat16",
            ),
            ({"state_dtype": "bf16"}, ValueError, "state_dtype must be"),
            ({"nesterov": "yes"}, TypeError, "nesterov must be a number, got str"),
            (
                {"nesterov": 1.5},
                ValueError,
                "nesterov must be finite and between 0.0 and 1.0, got 1.5",
            ),
            ({"maximize": "yes"}, TypeError, "maximize must be True or False, got 'yes'"),
            ({"foreach": "yes"}, TypeError, "foreach must be True, False or None, got 'yes'"),
            ({"capturable": True}, ValueError, "capturable=True needs interval=1"),
            ({"nonfinite": "warn"}, ValueError, "nonfinite must be one of"),
        ],
        ids=str,
    )
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

    def test_sparse_gradient(self) -> None:
        embedding = nn.Embedding(5, 3, sparse=True)
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(
            TypeError, match=r"shape \(5, 3\) is sparse; Spectral needs dense gradients"
        ):
            Spectral(embedding.parameters()).step()

    def test_complex_gradient(self) -> None:
        w = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        w.abs().sum().backward()
        with pytest.raises(TypeError, match="real floating point"):
            Spectral([w]).step()

    def test_nothing_is_damaged_by_a_bad_gradient_of_another_parameter(self) -> None:
        good, bad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.complex64))
        optimizer = Spectral([good, bad])
        (good.sum() + bad.abs().sum()).backward()
        with pytest.raises(TypeError):
            optimizer.step()
        assert torch.equal(good, torch.ones(3))
        assert not optimizer.state

    def test_no_parameters(self) -> None:
        with pytest.raises(ValueError, match="empty parameter list"):
            Spectral([])


def test_stochastic_rounding_needs_the_seed() -> None:
    """Other seeds give other numbers, so that the test of determinism means something."""

    def make(seed: int) -> Any:
        def build(parameters: list[nn.Parameter]) -> Spectral:
            torch.manual_seed(seed)
            return Spectral(parameters, 1e-3, stochastic_rounding=True)

        return build

    assert not equal(final(make(0), dtype=torch.bfloat16), final(make(1), dtype=torch.bfloat16))
