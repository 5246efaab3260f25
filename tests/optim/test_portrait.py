"""Checkpoints without bases: what is in them, what comes back, and that training goes on."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigenstep import Spectral

from .test_contract import assert_same_state
from .test_storage import EIGHT, MATRICES, go, parameters


def stepped(shape: tuple[int, ...], **options: Any) -> tuple[nn.Parameter, Spectral]:
    """Return a weight after steps whose gradients have eigenvectors of their own."""
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = Spectral([w], **options)
    left, right = (torch.randn(n, n, generator=generator, dtype=torch.float64) for n in shape[-2:])
    for _ in range(30):
        w.grad = left @ torch.randn(shape, generator=generator, dtype=torch.float64) @ right
        optimizer.step()
    return w, optimizer


@pytest.mark.parametrize("shape", [(6, 9), (3, 16, 16), (40, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"eigenvalues": "kronecker"}], ids=str)
def test_files_have_momentum_and_a_portrait(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Its singular vectors are the eigenvectors, in the order of eigenvalues, as a decomposition
    says.
    """
    w, optimizer = stepped(shape, **options)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    own = optimizer.state[w]
    saved = optimizer.state_dict(bases=False)["state"][0]
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)
    left, right = own["basis_0"], own["basis_1"]
    assert not any(name.startswith("basis") for name in saved)
    torch.testing.assert_close(saved["momentum"], left @ own["momentum"] @ right.mT)
    found, sizes, other = torch.linalg.svd(saved["portrait"].double(), full_matrices=False)
    rank = sizes.shape[-1]
    torch.testing.assert_close(
        sizes, torch.linspace(4, 1, rank).double().expand_as(sizes), rtol=0.01, atol=0
    )
    for vectors, basis, axis in ((found, left, 0), (other.mT, right, 1)):
        order = own[f"eigs_{axis}"].argsort(descending=True)[..., None, :rank]
        known = torch.take_along_dim(basis, order, -1)
        assert ((vectors * known).sum(-2).abs() > 0.99).all()


