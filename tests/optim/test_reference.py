"""The default step written out in ``examples/spectral_in_100_lines.py`` is that of ``Spectral``."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eigenstep import Spectral

EXAMPLE = Path(__file__).parents[2] / "examples" / "spectral_in_100_lines.py"
STEPS = 200
Shape = tuple[int, int]
Stream = Callable[[Shape], Iterator[Tensor]]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def random(shape: Shape) -> Iterator[Tensor]:
    spread = torch.logspace(0, -3, shape[1], dtype=torch.float64)
    while True:
        yield randn(*shape) * spread


def low_rank(shape: Shape) -> Iterator[Tensor]:
    while True:
        yield randn(shape[0], 2) @ randn(2, shape[1])


def swinging(shape: Shape) -> Iterator[Tensor]:
    valley = randn(*shape)
    while True:
        yield valley + 0.1 * randn(*shape)
        yield -valley + 0.1 * randn(*shape)


def vanishing(shape: Shape) -> Iterator[Tensor]:
    """All zero at the start and now and then, and ever smaller."""
    for step in range(STEPS):
        silent = step < 3 or step % 7 == 0
        yield torch.zeros(shape, dtype=torch.float64) if silent else randn(*shape) * 0.7**step


def growing(shape: Shape) -> Iterator[Tensor]:
    """Slopes that change and grow: steps are as large as they may be, and bases turn far."""
    for step in range(STEPS):
        if step % 10 == 0:
            slope = 10.0 ** (step // 20) * randn(*shape)
        yield slope + 0.1 * randn(*shape)


@pytest.mark.parametrize("stream", [random, low_rank, swinging, vanishing, growing])
@pytest.mark.parametrize("shape", [(8, 4), (5, 9), (16, 16), (12, 7)])
def test_the_hundred_lines_are_the_default_step(shape: Shape, stream: Stream) -> None:
    torch.manual_seed(0)
    written_out = runpy.run_path(str(EXAMPLE))["SpectralMatrix"]
    weights = randn(*shape)
    twin = written_out(weights.clone(), lr=1e-3, weight_decay=0.1)
    optimizer = Spectral([weights], lr=1e-3, weight_decay=0.1)
    gradients = stream(shape)
    for _ in range(STEPS):
        weights.grad = next(gradients)
        optimizer.step()
        twin.step(weights.grad)
        torch.testing.assert_close(twin.W, weights, rtol=0.0, atol=1e-12)
