"""Checkpoints without bases: in their place one matrix of the weights' shape, from which they are
learned anew.

It is a portrait of the curvature, ``P = B0[:, :r] Diag(4, ..., 1) B1[:, :r]^T`` with ``r = min(n0,
n1)`` and columns in the order of eigenvalues, in two bytes per entry. Bases are the eigenvectors of
``P P^T`` and ``P^T P``, but for the least directions of a longer side. Even distances make them
easy to tell apart: the core's own ``update`` finds them in 20 turns, whatever their number. Second
moments keep to the same order, also in two bytes; momentum is saved in the weights' own
coordinates, for the signs of eigenvectors are lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.curvature import Dense
from ..core.matrices import Full
from ..core.step import Turning
from ..core.update import update
from .kernel import rotate
from .stacks import own_state
from .state import State
from .storage import BASES, close, opened

PORTRAIT, MOMENT = "portrait", "second_moment"
LARGEST = 4.0  # singular value of a portrait
TURNS = 20  # 16 are enough for sides of 1024


def without_bases(state: State) -> State:
    """Return a copy of a parameter's state with portraits instead of bases."""
    found = {name: value.clone() for name, value in state.items()}
    for end, kept in _matrices(state):
        own, sides = opened(kept, kept["scale"].device), []
        bases = {axis: own[f"basis_{axis}"] for axis in (0, 1)}
        rank = min(basis.shape[-1] for basis in bases.values())
        if "momentum" in own:
            own["momentum"] = rotate(own["momentum"], bases, back=True)
        for axis, basis in bases.items():
            eigs = own[f"eigs_{axis}"]
            order = eigs.argsort(dim=-1, descending=True)
            sides.append(
                torch.take_along_dim(basis.to(eigs.dtype), order[..., None, :], -1)[..., :rank]
            )
            own[f"eigs_{axis}"] = _sorted(eigs, order, -1, rank)
            if MOMENT in own:
                own[MOMENT] = _sorted(own[MOMENT], order.unsqueeze(-1 - axis), axis - 2, rank)
        close(own_state(found, end), own, own["step"])
        sizes = torch.linspace(LARGEST, 1.0, rank, dtype=sides[0].dtype, device=sides[0].device)
        found[PORTRAIT + end] = (sides[0] * sizes @ sides[1].mT).bfloat16()
        if MOMENT in own and found[MOMENT + end].is_floating_point():
            found[MOMENT + end] = (
                found[MOMENT + end].clamp_max(torch.finfo(torch.bfloat16).max).bfloat16()
            )
        for name in (name for name in kept if name.startswith(BASES)):
            del found[name + end]
    return found


def with_bases(state: State, expected: State) -> State:
    """Undo ``without_bases``; ``expected`` is the state of all units as it should be, nothing
    without portraits.
    """
    found, like = dict(state), next(iter(state.values()))
    for name, value in expected.items():
        missing = torch.zeros(len(like), *value.shape[1:], dtype=value.dtype, device=like.device)
        found[name] = (
            state[name].to(value.dtype) if name.startswith(MOMENT) else state.get(name, missing)
        )
    for end, kept in _matrices(found) if expected else ():
        # Whatever a file holds
        seen = found.pop(PORTRAIT + end).to(kept["scale"].dtype).clamp(-LARGEST, LARGEST)
        if not len(seen):  # other ranks step them
            continue
        own, rows = opened(kept, seen.device), seen.flatten(1, 2)[:, None]
        bases = {0: _eigenvectors(seen @ seen.mT), 1: _eigenvectors(rows.mT @ rows)}
        own |= {f"basis_{axis}": basis for axis, basis in bases.items()}
        own |= {
            name: torch.diag_embed(own[f"eigs_{name[-1]}"])
            for name in own
            if name.startswith("residual")
        }
        if "momentum" in own:
            own["momentum"] = rotate(own["momentum"], bases)
        if (
            "momentum" in own and MOMENT in own
        ):  # as in every turn, second moments stay above the momentum's square
            scale = torch.where(own["scale"] > 0, own["scale"], torch.inf).view(-1, 1, 1, 1)
            own[MOMENT] = torch.maximum(own[MOMENT], (own["momentum"] / scale).square())
        close(kept, own, own["step"])
    return found


def _sorted(x: Tensor, order: Tensor, axis: int, rank: int) -> Tensor:
    """Return entries in order along an axis; beyond the rank, where directions will be any, all are
    their mean.
    """
    x = torch.take_along_dim(x, order, axis)
    tail = x.narrow(axis, rank, x.shape[axis] - rank)
    tail.copy_(tail.mean(axis, keepdim=True))
    return x


def _eigenvectors(gram: Tensor) -> Tensor:
    """Return the eigenvectors of matrices, those of the largest eigenvalues first."""
    eigs = gram.new_ones(gram.shape[:-1])
    start = Full(torch.diag_embed(eigs), eigs)
    basis = update(start, Dense(gram), lr=1.0, turning=Turning(sweeps=TURNS)).basis
    order = (gram @ basis * basis).sum(-2).argsort(dim=-1, descending=True)
    return torch.take_along_dim(basis, order[..., None, :], -1)


def _matrices(state: State) -> list[tuple[str, State]]:
    """Return what the names of the state of each matrix with two bases end with, and its state
    without these ends.
    """
    ends = [name.removeprefix("basis_1") for name in state if name.startswith("basis_1")]
    return [(end, own_state(state, end)) for end in ends if "eigs_2" + end not in state]
