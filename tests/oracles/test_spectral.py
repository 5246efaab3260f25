"""``Spectral`` with its defaults, its recipes and every way to turn, against the transcription: 30
steps, to 1e-9.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from .comparison import assert_same, stream
from .transcription import Tensor

SHAPES = [
    (),
    (1,),
    (4,),
    (1, 4),
    (4, 1),
    (5, 3),
    (3, 5),
    (4, 4),
    (9, 3),
    (2, 3, 2),
    (3, 2, 2, 2),
    (2, 5, 2, 3),
]
ROTATIONS, MAPS = ("bounded", "normalized", "moore_penrose"), ("quadratic", "truncated", "exact")
ANY_SIZE: list[dict[str, Any]] = [
    {},
    {"eigenvalues": "kronecker", "maps": "exact"},
    {"residual": True, "grafting": "adam"},
    {"rotation": "moore_penrose", "grafting": "rms", "clip": 0.5, "root": 1.0},
    {"rotation": "normalized", "residual": True, "damping": 0.1},
]
WAYS = list(itertools.product(ROTATIONS, MAPS))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_defaults(shape: tuple[int, ...]) -> None:
    assert_same(shape)


@pytest.mark.parametrize("shape", [(4,), (5, 3), (3, 6), (7, 3), (2, 3, 2)], ids=str)
def test_fast(shape: tuple[int, ...]) -> None:
    assert_same(shape, "fast")


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("shape", [(4,), (5, 3), (3, 7), (2, 3, 2)], ids=str)
def test_paper(shape: tuple[int, ...], interval: int) -> None:
    assert_same(shape, "paper", interval=interval)


@pytest.mark.parametrize("recipe", ["default", "paper"])
@pytest.mark.parametrize("first_is_zero", [False, True])
def test_eigenvalues_that_wait_for_the_bases(recipe: str, first_is_zero: bool) -> None:
    """With ``first_is_zero`` the scale is set by the first gradient that is learned from, not by
    the first of all.
    """
    gradients = [
        [g * (not (first_is_zero and at < 1))] for at, g in enumerate(stream((5, 3), 30, 1))
    ]
    assert_same((5, 3), recipe, gradients=gradients, interval=3, start=0.0, eigenvalues_wait=True)


@pytest.mark.parametrize("eigenvalues", ["corrected", "kronecker"])
@pytest.mark.parametrize(("rotation", "maps"), WAYS)
def test_every_way_to_turn(rotation: str, maps: str, eigenvalues: str) -> None:
    assert_same((5, 3), rotation=rotation, maps=maps, eigenvalues=eigenvalues)


@pytest.mark.parametrize(("rotation", "maps"), WAYS)
def test_residual(rotation: str, maps: str) -> None:
    assert_same((5, 3), rotation=rotation, maps=maps, residual=True)


@pytest.mark.parametrize("interval", [1, 3])
def test_residual_between_turns(interval: int) -> None:
    assert_same([(7, 3), (2, 2, 3)], residual=True, start=0.0, interval=interval, structure="axes")


@pytest.mark.parametrize("hidden", [0.3, 1e-2])
def test_strong_gradients_that_cancel_hide_weak_ones(hidden: float) -> None:
    """From rank one to noise and back: what strong gradients gain lengthens steps to three times
    Adam's at most.
    """
    random, gradients = np.random.default_rng(0), stream((6, 4), 14)
    one = np.outer(random.standard_normal(6), random.standard_normal(4))
    parts = [
        one * (-1) ** at + hidden * gradients[at] if at < 6 or at > 9 else gradients[at]
        for at in range(14)
    ]
    assert_same((6, 4), gradients=[[part] for part in parts], steps=14)


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": True}, {"nesterov": 0.0}, {"betas": (0.0, 0.95)}], ids=str
)
@pytest.mark.parametrize("noise", [1.0, 0.3, 0.03])
def test_gradients_that_swing(noise: float, options: dict[str, Any]) -> None:
    """From all to none of their own weight: gradients that oppose the momentum a little, mostly,
    always.
    """
    random, gradients = np.random.default_rng(0), stream((6, 4), 30)
    valley = random.standard_normal((6, 4))
    parts = [[valley * (-1) ** at + noise * gradient] for at, gradient in enumerate(gradients)]
    assert_same((6, 4), gradients=parts, **options)


def test_many_parameters_share_stacks() -> None:
    assert_same([(4, 3), (3,), (3, 4), (), (4, 3), (3,), (2, 2, 3)])


def test_parameters_without_gradients_wait() -> None:
    shapes = [(4, 3), (3, 4), (3,)]
    gradients = [
        list(step) for step in zip(*(stream(s, 30, at) for at, s in enumerate(shapes)), strict=True)
    ]
    for at, step in enumerate(gradients):
        step[at % 2] = None
        step[2] = None if at < 5 else step[2]
    assert_same(shapes, gradients=gradients)


ZERO: list[dict[str, Any]] = [
    {},
    {"residual": True},
    {"grafting": "adam", "betas": (0.95, 0.5)},
    {"relative_damping": False, "damping": 0.1},
    {"root": 1.0},
]


@pytest.mark.parametrize("options", ZERO, ids=str)
@pytest.mark.parametrize("zero", ["first", "later", "rows"])
def test_zero_gradients(zero: str, options: dict[str, Any]) -> None:
    shapes = [(4, 3), (5,)]
    gradients = list(zip(*(stream(s, 30, at) for at, s in enumerate(shapes)), strict=True))
    steps = {"first": range(3), "later": range(3, 15), "rows": range(30)}[zero]
    for at in steps:
        for gradient in gradients[at]:
            gradient[: 2 if zero == "rows" else None] = 0
    assert_same(shapes, gradients=gradients, **options)


@pytest.mark.parametrize("options", ANY_SIZE, ids=str)
def test_gradients_of_any_size(options: dict[str, Any]) -> None:
    """Side by side in one stack, gradients whose squares neither fit float64 nor are above zero in
    it.
    """
    assert_same([(4, 3), (4, 3), (3, 4)], units=[2.0**900, 2.0**-900, 1.0], **options)


def test_momentum_stays_where_it_is_while_bases_turn_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With orthogonal rotations, momentum in eigen-coordinates is the ordinary momentum of the
    parameter.
    """
    turn = Tensor.turn

    def turn_without_momentum(self: Tensor, rotations: list[np.ndarray], own: bool) -> None:
        momentum = self.unrotate(self.momentum)
        turn(self, rotations, own)
        self.momentum = self.rotate(momentum)

    monkeypatch.setattr(Tensor, "turn", turn_without_momentum)
    assert_same((5, 3), maps="exact")


