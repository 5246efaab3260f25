"""Rows and columns of a step in the eigenbasis are evened out, whatever their sizes are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eigenstep.optim.matrix import UNEVEN, even_out_


def norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.double(), dim=(1, 2, 3), keepdim=True)


def evened(x: Tensor) -> Tensor:
    result = x.clone()
    size = norms(x).to(x.dtype).clamp_min(torch.finfo(x.dtype).tiny)
    return even_out_(result, size, torch.empty_like(result)) * result


def uneven(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.logspace(0, 3, shape[1] * shape[2], dtype=torch.float64)
    columns = torch.logspace(0, 2, shape[-1], dtype=torch.float64)
    entries = torch.randn(shape, generator=generator, dtype=torch.float64)
    return entries * rows.view(*shape[1:3], 1) * columns


@pytest.mark.parametrize("shape", [(2, 1, 6, 5), (3, 2, 8, 4)], ids=str)
def test_norms_stay(shape: tuple[int, ...]) -> None:
    x = uneven(*shape)
    torch.testing.assert_close(norms(evened(x)), norms(x))


def test_long_rows_and_columns_become_more_alike() -> None:
    x = uneven(1, 2, 8, 16)
    matrices = x.flatten(1, 2), evened(x).flatten(1, 2)
    for axis in (1, 2):
        before, after = (torch.linalg.vector_norm(y, dim=axis) for y in matrices)
        assert after.max() / after.mean() < 0.6 * before.max() / before.mean()


def test_singular_values_come_closer_as_orthogonalization_would_have_it() -> None:
    x = uneven(1, 1, 16, 16)
    before, after = (torch.linalg.svdvals(y[0, 0]) for y in (x, evened(x)))
    assert after[0] / after.mean() < 0.6 * before[0] / before.mean()


def test_faint_rows_do_not_grow_at_will() -> None:
    x = torch.ones(1, 1, 8, 4)
    x[0, 0, 0] = 1e-6
    others = evened(x)[0, 0, 1:].min()
    assert evened(x)[0, 0, 0].max() < 1e-6 * others * ((8 / 7 + UNEVEN) / UNEVEN) ** 0.5 * 1.001


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_any_size(size: float) -> None:
    x = torch.full((2, 1, 3, 4), size)
    x[0] = 1.0
    assert torch.isfinite(evened(x)).all()
    torch.testing.assert_close(evened(x)[0], x[0])
