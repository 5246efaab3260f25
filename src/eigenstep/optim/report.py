"""What an optimizer can tell of itself: structure, cost, memory, spectra, numbers for loggers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cost import matmul_flops, state_bytes
from .distributed.collectives import local
from .formats import initial_state, is_matrix, matrix_state, part_of, suffix_of
from .layout import Plan, plan_of
from .matrix import MatrixState
from .options import Options

Groups = Sequence[tuple[Mapping[str, Any], Options]]
States = Mapping[Tensor, Mapping[str, Tensor]]
PlanOf = Callable[[Options, Tensor], Plan]
Sizes = dict[Tensor, tuple[Tensor, Tensor]]
"""Norms of each parameter's newest gradient and update, on the device."""


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
            numbers = _columns(item.state_bytes, item.flops)
            rows.append([item.name, shape, item.structure, *numbers])
        totals = _columns(sum(item.state_bytes for item in self), sum(item.flops for item in self))
        rows.append(["total", str(sum(math.prod(item.shape) for item in self)), "", *totals])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            words = [word.ljust(width) for word, width in zip(row[:3], widths[:3], strict=True)]
            numbers = [word.rjust(width) for word, width in zip(row[3:], widths[3:], strict=True)]
            lines.append("  ".join([*words, *numbers]))
        rule = "-" * len(lines[0])
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _columns(memory: int, flops: float) -> list[str]:
    return [f"{memory / 1024:.1f}", f"{flops / 1e6:.2f}"]


