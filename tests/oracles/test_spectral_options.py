"""Each option of ``Spectral`` that changes what is computed, against the transcription: 30 steps,
to 1e-9.
"""

from functools import partial
from typing import Any

import pytest
import torch

from eigenstep import Spectral, Turning
from eigenstep.core.step import bounded, truncated_cayley

from .comparison import assert_same, gradients_of, stream

Options = dict[str, Any]
OPTIONS: dict[str, Options] = {
    "no momentum": {"betas": (0.0, 0.95)},
    "no momentum, no weight decay": {"betas": (0.0, 0.8), "weight_decay": 0.0},
    "other betas": {"betas": (0.7, 0.9)},
    "hardly any memory": {"betas": (0.9, 0.02)},
    "weight decay": {"weight_decay": 0.5},
    "cautious weight decay": {"weight_decay": 0.5, "cautious_weight_decay": True},
    "maximize": {"maximize": True, "weight_decay": 0.3, "cautious_weight_decay": True},
    "large eps": {"eps": 0.1},
    "plain momentum": {"nesterov": False},
    "Nesterov": {"nesterov": True, "betas": (0.8, 0.95)},
    "half Nesterov": {"nesterov": 0.5},
    "all Nesterov": {"nesterov": 1.0},
    "root 1": {"root": 1.0},
    "root 3": {"root": 3.0},
    "root 4": {"root": 4.0},
    "root 3.5": {"root": 3.5},
    "no damping": {"damping": 0.0},
    "much damping": {"damping": 0.3},
    "products, no damping": {"damping": 0.0, "eigenvalues": "kronecker"},
    "products, root": {"eigenvalues": "kronecker", "root": 3.5},
    "clip": {"clip": 0.5},
    "clip hardly": {"clip": 1.2},
    "clip alone": {"clip": 0.3, "grafting": False},
    "no grafting": {"grafting": False},
    "schedule": {"interval": [(0, 1), (4, 3), (20, 7)]},
    "slow basis": {"rate": 0.02},
    "gap": {"rotation": "moore_penrose", "gap": 0.3},
    "gap, normalized": {"rotation": "normalized", "gap": 0.3},
    "normalized, far": {"rotation": "normalized", "basis_lr": 1.3},
    "never mend": {"mend": False, "map": "truncated_cayley"},
    "never mend, rarely turning": {"mend": False, "map": "cayley", "interval": [(0, 5)]},
}
PAPER: dict[str, Options] = {
    "no momentum": {"betas": (0.0, 0.95), "weight_decay": 0.1},
    "cautious, up": {"weight_decay": 0.5, "cautious_weight_decay": True, "maximize": True},
    "root 1": {"root": 1.0},
    "root 3.5": {"root": 3.5},
    "AdaGrad": {"gamma": 0.0},
    "half decay": {"gamma": 0.5},
    "AdaGrad, exact": {"gamma": 0.0, "exact": True},
    "much damping": {"damping": 0.3},
    "much damping, exact": {"damping": 0.03, "exact": True},
    "clip": {"clip": 0.5},
    "no clip": {"clip": None},
    "rarely": {"interval": 5},
    "schedule": {"interval": [(0, 1), (4, 3), (20, 7)]},
    "far": {"basis_lr": 1.9},
    "gap": {"gap": 0.4},
    "mend": {"mend": True},
    "exact": {"exact": True, "interval": 1},
    "full": {"structure": "full"},
    "diagonal": {"structure": "diagonal"},
    "blocks": {"structure": "auto", "max_dim": 4, "max_ratio": 1.0},
    "fused": {"sizes": [2, 3]},
}
LAYOUTS: dict[str, tuple[tuple[int, ...], Options]] = {
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
    "stack": ((2, 16, 17), {}),
    "one matrix of a stack": ((2, 16, 17), {"structure": "kronecker", "max_dim": 16}),
    "counted": ((3, 4, 2), {"batch_dims": 1}),
    "counted twice": ((2, 3, 4, 2), {"batch_dims": 2}),
    "fused": ((9, 3), {"sizes": [4, 5]}),
    "fused columns": ((3, 9), {"sizes": (2, 3, 4), "axis": 1}),
    "heads": ((8, 3), {"heads": 2}),
    "some with heads": ((10, 3), {"sizes": [6, 4], "heads": [3, 1]}),
    "fused, single rows": ((6, 4), {"sizes": [1, 4, 1]}),
    "full": ((2, 3), {"structure": "full"}),
    "full vector": ((5,), {"structure": "full"}),
    "full, too long": ((4, 3), {"structure": "full", "max_dim": 11}),
    "diagonal": ((4, 3), {"structure": "diagonal"}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option(name: str) -> None:
    assert_same([(5, 3), (4,)], **OPTIONS[name])


@pytest.mark.parametrize("name", PAPER)
def test_paper(name: str) -> None:
    assert_same([(5, 3), (4,)], "paper", **PAPER[name])


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name: str) -> None:
    shape, options = LAYOUTS[name]
    assert_same(shape, eigenvalues="kronecker", damping=0.01, **options)


CORRECTED = (
    "parts and blocks",
    "wide parts",
    "unequal blocks",
    "some with heads",
    "fused, single rows",
    "stack",
    "full",
)


@pytest.mark.parametrize("name", CORRECTED)
def test_corrected_layout(name: str) -> None:
    shape, options = LAYOUTS[name]
    assert_same(shape, damping=0.01, **options)


def test_embeddings() -> None:
    """Step as AdamW does, for which tokens that do not occur have gradients that are zero."""
    gradients = stream((1024, 32), 3)
    for at, gradient in enumerate(gradients):
        gradient[at::3] = 0
    assert_same((1024, 32), steps=3, gradients=[[gradient] for gradient in gradients])


WITH_BLOCKS: list[Options] = [
    {"grafting": False},
    {"clip": 0.5},
    {"interval": [(0, 3)]},
    {"interval": [(0, 3)], "eigenvalues": "kronecker"},
]


@pytest.mark.parametrize("options", WITH_BLOCKS, ids=str)
def test_blocks_with(options: Options) -> None:
    assert_same((8, 6), max_dim=3, **options)


def test_batches_have_sizes_of_their_own() -> None:
    assert_same([(4, 3), (4, 3), (3, 4)], grafting=False, clip=0.5)


@pytest.mark.parametrize("recipe", ["default", "paper"])
def test_some_have_taken_fewer_steps(recipe: str) -> None:
    shapes = [(4, 3), (4, 3), (3, 4)]
    gradients = gradients_of(shapes)
    for step in gradients[:3]:
        step[1] = None
    assert_same(shapes, recipe, gradients=gradients)


@pytest.mark.parametrize("recipe", ["default", "paper"])
@pytest.mark.parametrize("shape", [(5, 3), (3,), (1,), (3, 4, 1)], ids=str)
def test_two_vectors_as_curvature(shape: tuple[int, ...], recipe: str) -> None:
    """They are small here, so that second moments are far below the squares of momentum."""
    vectors = stream((2, *shape), 30, seed=5, scale=0.01)
    assert_same(shape, recipe, curvature=[{0: two} for two in vectors])


@pytest.mark.parametrize(
    ("own", "named"),
    [
        (Turning(bounded, "truncated_cayley"), Turning("bounded", "truncated_cayley")),
        (Turning(map=partial(truncated_cayley, cap=0.6)), Turning(map="truncated_cayley")),
        (Turning(rate=0.1, map="quadratic"), None),
    ],
    ids=["rotation", "map", "defaults"],
)
def test_functions_do_what_they_do_by_name(own: Turning, named: Turning | None) -> None:
    assert torch.equal(moved(own), moved(named))


def moved(turning: Turning | None) -> torch.Tensor:
    param = torch.zeros(5, 3, dtype=torch.float64, requires_grad=True)
    optimizer = Spectral([param], lr=0.1, turning=turning)
    for gradient in stream((5, 3), 6):
        param.grad = torch.from_numpy(gradient)
        optimizer.step()
    return param.detach()
