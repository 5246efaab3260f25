"""``Spectral`` with its defaults, its recipes and every way to turn, against the transcription: 30
steps, to 1e-9.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from eigenstep import Spectral
from eigenstep.optim import batches

from . import transcription
from .comparison import assert_same, gradients_of, stream
from .transcription import Tensor, Turn

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
ROTATIONS = ("bounded", "pairwise", "normalized", "moore_penrose")
MAPS = ("quadratic", "truncated_cayley", "cayley")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_defaults(shape: tuple[int, ...]) -> None:
    assert_same(shape)


@pytest.mark.parametrize("shape", [(3, 6), (7, 3), (2, 3, 2)], ids=str)
def test_fast(shape: tuple[int, ...]) -> None:
    assert_same(shape, "fast")


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("shape", [(4,), (5, 3), (3, 7), (2, 3, 2)], ids=str)
def test_paper(shape: tuple[int, ...], interval: int) -> None:
    assert_same(shape, "paper", interval=interval)


@pytest.mark.parametrize(("rotation", "name"), list(itertools.product(ROTATIONS, MAPS)))
def test_every_way_to_turn(rotation: str, name: str) -> None:
    assert_same((5, 3), rotation=rotation, map=name)


@pytest.mark.parametrize("name", MAPS)
def test_kronecker_eigenvalues(name: str) -> None:
    assert_same([(5, 3), (4,)], map=name, eigenvalues="kronecker")


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


def test_many_parameters_share_batches() -> None:
    assert_same([(4, 3), (3,), (3, 4), (), (4, 3), (3,), (2, 2, 3)])


def test_parameters_without_gradients_wait() -> None:
    shapes = [(4, 3), (3, 4), (3,)]
    gradients = gradients_of(shapes)
    for at, step in enumerate(gradients):
        step[at % 2] = None
        step[2] = None if at < 5 else step[2]
    assert_same(shapes, gradients=gradients)


ZERO: list[tuple[str, dict[str, Any]]] = [
    ("default", {}),
    ("default", {"root": 1.0}),
    ("default", {"eigenvalues": "kronecker"}),
    ("paper", {}),
    ("paper", {"damping": 0.1}),
]


@pytest.mark.parametrize(("recipe", "options"), ZERO, ids=str)
@pytest.mark.parametrize("zero", ["first", "later", "rows"])
def test_zero_gradients(zero: str, recipe: str, options: dict[str, Any]) -> None:
    shapes = [(4, 3), (5,)]
    gradients = gradients_of(shapes)
    steps = {"first": slice(3), "later": slice(3, 15), "rows": slice(30)}[zero]
    for gradient in itertools.chain(*gradients[steps]):
        gradient[: 2 if zero == "rows" else None] = 0
    assert_same(shapes, recipe, gradients=gradients, **options)


def test_products_of_eigenvalues_have_a_least_damping() -> None:
    """Where rows have had no gradient, their eigenvalue would vanish in few steps otherwise."""
    gradients = gradients_of([(4, 3)], 20)
    for (gradient,) in gradients[:12]:
        gradient[:2] = 0
    options = {"betas": (0.9, 0.02), "damping": 0.0, "grafting": False}
    assert_same((4, 3), gradients=gradients, steps=20, eigenvalues="kronecker", **options)


ANY_SIZE: list[dict[str, Any]] = [
    {},
    {"eigenvalues": "kronecker", "map": "cayley"},
    {"rotation": "moore_penrose", "grafting": False, "clip": 0.5},
    {"rotation": "normalized", "damping": 0.1},
]


@pytest.mark.parametrize("options", ANY_SIZE, ids=str)
def test_gradients_of_any_size(options: dict[str, Any]) -> None:
    """Side by side in one batch, gradients whose squares neither fit float64 nor are above zero in
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

    def turn_without_momentum(self: Tensor, rotations: list[np.ndarray], now: Turn) -> None:
        momentum = self.unrotate(self.momentum)
        turn(self, rotations, now)
        self.momentum = self.rotate(momentum)

    monkeypatch.setattr(Tensor, "turn", turn_without_momentum)
    assert_same((5, 3), map="cayley")


@pytest.mark.parametrize("structure", ["kronecker", "full", "diagonal"])
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4)], ids=str)
def test_given_curvature(shape: tuple[int, ...], structure: str) -> None:
    vectors = stream((3, *shape), 30, seed=5)
    assert_same(
        [shape, shape], structure=structure, curvature=[{1: v} for v in vectors], damping=0.1
    )


def test_given_curvature_of_unequal_numbers() -> None:
    few, many = stream((2, 4, 3), 30, seed=5), stream((4, 3, 4), 30, seed=6)
    curvature = [{0: a, 2: b} for a, b in zip(few, many, strict=True)]
    assert_same([(4, 3), (4, 3), (3, 4)], curvature=curvature, eigenvalues="kronecker")


BFLOAT16: list[tuple[str, dict[str, Any]]] = [
    *(("default", {"map": name, "dtype": torch.bfloat16}) for name in MAPS),
    ("fast", {"dtype": torch.bfloat16}),
    ("default", {"dtype": torch.bfloat16, "structure": "full"}),
    ("paper", {"basis_dtype": torch.bfloat16}),
    ("paper", {"basis_dtype": torch.bfloat16, "exact": True, "mend": True}),
]


@pytest.mark.parametrize(("recipe", "options"), BFLOAT16, ids=str)
def test_bfloat16_bases(recipe: str, options: dict[str, Any]) -> None:
    assert_same([(4, 3), (3, 3), (2, 3, 2), (5,)], recipe, **options)


@pytest.mark.parametrize("recipe", ["default", "paper"])
def test_turns_become_rare(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does mending, where an interval of three steps is reached in twenty."""
    monkeypatch.setattr(batches, "EARLY", 10)
    monkeypatch.setattr(transcription, "EARLY_STEPS", 10)
    assert_same([(3, 2), (2, 3)], recipe, steps=45, interval=3)


def test_the_first_hundred_steps_turn() -> None:
    assert_same((3, 2), steps=108, interval=7)


def test_speed_is_the_length_of_the_last_turn() -> None:
    oracle = transcription.Oracle([np.zeros((8, 3))], transcription.DEFAULTS)
    param = torch.zeros(8, 3, dtype=torch.float64, requires_grad=True)
    optimizer = Spectral([param])
    for gradient in stream((8, 3), 4):
        param.grad = torch.tensor(gradient)
        optimizer.step()
        oracle.step([gradient])
    (tensor,) = oracle.tensors[0]
    assert isinstance(tensor, Tensor)
    for at, factor in enumerate(tensor.factors):
        speeds = optimizer.state[param][f"speed_{at}"].flatten().tolist()
        assert speeds == pytest.approx(factor.speeds, rel=1e-9)


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
