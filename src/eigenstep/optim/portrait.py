"""Checkpoints without bases: in their place one matrix of the weights' shape, from which they are learned anew.

Second moments are soon learned again, bases are not. So a file leaves both out and holds a portrait of the curvature::

    P = B0[:, :r] Diag(4, ..., 1) B1[:, :r]^T,   r = min(n0, n1),

columns sorted by eigenvalues. Its numbers take two bytes, and the eigenvectors of ``P P^T`` and ``P^T P`` are the
bases; where one side is longer, its least directions are any. Evenly spaced singular values make them easy to tell
apart: 20 turns of the core's own ``update`` find them, whatever the size. Momentum is saved in the weights' own
coordinates, for signs of eigenvectors are lost. Second moments go on as products of the sides' eigenvalues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..core.curvature import Dense
from ..core.matrices import Full
from ..core.step import update
from .kernel import rotate
from .state import State
from .storage import BASES, close, opened

PORTRAIT = "portrait"
LARGEST = 4.0
"""Largest singular value of a portrait; the least is one."""
TURNS = 20
"""From the axes to the eigenvectors of a portrait; 16 are enough for sides of 1024."""
LEFT_OUT = (*BASES, "second")
"""What is not in the file of a matrix, by the first words of the names."""


def outline(state: State) -> State:
    """Return what a file without bases has of a parameter, given its whole state, as tensors that are nowhere."""
    found = {name: value.to("meta") for name, value in state.items()}
    for end, own in _matrices(state):
        for name in (name for name in own if name.startswith(LEFT_OUT)):
            del found[name + end]
        shape = (*own["eigs_0"].shape, own["eigs_1"].shape[-1])
        found[PORTRAIT + end] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return found


def without_bases(state: State) -> State:
    """Return a copy of a parameter's state with portraits instead of bases and second moments."""
    found = {name: state[name].clone() for name in outline(state) if name in state}
    for end, packed in _matrices(state):
        own = opened(packed, packed["scale"].device)
        bases, sides, changed = _bases(own), [], {}
        rank = min(basis.shape[-1] for basis in bases.values())
        for axis, basis in bases.items():
            eigs, order = own[f"eigs_{axis}"].sort(dim=-1, descending=True)
            sides.append(torch.take_along_dim(basis.to(eigs.dtype), order[..., None, :], -1)[..., :rank])
            eigs[..., rank:] = eigs[..., rank:].mean(-1, keepdim=True)
            changed[f"eigs_{axis}"] = eigs
        sizes = torch.linspace(LARGEST, 1.0, rank, dtype=sides[0].dtype, device=sides[0].device)
        found[PORTRAIT + end] = (sides[0] * sizes @ sides[1].mT).bfloat16()
        changed |= {"momentum": rotate(own["momentum"], bases, back=True)} if "momentum" in own else {}
        close(_ending(found, end), changed, own["step"])
    return found


def with_bases(state: State, expected: State) -> State:
    """Undo ``without_bases``.

    Args:
        state: what was saved, of the units that are stepped here.
        expected: the whole state as it should be, of all units, anywhere; it tells number formats.
    """
    found: State = {}
    for name, value in expected.items():
        like = next(iter(state.values()))
        missing = torch.zeros(len(like), *value.shape[1:], dtype=value.dtype, device=like.device)
        found[name] = state.get(name, missing)
    for end, packed in _matrices(expected):
        seen = state[PORTRAIT + end].to(packed["eigs_0"].dtype)
        if not len(seen):  # other ranks step them all
            continue
        kept = _ending(found, end)
        own, rows = opened(kept, seen.device), seen.flatten(1, 2)[:, None]
        bases = {0: _eigenvectors(seen @ seen.mT), 1: _eigenvectors(rows.mT @ rows)}
        own |= {f"basis_{axis}": basis for axis, basis in bases.items()}
        own |= {name: torch.diag_embed(own[f"eigs_{name[-1]}"]) for name in own if name.startswith("residual")}
        scale = own["scale"].view(-1, 1, 1, 1)
        spectrum = own["eigs_0"][..., :, None] * own["eigs_1"][..., None, :] * (scale > 0)
        if "momentum" in own:
            own["momentum"] = rotate(own["momentum"], bases)
            # As in every turn second moments stay above the square of the momentum.
            least = own["momentum"] / torch.where(scale > 0, scale, torch.inf)
            spectrum = torch.maximum(spectrum, least.square())
        own |= {"second_moment": spectrum} if "second_moment" in own else {}
        close(kept, own, own["step"])
    return found


def _eigenvectors(gram: Tensor) -> Tensor:
    """Return the eigenvectors of matrices, those of the largest eigenvalues first."""
    start = Full(
        torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram), gram.new_ones(gram.shape[:-1])
    )
    basis = update(start, Dense(gram), lr=1.0, sweeps=TURNS).basis
    order = (gram @ basis * basis).sum(-2).argsort(dim=-1, descending=True)
    return torch.take_along_dim(basis, order[..., None, :], -1)


def _matrices(state: State) -> Iterator[tuple[str, State]]:
    """Give what the names of the state of each matrix with two bases end with, and its state without these ends."""
    for end in sorted(name.removeprefix("basis_1") for name in state if name.startswith("basis_1")):
        own = _ending(state, end)
        if "basis_0" in own and "eigs_2" not in own:
            yield end, own


def _ending(state: Mapping[str, Tensor], end: str) -> State:
    return {name.removesuffix(end): value for name, value in state.items() if name.endswith(end)}


def _bases(own: State) -> dict[int, Tensor]:
    return {axis: own[f"basis_{axis}"] for axis in (0, 1)}
