"""Each option of ``Spectral`` that changes what is computed, against the transcription: 30 steps,
to 1e-9.
"""

from functools import partial
from typing import Any

import pytest
import torch

from eigenstep import Spectral
from eigenstep.core.step import bounded, truncated_cayley

from .comparison import assert_same, stream

OPTIONS: dict[str, dict[str, Any]] = {
    "no momentum": {"betas": (0.0, 0.95)},
    "no momentum, no weight decay": {"betas": (0.0, 0.8), "weight_decay": 0.0},
    "other betas": {"betas": (0.7, 0.9)},
    "hardly any memory": {"betas": (0.9, 0.02)},
    "weight decay": {"weight_decay": 0.5},
    "maximize": {"maximize": True},
    "plain momentum": {"nesterov": False},
    "Nesterov": {"nesterov": True, "betas": (0.8, 0.95)},
    "half Nesterov": {"nesterov": 0.5},
    "all Nesterov": {"nesterov": 1.0},
    "root 1": {"root": 1.0},
    "root 3": {"root": 3.0},
    "root 4": {"root": 4.0},
    "root 3.5": {"root": 3.5},
    "AdaGrad": {"decay": 0.0},
    "half decay": {"decay": 0.5},
    "AdaGrad, exact": {"decay": 0.0, "maps": "exact"},
    "half decay, residual": {"decay": 0.5, "residual": True},
    "no damping": {"damping": 0.0},
    "much damping": {"damping": 0.3},
    "absolute damping": {"damping": 0.3, "relative_damping": False},
    "absolute damping, exact": {"damping": 0.03, "relative_damping": False, "maps": "exact"},
    "much damping, residual": {"damping": 0.3, "residual": True},
    "clip": {"clip": 0.5},
    "clip hardly": {"clip": 1.2},
    "clip alone": {"clip": 0.3, "grafting": None},
    "Adam's size": {"grafting": "adam"},
    "RMSprop's size": {"grafting": "rms"},
    "Adam's size without momentum": {"grafting": "adam", "betas": (0.0, 0.95)},
    "Adam's size, clip, no start": {"grafting": "adam", "clip": 0.8, "start": 0.0},
    "Adam's size, start with the newest": {"grafting": "adam", "start": 4.0},
    "turn first": {"turn_first": True},
    "turn first, no momentum": {"turn_first": True, "betas": (0.0, 0.95)},
    "start with the newest": {"start": 4.0},
    "start as a mean": {"start": 1.0},
    "start with a little less": {"start": 1.5},
    "start as half a mean": {"start": 0.5},
    "no start": {"start": 0.0},
    "rarely": {"start": 0.0, "interval": 5},
    "schedule": {"interval": [(0, 1), (4, 3), (20, 7)]},
    "slow basis": {"basis_lr": 0.02},
    "basis like eigenvalues": {"basis_lr": None},
    "basis like eigenvalues, normalized": {"basis_lr": None, "rotation": "normalized"},
    "gap": {"rotation": "moore_penrose"},
    "gap, normalized": {"rotation": "normalized"},
    "normalized, far": {"rotation": "normalized", "basis_lr": 1.3},
    "gap, exact maps": {"rotation": "moore_penrose", "maps": "exact", "start": 1.0},
    "never mend": {"reorthonormalize": False, "maps": "truncated"},
    "never mend, rarely turning": {
        "reorthonormalize": False,
        "maps": "exact",
        "interval": 2,
        "start": 0.0,
    },
}
LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "two blocks": ((8, 3), {"max_ratio": 1.5}),
    "blocks that do not divide": ((7, 3), {"max_ratio": 1.0}),
    "more blocks than needed": ((9, 4), {"max_ratio": 1.2}),
    "parts and blocks": ((12, 6), {"max_dim": 3}),
    "wide parts": ((4, 8), {"max_dim": 2}),
    "parts that do not divide": ((8, 7), {"max_dim": 4}),
    "no ratio": ((9, 2), {"max_ratio": None}),
    "unequal blocks": ((7, 3), {}),
    "both sides cut unevenly": ((7, 5), {"max_dim": 3}),
    "square parts": ((4, 4), {"max_dim": 2}),
    "tensor as matrix": ((2, 3, 4), {}),
    "tensor, blocks": ((6, 2, 2), {"max_ratio": 1.0, "max_dim": 4}),
    "axes": ((2, 3, 4), {"structure": "axes"}),
    "axes, one too long": ((2, 5, 3), {"structure": "axes", "max_dim": 3}),
    "axes, one of size one": ((3, 1, 4), {"structure": "axes"}),
    "axes, four": ((2, 3, 2, 2), {"structure": "axes"}),
    "axes of a matrix": ((4, 3), {"structure": "axes"}),
    "full": ((2, 3), {"structure": "full"}),
    "full vector": ((5,), {"structure": "full"}),
    "full, too long": ((4, 3), {"structure": "full", "max_dim": 11}),
    "diagonal": ((4, 3), {"structure": "diagonal"}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option(name: str) -> None:
    assert_same([(5, 3), (4,)], **OPTIONS[name])


@pytest.mark.parametrize("root", [1.0, 3.5])
def test_roots_of_kronecker_eigenvalues(root: float) -> None:
    assert_same((2, 3, 2), structure="axes", eigenvalues="kronecker", root=root)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name: str) -> None:
    shape, options = LAYOUTS[name]
    assert_same(shape, eigenvalues="kronecker", damping=0.01, **options)


