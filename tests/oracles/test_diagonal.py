"""What has no basis, in flat tensors that many share and that are stepped in chunks: against the transcription."""

from typing import Any

import pytest
import torch

from eigenstep import Spectral
from eigenstep.optim import diagonal

from .comparison import assert_same, stream

SHAPES = [(40,), (3,), (), (7, 5), (16,), (5,), (13,)]
"""With chunks of 16 entries: one that is cut, some that share one, one that fills one."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.3},
    {"clip": 0.2},
    {"maximize": True, "weight_decay": 0.1},
    {"betas": (0.0, 0.9), "eps": 0.1},
    {"root": 1.0, "decay": 0.5, "grafting": None, "clip": 1.0},
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagonal, "CHUNK", 16)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_chunks(options: dict[str, Any]) -> None:
    assert_same(SHAPES, steps=8, structure="diagonal", **options)


def test_some_have_taken_fewer_steps() -> None:
    gradients = [list(step) for step in zip(*(stream(s, 8, at) for at, s in enumerate(SHAPES)), strict=True)]
    for at, step in enumerate(gradients[:6]):
        for number in range(len(SHAPES)):
            if (number + at) % 3 == 0:
                step[number] = None
    assert_same(SHAPES, gradients=gradients, steps=8, structure="diagonal", weight_decay=0.1)


@pytest.mark.parametrize("numbers", [(0,), (1, 3), (4, 5, 6)], ids=str)
def test_given_curvature(numbers: tuple[int, ...]) -> None:
    vectors = [
        {number: stream((1 + number % 3, *SHAPES[number]), 8, 9 + number)[at] for number in numbers} for at in range(8)
    ]
    assert_same(SHAPES, steps=8, structure="diagonal", curvature=vectors, grafting=None)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=torch.float64)], ids=["number", "tensor"])
def test_flat_tensors_are_where_every_parameter_finds_its_own_state(lr: Any) -> None:
    """Also after parameters that have taken different numbers of steps were copied, which loses the flat tensors."""
    params = [torch.tensor(stream(shape, 1, 5)[0], requires_grad=True) for shape in SHAPES]
    twins = [param.detach().clone().requires_grad_() for param in params]
    optimizer = Spectral(params, lr, structure="diagonal", weight_decay=0.1)
    adamw = torch.optim.AdamW(twins, 0.1, (0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for at in range(8):
        for number, (param, twin, shape) in enumerate(zip(params, twins, SHAPES, strict=True)):
            gradient = None if at < number else torch.tensor(stream(shape, 8, number)[at])
            param.grad, twin.grad = gradient, None if gradient is None else gradient.clone()
        optimizer.step()
        adamw.step()
        if at % 3 == 2:
            optimizer.load_state_dict(optimizer.state_dict())
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            optimizer.state[param]["momentum"].flatten() * (1 - 0.9 ** adamw.state[twin]["step"].double()),
            adamw.state[twin]["exp_avg"].flatten(),
            rtol=1e-12,
            atol=1e-12,
        )


@pytest.mark.parametrize("options", [{}, {"clip": 0.3, "grafting": None}], ids=str)
def test_parts_of_parameters(options: dict[str, Any]) -> None:
    """Of fused projections, single rows have no basis beside matrices that have: they step as they would alone."""
    whole, sizes = torch.tensor(stream((6, 5), 1, 5)[0], requires_grad=True), [1, 4, 1]
    parts = [part.clone().requires_grad_() for part in whole.detach().split(sizes)]
    fused = Spectral([whole], split_sizes=sizes, weight_decay=0.1, **options)
    separate = Spectral(parts, weight_decay=0.1, **options)
    for at in range(6):
        whole.grad = torch.tensor(stream((6, 5), 6, 1)[at])
        for part, gradient in zip(parts, whole.grad.split(sizes), strict=True):
            part.grad = gradient.clone()
        vectors = torch.tensor(stream((2, 6, 5), 6, 2)[at])
        given = at % 2 == 1
        fused.step(curvature={whole: vectors} if given else {})
        separate.step(curvature=dict(zip(parts, vectors.split(sizes, dim=1), strict=True)) if given else {})
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-12, atol=1e-12)