def one_line_each(
    kind: type, defaults: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> str:
    """Show an optimizer: what differs from its defaults, and a line for each parameter group."""
    # A class of a user's own may need more than options: then one that it inherits from tells.
    base = next(base for base in kind.__mro__ if set(_needed_by(base)) <= {"params", *defaults})
    _, *needed = _needed_by(base)
    plain: Any = base([torch.nn.Parameter(torch.empty(0))], **{x: defaults[x] for x in needed})
    shown = _different(defaults, plain.defaults, ("lr", *needed))
    lines = [f"{kind.__name__}({_listed(shown, '')})"]
    for index, group in enumerate(groups):
        weights = sum(param.numel() for param in group["params"])
        name = f" {group['name']!r}" if "name" in group else ""
        counts = f"{len(group['params'])} parameters, {weights:,} weights"
        own = _different({key: group[key] for key in defaults}, defaults)
        lines.append(f"  group {index}{name}: {counts}{_listed(own, ', ')}")
    return "\n".join(lines)


def _needed_by(kind: type) -> list[str]:
    """Return the names of the arguments that have no default."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(kind).parameters.values()
    return [x.name for x in parameters if x.default is x.empty and x.kind not in variadic]


def _different(
    options: Mapping[str, Any], others: Mapping[str, Any], always: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the options that look otherwise than others of the same name."""
    different = {}
    for name, value in options.items():
        same = name in others and repr(value) == repr(others[name])
        if name != "count" and (name in always or not same):
            different[name] = value
    return different


def _listed(options: Mapping[str, Any], before: str) -> str:
    text = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return before + text if text else ""


def name_of(param: Tensor, groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a parameter's name, or its place among the parameter groups."""
    for index, group in enumerate(groups):
        for place, other in enumerate(group["params"]):
            if other is param:
                if "param_names" in group:
                    return str(group["param_names"][place])
                return f"group {index} #{place}"
    return "unknown parameter"


def summary_of(groups: Groups, states: States) -> Summary:
    """Describe all parameters."""
    summary = Summary()
    names = [group for group, _ in groups]
    for group, options in groups:
        for param in filter(torch.numel, group["params"]):
            plan = plan_of(options, param.shape)
            state = states.get(param) or initial_state(options, plan, param.dtype, "meta")
            summary.append(
                ParameterReport(
                    name=name_of(param, names),
                    shape=tuple(param.shape),
                    structure=plan.describe(),
                    state_bytes=state_bytes(state),
                    flops=matmul_flops(plan, options, group["count"]),
                )
            )
    return summary


def matrices_of(groups: Groups, states: States, plan: PlanOf) -> Iterator[Matrix]:
    """Give out the state of each matrix with a basis that is stepped here.

    ``plan`` tells how what is stepped here of a parameter is laid out.
    """
    names = [group for group, _ in groups]
    for group, options in groups:
        for param in group["params"]:
            if not states.get(param):
                continue
            layouts = plan(options, param)
            for part, layout in enumerate(layouts.layouts):
                tensors = part_of(states[param], layouts, part)
                if layout.has_basis and is_matrix(tensors) and layouts.units:
                    name = name_of(param, names)
                    suffix = suffix_of(layouts, part)
                    yield Matrix(param, name, suffix, matrix_state(tensors))


@dataclass(frozen=True)
class Matrix:
    """The state of one rectangle of a parameter."""

    param: Tensor
    name: str  # of the parameter
    suffix: str  # of its rectangle, if there are several
    state: MatrixState

    def conditions(self) -> list[Tensor]:
        """Return the condition number of each side, for each element."""
        eigs = [side.eigs.flatten(1) for side in self.state.sides]
        return [values.amax(-1) / values.amin(-1) for values in eigs]


def spectra_of(groups: Groups, states: States, plan: PlanOf) -> dict[str, dict[str, Any]]:
    """Return eigenvalues, condition and speed of each side of all parameters with a basis here.

    Where blocks of a side differ in length, each length has an entry of its own, whose name ends
    with its number.
    """
    spectra = {}
    for matrix in matrices_of(groups, states, plan):
        entry: dict[str, Any] = {"scale": matrix.state.scale.double().square()}
        conditions = matrix.conditions()
        for axis, side in enumerate(matrix.state.sides):
            eigs = side.eigs.flatten(1)
            entry[f"eigenvalues_{axis}"] = eigs.sort(descending=True).values
            entry[f"condition_{axis}"] = conditions[axis]
            if side.speed is not None:
                entry[f"speed_{axis}"] = side.speed.clone()
        spectra[matrix.name + matrix.suffix] = entry
    return spectra


def note_sizes(
    sizes: Sizes,
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    gradients: Mapping[Tensor, Tensor],
    lr: float | Tensor,
) -> None:
    """Take down the norms of gradients, and of directions times the learning rate."""
    if not params:
        return
    lengths = [length * lr for length in torch._foreach_norm(list(directions))]
    norms = torch._foreach_norm([gradients[param] for param in params])
    for param, norm, length in zip(params, norms, lengths, strict=True):
        sizes[param] = (norm, length)


def metrics_of(groups: Groups, states: States, sizes: Sizes, plan: PlanOf) -> dict[str, float]:
    """Return all numbers, with the ``sizes`` that were noted, read from the device in one piece."""
    numbers: dict[str, Tensor] = {}
    names = [group for group, _ in groups]
    params = [param for group in names for param in group["params"] if param.numel()]
    for param in params:
        name = loggable(name_of(param, names))
        numbers[f"weight_norm/{name}"] = torch.linalg.vector_norm(local(param.detach()))
        if param in sizes:
            numbers[f"gradient_norm/{name}"] = sizes[param][0]
            numbers[f"update_norm/{name}"] = sizes[param][1]
    for matrix in matrices_of(groups, states, plan):
        name = loggable(matrix.name)
        condition = torch.stack(matrix.conditions()).prod(0).amax()
        speeds = [side.speed.mean() for side in matrix.state.sides if side.speed is not None]
        _keep_larger(numbers, f"condition/{name}", condition)
        _keep_larger(numbers, f"rotation_speed/{name}", torch.stack(speeds).amax())
    steps = {"steps": max((group["count"] for group in names), default=0)}
    if not numbers:
        return steps
    device = next(iter(numbers.values())).device
    together = torch.stack([number.to(device, torch.float32) for number in numbers.values()])
    return {**dict(zip(numbers, together.tolist(), strict=True)), **steps}


def _keep_larger(numbers: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Take down a number, unless a larger one of the same name is there."""
    numbers[name] = torch.maximum(numbers[name], value) if name in numbers else value


def loggable(name: str) -> str:
    """Return a name without signs that some loggers refuse."""
    return name.replace(" #", ".")