@pytest.mark.parametrize(
    "name", ["parts and blocks", "wide parts", "unequal blocks", "axes, four", "full"]
)
def test_corrected_layout(name: str) -> None:
    shape, options = LAYOUTS[name]
    assert_same(shape, damping=0.01, **options)


WITH_BLOCKS: list[dict[str, Any]] = [
    {},
    {"grafting": "adam"},
    {"clip": 0.5},
    {"residual": True},
    {"interval": 3, "start": 0.0},
    {"interval": 3, "start": 0.0, "residual": True, "eigenvalues": "kronecker"},
]


@pytest.mark.parametrize("options", WITH_BLOCKS, ids=str)
def test_blocks_with(options: dict[str, Any]) -> None:
    assert_same((8, 6), max_dim=3, **options)


@pytest.mark.parametrize("grafting", ["adam", "rms"])
def test_stacked_layers_have_sizes_of_their_own(grafting: str) -> None:
    assert_same([(4, 3), (4, 3), (3, 4)], grafting=grafting, clip=1.0)


def test_entries_of_adams_step_are_limited() -> None:
    """When gradients vanish, momentum outlives the mean square: entries of their quotient count as
    at most ten.
    """
    gradients = [
        [gradient if at < 3 else 0 * gradient] for at, gradient in enumerate(stream((4, 3), 30))
    ]
    assert_same((4, 3), gradients=gradients, grafting="adam", betas=(0.9, 0.05))


@pytest.mark.parametrize("structure", ["axes", "full"])
def test_bfloat16_bases(structure: str) -> None:
    assert_same((2, 3, 2), structure=structure, basis_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "options", [{"turn_first": True}, {"grafting": "adam"}, {"interval": 3, "start": 0.0}], ids=str
)
def test_bfloat16_bases_with(options: dict[str, Any]) -> None:
    assert_same((4, 3), basis_dtype=torch.bfloat16, **options)


def test_turning_first_what_has_taken_fewer_steps() -> None:
    shapes = [(4, 3), (4, 3), (3, 4)]
    gradients = [
        list(step) for step in zip(*(stream(s, 30, at) for at, s in enumerate(shapes)), strict=True)
    ]
    for step in gradients[:3]:
        step[1] = None
    assert_same(shapes, gradients=gradients, turn_first=True)


@pytest.mark.parametrize("turn_first", [False, True])
@pytest.mark.parametrize("shape", [(5, 3), (3,), (1,)], ids=str)
def test_two_vectors_as_curvature(shape: tuple[int, ...], turn_first: bool) -> None:
    """They are small here, so that second moments are far below the squares of momentum."""
    vectors = stream((2, *shape), 30, seed=5, scale=0.01)
    assert_same(shape, curvature=[{0: two} for two in vectors], turn_first=turn_first)


def test_two_vectors_beside_an_axis_of_one() -> None:
    vectors = stream((2, 3, 4, 1), 30, seed=5)
    assert_same((3, 4, 1), curvature=[{0: two} for two in vectors], structure="axes")


@pytest.mark.parametrize(
    "own",
    [{"rotation": bounded}, {"maps": partial(truncated_cayley, cap=0.5)}],
    ids=["rotation", "maps"],
)
def test_own_functions(own: dict[str, Any]) -> None:
    """Given as functions, they do what they do by name; quadratic maps do not: they are mended less
    often by name.
    """
    maps = "truncated" if "maps" in own else "quadratic"
    assert torch.equal(moved(**own), moved(maps=maps))


def moved(**options: Any) -> torch.Tensor:
    gradients = stream((5, 3), 6)
    param = torch.zeros(5, 3, dtype=torch.float64, requires_grad=True)
    optimizer = Spectral([param], lr=0.1, **options)
    for gradient in gradients:
        param.grad = torch.from_numpy(gradient)
        optimizer.step()
    return param.detach()
