"""What is counted is what there is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eigenstep import Spectral
from eigenstep_lab.bench.memory import LIMITS, MODELS, MODES, embedding_times, peak_of, state_of
from eigenstep_lab.bench.step import state_bytes, transformer_shapes


@pytest.mark.parametrize("mode", MODES)
def test_state_that_is_counted_is_the_state(mode: str) -> None:
    shapes = transformer_shapes(48, 1, [("embed.weight", (1100, 48))])
    params = [nn.Parameter(torch.randn(shape)) for _, shape in shapes]
    optimizer = Spectral(params, **MODES[mode])
    for param in params:
        param.grad = torch.randn(param.shape)
    optimizer.step()
    count = sum(param.numel() for param in params)
    assert state_of(shapes, MODES[mode]) == pytest.approx(state_bytes(optimizer) / count)
    assert peak_of(shapes, MODES[mode])["peak"] > 0


@pytest.mark.parametrize(("mode", "model", "limit"), LIMITS)
def test_limits(mode: str, model: str, limit: float) -> None:
    assert state_of(MODELS[model](12), MODES[mode]) <= limit


def test_embeddings_are_timed() -> None:
    assert all(ms > 0 for ms in embedding_times(2000, 1).values())