@pytest.mark.parametrize("shape", [(3, 16, 16), (24, 24)], ids=str)
@pytest.mark.parametrize("options", [{}, {"eigenvalues": "kronecker"}], ids=str)
def test_curvature_comes_back(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """The Kronecker product is the one that was saved; and momentum, in the weights' own
    coordinates.
    """
    w, optimizer = stepped(shape, **options)
    own = {name: value.clone() for name, value in optimizer.state[w].items()}
    optimizer.load_state_dict(optimizer.state_dict(bases=False))
    new = optimizer.state[w]
    assert new.keys() == own.keys()
    for axis in (0, 1):
        one, two = (
            s[f"basis_{axis}"] * s[f"eigs_{axis}"][..., None, :] @ s[f"basis_{axis}"].mT
            for s in (new, own)
        )
        assert (
            torch.linalg.matrix_norm(one - two).max() <= 0.02 * torch.linalg.matrix_norm(two).max()
        )
    one, two = (s["basis_0"] @ s["momentum"] @ s["basis_1"].mT for s in (new, own))
    torch.testing.assert_close(one, two)
    if "second_moment" in new:  # in the new order of eigenvectors, rounded to bfloat16
        rows, columns = (own[f"eigs_{axis}"].argsort(descending=True) for axis in (0, 1))
        moved = torch.take_along_dim(own["second_moment"], rows[..., None], -2)
        moved = torch.take_along_dim(moved, columns[..., None, :], -1)
        least = (new["momentum"] / new["scale"].view(-1, 1, 1, 1)).square()
        torch.testing.assert_close(
            new["second_moment"], torch.maximum(moved, least), rtol=0.01, atol=0
        )


def test_directions_that_a_portrait_cannot_show_share_their_curvature() -> None:
    """Of 40 rows and 4 columns in blocks of 8 x 4, four rows of a block: any basis of these will
    do.
    """
    w, optimizer = stepped((40, 4))
    own, saved = optimizer.state[w], optimizer.state_dict(bases=False)["state"][0]
    kept, rest = own["eigs_0"].sort(descending=True).values.split(4, -1)
    rest = rest.mean(-1, keepdim=True).expand_as(rest)
    torch.testing.assert_close(saved["eigs_0"], torch.cat([kept, rest], -1))
    rows = own["eigs_0"].argsort(descending=True)[..., 4:, None]
    columns = own["eigs_1"].argsort(descending=True)[..., None, :]
    rest = torch.take_along_dim(
        torch.take_along_dim(own["second_moment"], rows, -2), columns, -1
    ).mean(-2)
    for row in range(4, 8):
        torch.testing.assert_close(
            saved["second_moment"][..., row, :].double(), rest, rtol=0.01, atol=0
        )


def test_a_single_basis_has_no_portrait() -> None:
    params = parameters([(6, 5, 4)])
    optimizer = Spectral(params, structure="full")
    go(params, optimizer, 0, 3)
    assert_same_state(optimizer.state_dict(bases=False), optimizer.state_dict())


@pytest.mark.parametrize("entry", [0.0, 1e30])
def test_whatever_a_portrait_shows_bases_are_orthogonal(entry: float) -> None:
    params = parameters([(40, 32)])
    optimizer = Spectral(params)
    go(params, optimizer, 0, 2)
    saved = optimizer.state_dict(bases=False)
    saved["state"][0]["portrait"].fill_(entry)
    optimizer.load_state_dict(saved)
    for axis in (0, 1):
        basis = optimizer.state[params[0]][f"basis_{axis}"]
        torch.testing.assert_close(
            basis @ basis.mT, torch.eye(basis.shape[-1])[None, None], rtol=0, atol=1e-5
        )
    assert all(torch.isfinite(w).all() for w in go(params, optimizer, 2, 4))


@pytest.mark.parametrize("options", [EIGHT, {"max_dim": 9}], ids=str)
def test_any_optimizer_can_go_on(options: dict[str, Any]) -> None:
    params = parameters([*MATRICES, (13, 20)])
    optimizer = Spectral(params, **options)
    middle = go(params, optimizer, 0, 5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(bases=False), file)
    file.seek(0)
    again = [nn.Parameter(w.clone()) for w in middle]
    other = Spectral(again)
    other.load_state_dict(torch.load(file, weights_only=True))
    end = go(again, other, 5, 8)
    assert [set(other.state[w]) for w in again] == [set(optimizer.state[w]) for w in params]
    for w, old in zip(end, middle, strict=True):
        assert 0 < (w - old).square().mean().sqrt() <= 3 * 3 * 1e-3 + 1e-4


def test_a_part_of_the_bases_is_refused() -> None:
    params = parameters([(8, 4)])
    optimizer = Spectral(params)
    go(params, optimizer, 0, 1)
    saved = optimizer.state_dict()
    saved["state"][0] = {
        name: value for name, value in saved["state"][0].items() if name != "basis_1"
    }
    with pytest.raises(ValueError, match="must have the entries"):
        optimizer.load_state_dict(saved)


def test_training_goes_on_as_well() -> None:
    assert trained(cut=True) <= 1.005 * trained(cut=False)


def trained(cut: bool) -> float:
    """Return the loss of a small network on new data; half-way, a file replaces the optimizer."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(16, 16, generator=generator)
    teacher = torch.randn(16, 6, generator=generator) / 8
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 6))

    def loss(count: int) -> Tensor:
        inputs = torch.randn(count, 16, generator=generator) @ mixing
        noise = torch.randn(count, 6, generator=generator)
        targets = torch.tanh(inputs @ teacher) + 0.7 * noise
        return nn.functional.cross_entropy(model(inputs), targets.argmax(-1))

    optimizer = Spectral(model.parameters(), lr=1e-2)
    for step in range(160):
        if cut and step == 60:
            saved = copy.deepcopy(optimizer.state_dict(bases=False))
            optimizer = Spectral(model.parameters())
            optimizer.load_state_dict(saved)
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 160)
        optimizer.zero_grad()
        loss(64).backward()
        optimizer.step()
    return loss(4096).item()


def test_second_moments_of_double_precision_fit_two_bytes() -> None:
    """What float64 holds beyond the range of bfloat16 is cut, and can be loaded."""
    weight = nn.Parameter(torch.zeros(6, 4))
    optimizer = Spectral([weight], state_dtype=torch.float64)
    weight.grad = torch.randn(6, 4)
    optimizer.step()
    optimizer.state[weight]["second_moment"][0, 0, 0, 0] = 1e60
    optimizer.load_state_dict(optimizer.state_dict(bases=False))
    loaded = optimizer.state[weight]["second_moment"]
    assert loaded.isfinite().all()
    assert loaded.max() > 1e38
