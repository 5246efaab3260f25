"""What the optimizer's arithmetic works on: the rule of a stack, its rates, and the tensors it
keeps between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.step import Orthogonal, Rotation, accumulation_dtype

State = dict[str, Tensor]
"""The tensors of one stack, by name; ``new_state`` tells which."""


@dataclass(frozen=True)
class Rule:
    """What a step does, fixed for a stack; ``eigenstep.Spectral`` explains each."""

    root: float = 2.0
    decay: float = 1.0
    eigenvalues: str = "corrected"
    rotation: str | Rotation = "bounded"
    maps: str | Orthogonal = "quadratic"
    reorthonormalize: bool = True
    nesterov: float | bool = 0.2
    turn_first: bool = False
    eigenvalues_wait: bool = False
    start: float = 1.0
    relative_damping: bool = True
    clip: float | None = None
    grafting: str | None = "descent"


class Rates(NamedTuple):
    """Numbers that may change from step to step; tensors, so that a compiled step need not be
    compiled anew.
    """

    beta1: Tensor
    beta2: Tensor
    basis: Tensor
    damping: Tensor


def new_state(
    shape: tuple[int, ...],
    full: tuple[bool, ...],
    rule: Rule,
    *,
    momentum: bool,
    residual: bool,
    dtype: torch.dtype,
    basis_dtype: torch.dtype,
    device: torch.device,
) -> State:
    """Return the state of a stack before its first gradient: ``B = I``, ``d = 1``, and no scale
    ``sqrt(alpha)`` yet.

    Args:
        shape: ``(b, k, n0, ..., nl)`` of the stack.
        full: for each axis, whether it has a basis; otherwise its factor is diagonal.
        rule: what the steps will do.
        momentum: whether to keep a running average of the gradients.
        residual: whether to keep what the rotations have not yet diagonalized.
        dtype: number format of everything as large as the gradients.
        basis_dtype: number format of the bases and residuals.
        device: where to put the tensors.
    """
    wide = accumulation_dtype(dtype)
    if rule.eigenvalues == "corrected" and full == (False,):  # AdamW
        averages = ["momentum", "second_moment"] if momentum else ["second_moment"]
        state = {name: torch.zeros(shape, dtype=dtype, device=device) for name in averages}
        return {"step": torch.zeros(shape[0], dtype=wide, device=device), **state}
    state = {
        name: torch.zeros(shape[0], dtype=wide, device=device)
        for name in ("step", "turns", "scale")
    }
    for axis, (size, has_basis) in enumerate(zip(shape[2:], full, strict=True)):
        eigs = torch.ones(shape[0], shape[1] if axis == 0 else 1, size, dtype=wide, device=device)
        state[f"eigs_{axis}"] = eigs
        if has_basis:
            state[f"basis_{axis}"] = torch.diag_embed(eigs).to(basis_dtype)
            state[f"speed_{axis}"] = torch.zeros_like(eigs[..., 0])
            if residual:
                state[f"residual_{axis}"] = torch.diag_embed(eigs).to(basis_dtype)
    large = ["momentum"] if momentum else []
    if rule.eigenvalues == "corrected":
        large.append("second_moment")
    if rule.grafting in ("adam", "rms"):
        large.append("graft")
    elif rule.grafting == "descent" and rule.root == 2 and any(full):
        state["gain"] = torch.ones_like(state["scale"])
        if momentum:
            state["agreement"] = torch.zeros_like(state["scale"])
    return state | {name: torch.zeros(shape, dtype=dtype, device=device) for name in large}


def products_of_eigs(state: State, axes: int) -> Tensor:
    """Return the products of all axes' eigenvalues, shape ``(b, k, n0, ..., nl)``: those of ``S``
    but for its scale.
    """
    spectrum = state["eigs_0"].view(*state["eigs_0"].shape, *[1] * (axes - 1))
    for axis in range(1, axes):
        eigs = state[f"eigs_{axis}"]
        spectrum = spectrum * eigs.view(len(eigs), 1, *[1] * axis, -1, *[1] * (axes - 1 - axis))
    return spectrum
