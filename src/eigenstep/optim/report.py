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


class Summary(list[ParameterReport]):
    """All parameters of an optimizer; prints as a table."""

    def __str__(self) -> str:
        """Lay out one line for each parameter, and one for all."""
        rows = [["parameter", "shape", "structure", "state KiB", "MFLOP/step"]]
        for item in self:
            shape = "x".join(map(str, item.shape)) or "scalar"
            rows.append([item.name, shape, item.structure, *_columns(item.state_bytes, item.flops)])
        totals = _columns(sum(item.state_bytes for item in self), sum(item.flops for item in self))
        rows.append(["total", str(sum(math.prod(item.shape) for item in self)), "", *totals])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                f"{cell:>{width}}" if at > 2 else f"{cell:<{width}}"
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        rule = "-" * len(lines[0])
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _columns(state_bytes: int, flops: float) -> list[str]:
    return [f"{state_bytes / 1024:.1f}", f"{flops / 1e6:.2f}"]


def summarize(
    name: str, param: Tensor, layout: Layout, state: Mapping[str, Tensor], group: Mapping[str, Any]
) -> ParameterReport:
    """Describe one parameter."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    interval = interval_at(group["interval"], group["count"])
    return ParameterReport(name, tuple(param.shape), layout.describe(), size, matmul_flops(layout, group, interval))


def matmul_flops(layout: Layout, group: Mapping[str, Any], interval: int) -> float:
    """Return the matrix-product operations of one step, averaged over the interval."""
    entries = layout.pieces * layout.blocks * math.prod(layout.sizes)
    momentum = group["betas"][0] > 0
    # Every step: rotate the gradient and rotate back, and measure diag(W) of each axis.
    rotations = 3 if momentum and group["grafting"] == "adam" else 2
    total = 2.0 * entries * len(layout.sizes) if len(layout.sizes) > 1 else 0.0
    for axis, (n, full) in enumerate(zip(layout.sizes, layout.full, strict=True)):
        if not full:
            continue
        product = 2 * entries * n  # the gradient, or anything of its size, times a basis
        cube = 2 * layout.pieces * (layout.blocks if axis == 0 else 1) * n**3
        # When bases turn: W, and turning momentum and direction; then the map, B Q, mending B, and the residual.
        large = 1 + momentum + group["turn_first"]
        maps = {"quadratic": 1, "truncated": 4, "exact": 4 / 3}[group["maps"]]
        small = maps + 1 + (2 if group["reorthonormalize"] else 0) + (2 if group["residual"] else 0)
        total += rotations * product + (large * product + small * cube) / interval
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