@pytest.mark.parametrize("structure", ["kronecker", "axes", "full", "diagonal"])
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4)], ids=str)
def test_given_curvature(shape: tuple[int, ...], structure: str) -> None:
    vectors = stream((3, *shape), 30, seed=5)
    assert_same(
        [shape, shape], structure=structure, curvature=[{1: v} for v in vectors], damping=0.1
    )


def test_given_curvature_in_stacks_of_unequal_numbers() -> None:
    few, many = stream((2, 4, 3), 30, seed=5), stream((4, 3, 4), 30, seed=6)
    curvature = [{0: a, 2: b} for a, b in zip(few, many, strict=True)]
    assert_same([(4, 3), (4, 3), (3, 4)], curvature=curvature, eigenvalues="kronecker")


@pytest.mark.parametrize("maps", MAPS)
@pytest.mark.parametrize("recipe", ["default", "fast", "paper"])
def test_bfloat16_bases(recipe: str, maps: str) -> None:
    # Which the paper's maps do without
    mended = {"reorthonormalize": True} if maps == "quadratic" else {}
    assert_same([(4, 3), (3, 3), (5,)], recipe, maps=maps, basis_dtype=torch.bfloat16, **mended)


def test_bfloat16_residual() -> None:
    """Loosely: the residual is rounded in units of the largest gradient, of which formulas know
    nothing.
    """
    assert_same((4, 3), residual=True, basis_dtype=torch.bfloat16, tolerance=0.05)


@pytest.mark.parametrize("interval", [2, 3, 7])
def test_long_runs_turn_less_often(interval: int) -> None:
    assert_same((3, 2), steps=108, interval=interval)


def test_stream_is_anisotropic() -> None:
    """A stream whose gradients were isotropic, or diagonal, could not tell a right basis from a
    wrong one.
    """
    gradients = stream((5, 3), 200)
    second_moment = np.einsum("tia,tja->ij", gradients, gradients)
    values = np.linalg.eigvalsh(second_moment)
    correlation = second_moment / np.sqrt(np.outer(np.diag(second_moment), np.diag(second_moment)))
    assert values[-1] > 4 * values[0]
    assert abs(np.triu(correlation, 1)).max() > 0.2
