"""Steps in the eigenbasis are evened out and made nearly orthogonal, whatever their sizes are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eigenstep import Spectral
from eigenstep.core.maps import orthogonalize
from eigenstep.optim.kernel import UNEVEN, _even_out
from eigenstep.optim.layout import hidden


def norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.double(), dim=tuple(range(1, x.ndim)), keepdim=True)


def evened(x: Tensor, orthogonally: bool = False) -> Tensor:
    result = x.clone()
    size = norms(x).to(x.dtype).clamp_min(torch.finfo(x.dtype).tiny)
    return _even_out(result, size, torch.empty_like(result), orthogonally) * result


def orthogonal(x: Tensor) -> Tensor:
    result = x[None].clone()
    orthogonalize(result, torch.empty_like(result))
    return result[0]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uneven(*shape: int) -> Tensor:
    rows = torch.logspace(0, 3, shape[1] * shape[2], dtype=torch.float64).view(1, *shape[1:3], *[1] * (len(shape) - 3))
    columns = torch.logspace(0, 2, shape[-1], dtype=torch.float64)
    return random(*shape) * rows * columns


@pytest.mark.parametrize("orthogonally", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 6, 5), (3, 2, 8, 4), (2, 1, 4, 9), (2, 1, 3, 4, 5)], ids=str)
def test_norms_stay(shape: tuple[int, ...], orthogonally: bool) -> None:
    x = uneven(*shape)
    torch.testing.assert_close(norms(evened(x, orthogonally)), norms(x))


def test_long_rows_and_columns_become_more_alike() -> None:
    x = uneven(1, 2, 8, 16)
    for before, after in ((x.flatten(1, 2), evened(x).flatten(1, 2)), (x.flatten(1, 2).mT, evened(x).flatten(1, 2).mT)):
        sizes = [torch.linalg.vector_norm(y, dim=-1) for y in (before, after)]
        assert sizes[1].max() / sizes[1].mean() < 0.6 * sizes[0].max() / sizes[0].mean()


def test_singular_values_come_closer_as_orthogonalization_would_have_it() -> None:
    x = uneven(1, 1, 16, 16)
    before, after = (torch.linalg.svdvals(y[0, 0]) for y in (x, evened(x)))
    assert after[0] / after.mean() < 0.6 * before[0] / before.mean()


def test_faint_rows_do_not_grow_at_will() -> None:
    x = torch.ones(1, 1, 8, 4)
    x[0, 0, 0] = 1e-6
    others = evened(x)[0, 0, 1:].min()
    assert evened(x)[0, 0, 0].max() < 1e-6 * others * ((8 / 7 + UNEVEN) / UNEVEN) ** 0.5 * 1.001


@pytest.mark.parametrize("orthogonally", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
def test_any_size(size: float, orthogonally: bool) -> None:
    x = torch.full((2, 1, 3, 4), size)
    x[0] = 1.0
    assert torch.isfinite(evened(x, orthogonally)).all()
    torch.testing.assert_close(evened(x, orthogonally)[0], x[0])


@pytest.mark.parametrize("shape", [(40, 8), (8, 40), (24, 24)], ids=str)
@pytest.mark.parametrize("condition", [1.0, 3.0, 15.0])
def test_singular_values_end_close_to_one_and_vectors_stay(shape: tuple[int, int], condition: float) -> None:
    rank = min(shape)
    left, _, right = torch.linalg.svd(random(*shape), full_matrices=False)
    values = torch.linspace(1.0, condition, rank, dtype=torch.float64)
    values /= values.norm()
    found = orthogonal(left * values @ right)
    gains = (left.mT @ found @ right.mT).diagonal()
    assert (gains - 1).abs().max() < 0.22
    torch.testing.assert_close(left * gains @ right, found)


def test_faint_singular_values_grow_seventeen_times_at_most() -> None:
    left, _, right = torch.linalg.svd(random(12, 12))
    values = torch.ones(12, dtype=torch.float64)
    values[-1] = 1e-4
    found = torch.linalg.svdvals(orthogonal(left * values @ right / values.norm()))
    assert found[-1] / found[0] < 18e-4


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(84, 96), (64, 96), (96, 96), (384, 96), (96, 384), (84, 96)], {(96, 96), (384, 96), (96, 384)}),  # GPT
        ([(500, 32), (32, 32), (7, 32)], {(32, 32)}),  # words, a hidden layer, classes
        ([(16, 3, 3, 3), (32, 16, 3, 3), (32, 32, 3, 3), (10, 32)], {(32, 16, 3, 3), (32, 32, 3, 3)}),
        ([(64, 49), *[(192, 64), (64, 64)] * 3, (10, 64)], {(192, 64), (64, 64)}),  # fused projections repeat
        ([(40, 20), (8, 64, 32), (8, 32, 64)], {(8, 64, 32), (8, 32, 64)}),  # experts
        ([(8, 64), (64, 8), (64,), (8, 64), (64, 8)], {(8, 64), (64, 8)}),  # low-rank adapters
        ([(32, 784), (8, 32), (32, 8), (784, 32)], {(8, 32), (32, 8)}),  # an autoencoder
        ([(10, 20)], set()),
        ([], set()),
    ],
)
def test_shapes_of_hidden_layers(shapes: list[tuple[int, ...]], expected: set[tuple[int, ...]]) -> None:
    axes = [int(shape[0] == 8 and len(shape) == 3) for shape in shapes]
    assert hidden(zip(shapes, axes, strict=True)) == expected


def test_layers_added_later_make_others_hidden() -> None:
    """Until something takes in what a matrix puts out, it is the output."""
    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in ((6, 5), (8, 6), (6, 8))]
    first, whole = (Spectral(weights[:2], orthogonalize="hidden") for _ in range(2))
    whole.add_param_group({"params": weights[2:]})
    gradients = [random(*weight.shape, seed=k).float() for k, weight in enumerate(weights)]
    moved = []
    for optimizer in (first, whole):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.data.fill_(1.0)
            weight.grad = gradient
        optimizer.step()
        moved.append(weights[1].detach().clone())
    assert not torch.equal(*moved)
    assert first.summary()[1].flops < whole.summary()[1].flops
