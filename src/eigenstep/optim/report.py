"""What an optimizer can tell about itself: structure, cost, memory and spectra of each parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .layout import Layout
from .options import interval_at


@dataclass(frozen=True)
class ParameterReport:
    """One parameter in :meth:`Spectral.summary`.

    Attributes:
        name: its name, or its place among the parameter groups.
        shape: its shape.
        structure: its curvature's structure in words.
        state_bytes: memory of its state; 0 before its first gradient.
        flops: matrix-product operations per step, averaged over the interval.
    """

    name: str
    shape: tuple[int, ...]
    structure: str
    state_bytes: int
    flops: float

    def __str__(self) -> str:
        """Say it in a line."""
        shape = "x".join(map(str, self.shape)) or "scalar"
        return (
            f"{self.name:<40} {shape:>12}  {self.structure:<28} {self.state_bytes / 1024:10.1f} KiB "
            f"{self.flops / 1e6:10.2f} MFLOP/step"
        )


def summarize(
    name: str, param: Tensor, layout: Layout, state: Mapping[str, Tensor], group: Mapping[str, Any]
) -> ParameterReport:
    """Describe one parameter."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    interval = interval_at(group["interval"], group["count"])
    return ParameterReport(name, tuple(param.shape), layout.describe(), size, matmul_flops(layout, group, interval))


def matmul_flops(layout: Layout, group: Mapping[str, Any], interval: int) -> float:
    """Return the matrix-product operations of one step with the default maps, averaged over the interval."""
    entries = layout.pieces * layout.blocks * math.prod(layout.sizes)
    total = 0.0
    for axis, (n, full) in enumerate(zip(layout.sizes, layout.full, strict=True)):
        if not full:
            continue
        bases = layout.pieces * (layout.blocks if axis == 0 else 1)
        product = 2 * entries * n  # the gradient, or anything of its size, times a basis
        cube = 2 * bases * n**3
        mend = 2 / group["reorthonormalize"] if group["reorthonormalize"] else 0
        maps = {"quadratic": 1, "truncated": 4, "exact": 8 / 3}[group["maps"]]
        turn = 2 * product + (maps + 1 + mend + (2 if group["residual"] else 0)) * cube
        total += 2 * product + turn / interval
    return total


def spectra_of(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return eigenvalues (descending), condition number and speed of rotation of each axis."""
    axes = sorted(int(name.removeprefix("eigs_")) for name in state if name.startswith("eigs_"))
    found: dict[str, Any] = {"scale": state["scale"].double().square()}
    for axis in axes:
        eigs = state[f"eigs_{axis}"].flatten(1)
        found[f"eigenvalues_{axis}"] = eigs.sort(descending=True).values
        found[f"condition_{axis}"] = eigs.amax(-1) / eigs.amin(-1)
        if f"speed_{axis}" in state:
            found[f"speed_{axis}"] = torch.as_tensor(state[f"speed_{axis}"]).clone()
    return found
