"""Checkpoints without bases: in their place one matrix of the weights' shape.

It is a portrait of the curvature, ``P = B0[:, :r] Diag(4, ..., 1) B1[:, :r]^T`` with
``r = min(n0, n1)`` and columns in the order of eigenvalues, in two bytes per entry. Bases are
learned anew as the eigenvectors of ``P P^T`` and ``P^T P``, but for the least directions of a
longer side. Even distances make them easy to tell apart: the core's own ``update`` finds them in 20
turns, whatever their number. Second moments keep to the same order, also in two bytes; momentum is
saved in the weights' own coordinates, for the signs of eigenvectors are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..core.curvature import Dense
from ..core.matrices import Full
from ..core.step import Turning, rotate
from ..core.update import update
from .formats import State, pack_, unpack

PORTRAIT = "portrait"
MOMENT = "second_moment"
MOMENTUM = "momentum"
BASIS = "basis"
LARGEST_SINGULAR_VALUE = 4.0
TURNS = 20
"""16 are enough for sides of 1024."""


def without_bases(state: State) -> State:
    """Return a copy of a parameter's state with portraits instead of bases."""
    saved = {name: value.clone() for name, value in state.items()}
    for suffix, kept in _matrices(state):
        own = unpack(kept)
        bases = [own[f"{BASIS}_{axis}"] for axis in (0, 1)]
        rank = min(basis.shape[-1] for basis in bases)
        if MOMENTUM in own:
            own[MOMENTUM] = rotate(own[MOMENTUM], [basis.mT for basis in bases])
        sides = [_sort_side_(own, axis, rank) for axis in (0, 1)]
        pack_({name: saved[name + suffix] for name in kept}, own)
        saved[PORTRAIT + suffix] = _portrait(sides, rank)
        moment = saved.get(MOMENT + suffix)
        if moment is not None and moment.is_floating_point():
            largest = torch.finfo(torch.bfloat16).max
            saved[MOMENT + suffix] = moment.clamp_max(largest).bfloat16()
        for axis in (0, 1):
            del saved[f"{BASIS}_{axis}{suffix}"]
    return saved


def _sort_side_(own: State, axis: int, rank: int) -> Tensor:
    """Put the eigenvalues of a side in order; return its first eigenvectors."""
    eigs = own[f"eigs_{axis}"]
    order = eigs.argsort(dim=-1, descending=True)
    basis = own[f"{BASIS}_{axis}"].to(eigs.dtype)
    own[f"eigs_{axis}"] = _sorted(eigs, order, -1, rank)
    if MOMENT in own:
        own[MOMENT] = _sorted(own[MOMENT], order.unsqueeze(-1 - axis), axis - 2, rank)
    return torch.take_along_dim(basis, order[..., None, :], -1)[..., :rank]


def _portrait(sides: list[Tensor], rank: int) -> Tensor:
    like = sides[0]
    sizes = torch.linspace(LARGEST_SINGULAR_VALUE, 1.0, rank, dtype=like.dtype, device=like.device)
    return (sides[0] * sizes @ sides[1].mT).bfloat16()


def with_bases(state: State, expected: State) -> State:
    """Undo ``without_bases``; ``expected`` is the state of all units as it should be."""
    restored = dict(state)
    like = next(iter(state.values()))
    for name, value in expected.items():
        if name.startswith(BASIS):
            shape = (len(like), *value.shape[1:])
            restored[name] = torch.zeros(shape, dtype=value.dtype, device=like.device)
        elif name.startswith(MOMENT):
            restored[name] = state[name].to(value.dtype)
    for suffix, kept in _matrices(restored):
        portrait = restored.pop(PORTRAIT + suffix).to(kept["scale"].dtype)
        if len(portrait):  # otherwise other ranks step them
            _learn_bases_(kept, portrait)
    return restored


def _learn_bases_(kept: State, portrait: Tensor) -> None:
    """Learn the bases of matrices from their portrait, and turn what lives in them."""
    own = unpack(kept)
    # Whatever a file holds.
    seen = portrait.clamp(-LARGEST_SINGULAR_VALUE, LARGEST_SINGULAR_VALUE)
    rows = seen.flatten(1, 2)[:, None]
    bases = [_eigenvectors(seen @ seen.mT), _eigenvectors(rows.mT @ rows)]
    for axis, basis in enumerate(bases):
        own[f"{BASIS}_{axis}"] = basis
    if MOMENTUM in own:
        own[MOMENTUM] = rotate(own[MOMENTUM], bases)
    if MOMENTUM in own and MOMENT in own:
        # As in every turn, second moments stay above the momentum's square.
        scale = torch.where(own["scale"] > 0, own["scale"], torch.inf).view(-1, 1, 1, 1)
        own[MOMENT] = torch.maximum(own[MOMENT], (own[MOMENTUM] / scale).square())
    pack_(kept, own)


def _sorted(x: Tensor, order: Tensor, axis: int, rank: int) -> Tensor:
    """Return entries in order along an axis.

    Beyond the rank, where directions will be any, all are their mean.
    """
    x = torch.take_along_dim(x, order, axis)
    tail = x.narrow(axis, rank, x.shape[axis] - rank)
    tail.copy_(tail.mean(axis, keepdim=True))
    return x


def _eigenvectors(gram: Tensor) -> Tensor:
    """Return the eigenvectors of matrices, those of the largest eigenvalues first."""
    eigs = gram.new_ones(gram.shape[:-1])
    S = Full(torch.diag_embed(eigs), eigs)
    basis = update(S, Dense(gram), lr=1.0, turning=Turning(sweeps=TURNS)).basis
    order = (gram @ basis * basis).sum(-2).argsort(dim=-1, descending=True)
    return torch.take_along_dim(basis, order[..., None, :], -1)


def _matrices(state: Mapping[str, Tensor]) -> Iterator[tuple[str, State]]:
    """Give out the suffix of each matrix with two bases, and its state without the suffix."""
    second = f"{BASIS}_1"
    for name in list(state):
        if name.startswith(second):
            suffix = name.removeprefix(second)
            yield (
                suffix,
                {
                    key.removesuffix(suffix): value
                    for key, value in state.items()
                    if key.endswith(suffix)
                },
            )
