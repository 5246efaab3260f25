"""What an optimizer can tell about itself: structure, cost, memory and spectra of parameters;
numbers for loggers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .distributed.collectives import local
from .distributed.ownership import Candidate, describe
from .options import EARLY, initial_state, interval_at, mends_at, plan_of
from .stacks import Layout, Plan, suffix
from .state import State


@dataclass(frozen=True)
class ParameterReport:
    """One parameter in ``Spectral.summary``."""

    name: str  # or its place among the parameter groups
    shape: tuple[int, ...]
    structure: str  # of its curvature, in words
    state_bytes: int  # memory of its state, or what it will be
    flops: float  # matrix-product operations per step, averaged over the interval


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
        form = "  ".join(f"{{:{'>' if at > 2 else '<'}{width}}}" for at, width in enumerate(widths))
        lines = [form.format(*row) for row in rows]
        rule = "-" * len(lines[0])
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _columns(state_bytes: int, flops: float) -> list[str]:
    return [f"{state_bytes / 1024:.1f}", f"{flops / 1e6:.2f}"]


def matmul_flops(plan: Plan, group: Mapping[str, Any], interval: int) -> float:
    """Return the matrix-product operations of one step, averaged over the interval."""
    return plan.units * sum(_layout_flops(layout, group, interval) for layout in plan.layouts)


def _layout_flops(layout: Layout, group: Mapping[str, Any], interval: int) -> float:
    entries = layout.blocks * math.prod(layout.sizes)
    momentum = group["betas"][0] > 0
    # Every step: rotate the gradient and rotate back, and measure diag(W) of each axis.
    rotations = 3 if momentum and group["grafting"] == "adam" else 2
    total = 2.0 * entries * len(layout.sizes) if len(layout.sizes) > 1 else 0.0
    for axis, (n, full) in enumerate(zip(layout.sizes, layout.full, strict=True)):
        if not full:
            continue
        product = 2 * entries * n  # the gradient, or anything of its size, times a basis
        cube = 2 * (layout.blocks if axis == 0 else 1) * n**3
        # When bases turn: W, and turning momentum and direction; then the map, B Q, mending B, and
        # the residual.
        large = 1 + momentum + group["turn_first"]
        # At least one of a user's own
        maps = {"quadratic": 1, "truncated": 4, "exact": 4 / 3}.get(group["maps"], 1)
        small = (
            maps
            + 1
            + mends_at(group, EARLY, 1)
            + mends_at(group, EARLY, 2)
            + (2 if group["residual"] else 0)
        )
        total += rotations * product + (large * product + small * cube) / interval
    return total


def name_of(param: Tensor, groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a parameter's name, or its place among the parameter groups."""
    for index, group in enumerate(groups):
        for place, other in enumerate(group["params"]):
            if other is param:
                return (
                    str(group["param_names"][place])
                    if "param_names" in group
                    else f"group {index} #{place}"
                )
    return "unknown parameter"


def summary_of(groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, State]) -> Summary:
    """Describe all parameters."""
    found = Summary()
    for group in groups:
        interval = interval_at(group["interval"], group["count"])
        for param in filter(torch.numel, group["params"]):
            plan = plan_of(group, param)
            state = states.get(param) or initial_state(group, param, plan, device="meta")
            seen = name_of(param, groups), tuple(param.shape), plan.describe(), bytes_of(state)
            found.append(ParameterReport(*seen, matmul_flops(plan, group, interval)))
    return found


def bytes_of(state: Mapping[str, Tensor]) -> int:
    """Return the memory of a parameter's state."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def spectra_of(
    groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, State]
) -> dict[str, dict[str, Any]]:
    """Return eigenvalues, condition number and speed of each axis of all parameters with a basis
    here, by name.

    Where blocks of a side differ in length, each length has an entry of its own, whose name ends
    with its number.
    """
    spectra = {}
    for param in (param for group in groups for param in group["params"]):
        state = states.get(param, {})
        ends = sorted(name.removeprefix("scale") for name in state if name.startswith("scale"))
        for end in (
            ends
            if any(name.startswith("basis") and len(basis) for name, basis in state.items())
            else []
        ):
            found: dict[str, Any] = {"scale": state[f"scale{end}"].double().square()}
            for axis in range(
                sum(name.startswith("eigs_") and name.endswith(end) for name in state)
            ):
                eigs = state[f"eigs_{axis}{end}"].flatten(1)
                found[f"eigenvalues_{axis}"] = eigs.sort(descending=True).values
                found[f"condition_{axis}"] = eigs.amax(-1) / eigs.amin(-1)
                if f"speed_{axis}{end}" in state:
                    found[f"speed_{axis}"] = state[f"speed_{axis}{end}"].clone()
            spectra[name_of(param, groups) + end] = found
    return spectra


def candidate_of(group: dict[str, Any], param: Tensor) -> Candidate:
    """Say what stepping a parameter costs, so that ranks can share the work."""
    plan = plan_of(group, param)
    state = initial_state(group, param, plan, device="meta")
    flops = matmul_flops(plan, group, interval_at(group["interval"], group["count"]))
    costs = (flops / plan.slices, bytes_of(state) / plan.slices, param.numel() / plan.slices)
    return Candidate(param, plan, costs, state["step" + suffix(plan, 0)].dtype, describe(param))


# Norms of each parameter's newest gradient and update, on the device
Sizes = dict[Tensor, tuple[Tensor, Tensor]]
Steps = Iterator[tuple[list[Tensor], list[Tensor]]]  # Parameters, and where they go


def noted(sizes: Sizes, steps: Steps, gradients: Mapping[Tensor, Tensor], lr: Any) -> Steps:
    """Take down the norms of gradients, and of directions times the learning rate, on the way."""
    for params, directions in steps:
        lengths = (length * lr for length in torch._foreach_norm(directions))
        norms = torch._foreach_norm([gradients[param] for param in params])
        sizes.update(zip(params, zip(norms, lengths, strict=True), strict=True))
        yield params, directions


def metrics_of(
    groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, State], sizes: Sizes, skipped: int
) -> dict[str, float]:
    """Return all numbers, with the ``sizes`` that ``noted`` took down; they are read from the
    device in one piece.
    """
    counts = {
        "steps": max((group["count"] for group in groups), default=0),
        "skipped_steps": skipped,
    }
    found: dict[str, Tensor] = {}
    for param in (param for group in groups for param in group["params"] if param.numel()):
        # Some loggers refuse other signs than these
        own = name_of(param, groups).replace(" #", ".")
        found[f"weight_norm/{own}"] = torch.linalg.vector_norm(local(param.detach()))
        if param in sizes:
            found[f"gradient_norm/{own}"], found[f"update_norm/{own}"] = sizes[param]
        state = states.get(param, {})
        if any(key.startswith("basis") and len(state[key]) for key in state):
            eigs = [state[key].flatten(1) for key in state if key.startswith("eigs")]
            sides = torch.stack([e.amax(1) / e.amin(1) for e in eigs])
            found[f"condition/{own}"] = sides.prod(0).amax()
            speeds = [state[key].mean() for key in state if key.startswith("speed")]
            found[f"rotation_speed/{own}"] = torch.stack(speeds).amax()
    if not found:
        return counts
    first = next(iter(found.values()))
    numbers = torch.stack(
        [number.to(first.device, torch.float32) for number in found.values()]
    ).tolist()
    return {**dict(zip(found, numbers, strict=True)), **counts}
