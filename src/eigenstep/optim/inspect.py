"""What an optimizer can tell about itself: structure, cost, memory and spectra of each parameter, now and over time.

For loggers there are plain numbers: sizes of gradients, updates and weights, condition, speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .distributed.ownership import Candidate, describe
from .distributed.rounds import local
from .options import initial_state, interval_at, plan_of
from .stacks import Layout, Plan, suffix
from .state import State

if TYPE_CHECKING:
    from .spectral import Spectral


@dataclass(frozen=True)
class ParameterReport:
    """One parameter in ``Spectral.summary``.

    Attributes:
        name: its name, or its place among the parameter groups.
        shape: its shape.
        structure: its curvature's structure in words.
        state_bytes: memory of its state, or what it will be.
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
        # When bases turn: W, and turning momentum and direction; then the map, B Q, mending B, and the residual.
        large = 1 + momentum + group["turn_first"]
        maps = {"quadratic": 1, "truncated": 4, "exact": 4 / 3}.get(group["maps"], 1)  # at least one of a user's own
        small = maps + 1 + (2 if group["reorthonormalize"] else 0) + (2 if group["residual"] else 0)
        total += rotations * product + (large * product + small * cube) / interval
    return total


def name_of(param: Tensor, groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a parameter's name, or its place among the parameter groups."""
    for index, group in enumerate(groups):
        for place, other in enumerate(group["params"]):
            if other is param:
                return str(group["param_names"][place]) if "param_names" in group else f"group {index} #{place}"
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


def spectra_of(groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, State]) -> dict[str, dict[str, Any]]:
    """Return eigenvalues, condition number and speed of each axis of all parameters with a basis here, by name.

    Where blocks of a side differ in length, each length has an entry of its own, whose name ends with its number.
    """
    spectra = {}
    for param in (param for group in groups for param in group["params"]):
        state = states.get(param, {})
        ends = sorted(name.removeprefix("scale") for name in state if name.startswith("scale"))
        for end in ends if any(name.startswith("basis") and len(basis) for name, basis in state.items()) else []:
            found: dict[str, Any] = {"scale": state[f"scale{end}"].double().square()}
            for axis in range(sum(name.startswith("eigs_") and name.endswith(end) for name in state)):
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


class Snapshot(NamedTuple):
    """One side of one parameter at one time.

    Attributes:
        eigenvalues: some of the eigenvalues of the side's factor, which has determinant one, evenly from the largest to
            the smallest.
        condition: largest eigenvalue divided by the smallest.
        speed: Frobenius norm of the last rotation's generator, averaged over blocks; 0 is rest.
    """

    eigenvalues: list[float]
    condition: float
    speed: float


class SpectraLog:
    """Spectra, condition numbers and rotation speeds of an optimizer's bases over training.

    Example:
        >>> import torch
        >>> from eigenstep import Spectral
        >>> from eigenstep.optim import SpectraLog
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer, log = Spectral(model.named_parameters()), SpectraLog()
        >>> for _ in range(3):
        ...     model(torch.randn(2, 8)).square().mean().backward()
        ...     _ = optimizer.step()
        ...     log.record(optimizer)
        >>> sorted(log.snapshots)
        ['weight, side 0', 'weight, side 1']
    """

    def __init__(self, points: int = 32) -> None:
        """Start a log.

        Args:
            points: number of eigenvalues of each side to keep at each time.
        """
        if points < 2:
            raise ValueError(f"points must be at least 2, got {points}")
        self.points = points
        self.steps: list[int] = []
        self.snapshots: dict[str, list[tuple[int, Snapshot]]] = {}

    def record(self, optimizer: Spectral) -> None:
        """Take down the present state; numbers are read from the device once, so it is cheap enough for every step."""
        step = optimizer.param_groups[0]["count"]
        self.steps.append(step)
        rows = {
            f"{name}, side {axis}": self._row(found, axis)
            for name, found in optimizer.spectra().items()
            for axis in range(sum(key.startswith("eigenvalues") for key in found))
            if f"speed_{axis}" in found
        }
        numbers = torch.stack(list(rows.values())).tolist() if rows else []
        for name, (condition, speed, *eigenvalues) in zip(rows, numbers, strict=True):
            self.snapshots.setdefault(name, []).append((step, Snapshot(eigenvalues, condition, speed)))

    def _row(self, found: dict[str, Tensor], axis: int) -> Tensor:
        eigs = found[f"eigenvalues_{axis}"].flatten().sort(descending=True).values
        places = torch.linspace(0, len(eigs) - 1, self.points, device=eigs.device).round().long()
        numbers = torch.stack([found[f"condition_{axis}"].amax(), found[f"speed_{axis}"].mean()])
        return torch.cat([numbers, eigs[places]]).double()

    def plot(self, path: str | Path, side: str | None = None) -> Path:
        """Draw eigenvalues of one side at all times, condition numbers and speeds of all sides; needs matplotlib.

        Args:
            path: where to write the picture; its ending decides the format.
            side: whose eigenvalues to draw, a key of ``snapshots``; by default those with the largest condition number
                at the end.
        """
        from .. import plotting as plots

        if not self.snapshots:
            raise ValueError("there is nothing to draw: no basis was recorded")
        side = max(self.snapshots, key=lambda key: self.snapshots[key][-1][1].condition) if side is None else side
        if side not in self.snapshots:
            raise ValueError(f"side must be one of {', '.join(map(repr, self.snapshots))}, got {side!r}")
        drawn, ((spectra, conditions, speeds),) = plots.figure(columns=3)
        history = self.snapshots[side]
        for index, (step, snapshot) in enumerate(history):
            label = f"step {step}" if index in (0, len(history) - 1) else None
            color = plots.shade(index / max(1, len(history) - 1))
            ranks = torch.linspace(0, 1, len(snapshot.eigenvalues)).tolist()
            spectra.plot(ranks, snapshot.eigenvalues, color=color, label=label)
        spectra.set(title=side, xlabel="rank, from the largest to the smallest", ylabel="eigenvalue", yscale="log")
        spectra.legend(fontsize=8)
        for name, records in self.snapshots.items():
            steps = [step for step, _ in records]
            conditions.plot(steps, [snapshot.condition for _, snapshot in records], label=name)
            speeds.plot(steps, [snapshot.speed for _, snapshot in records], label=name)
        conditions.set(title="Condition number", xlabel="step", yscale="log")
        speeds.set(title="Speed of rotation", xlabel="step", ylabel="norm of the generator")
        if len(self.snapshots) <= 12:
            conditions.legend(fontsize=6)
        return plots.save(drawn, path)


Sizes = dict[Tensor, tuple[Tensor, Tensor]]
"""For each parameter the norms of its newest gradient and update, still on the device."""


Steps = Iterator[tuple[list[Tensor], list[Tensor]]]
"""Parameters, and where they go."""


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
    """Return all numbers, with the ``sizes`` that ``noted`` took down; they are read from the device in one piece."""
    counts = {"steps": max((group["count"] for group in groups), default=0), "skipped_steps": skipped}
    found: dict[str, Tensor] = {}
    for param in (param for group in groups for param in group["params"] if param.numel()):
        own = name_of(param, groups).replace(" #", ".")  # some loggers refuse other signs than these
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
    numbers = torch.stack([number.to(first.device, torch.float32) for number in found.values()]).tolist()
    return {**dict(zip(found, numbers, strict=True)), **counts}
