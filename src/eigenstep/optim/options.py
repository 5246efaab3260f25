"""The options of a parameter group: what is possible and what follows; checks of gradients."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_number
from .layout import STRUCTURES, plan
from .stacks import Plan, suffix
from .state import Rates, Rule, State, new_state
from .storage import home, packed, rounded

Group = Mapping[str, Any]
# Parameter groups, each with those that have gradients
Work = Sequence[tuple[dict[str, Any], list[Tensor]]]

CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "eigenvalues": ("corrected", "kronecker"),
    "grafting": ("descent", "adam", "rms", None),
    "structure": STRUCTURES,
    "rotation": ("bounded", "normalized", "moore_penrose"),
    "maps": ("quadratic", "truncated", "exact"),
    "nonfinite": ("raise", "skip", "ignore"),
}
RANGES: Mapping[str, tuple[float, float]] = {
    "eps": (0.0, float("inf")),
    "decay": (0.0, 1.0),
    "damping": (0.0, float("inf")),
    "start": (0.0, float("inf")),
}
POSITIVE: Mapping[str, float] = {"root": float("inf"), "clip": float("inf"), "basis_lr": 2.0}
"""Options that must be greater than 0 (if not ``None``), and their upper limits."""
LONGEST_VECTOR = 2**19  # What has more entries on a single axis is no bias
# Relative, of products of eigenvalues: with less, sparse gradients lead to steps of any length
LEAST_DAMPING = 1e-12
CUSTOM_PREFIX = "custom: "
CUSTOM = ("rotation", "maps")  # Options that may be functions of the user's own instead of names
SCHEDULED = {
    "lr_scale",
    "initial_lr",
    "max_lr",
    "min_lr",
    "swa_lr",
    "base_momentum",
    "max_momentum",
}
FOREIGN = {"params", "param_names", "count", "use_fallback", "name", *SCHEDULED}
"""What else a parameter group may hold: what torch, learning-rate schedulers and trainers put
there.
"""
POSTERIOR = {"ess", "batch_size", "prior_precision", "curvature", "antithetic", "seed"}
"""What all groups of a posterior hold beside that."""
# What to do about the gradients of a step: take it, leave it out, or raise an error
GO, SKIP, RAISE = range(3)
LAYOUT = (
    "structure",
    "max_dim",
    "max_ratio",
    "batch_dims",
    "split_sizes",
    "num_heads",
    "split_dim",
)
fixed = itemgetter(*LAYOUT)
"""Options that decide how a parameter is laid out, and what returns them; they are fixed once it
has state.
"""
# In no other list
OTHERS = ("lr", "weight_decay", "betas", "interval", "nesterov", "basis_dtype", "state_dtype")
LEARNING = ("relative_damping", "eigenvalues_wait", "turn_first", "reorthonormalize", "residual")
FLAGS = (
    *LEARNING,
    "stochastic_rounding",
    "maximize",
    "capturable",
    "cautious_weight_decay",
    "offload",
)
TORCH: Mapping[str, str] = {
    "amsgrad": "its second moments can fall again",
    "differentiable": "its steps have no gradient",
}
"""Options of torch's optimizers that Spectral takes only as ``False``, and why."""
OPTIONS = tuple(
    sorted({*CHOICES, *RANGES, *POSITIVE, *FLAGS, *LAYOUT, *OTHERS, *TORCH, "foreach", "fused"})
)


def check_group(group: Mapping[str, Any]) -> None:
    """Raise unless all options of a parameter group are possible."""
    _check_names(group)
    for name in ("lr", "weight_decay"):
        _check_scalar(group[name], name)
    for name, (low, high) in RANGES.items():
        check_number(group[name], name, low, high)
    for name, choices in CHOICES.items():
        if name in CUSTOM and callable(group[name]):
            continue
        if not isinstance(group[name], (str, type(None))) or group[name] not in choices:
            also = " or a function" if name in CUSTOM else ""
            raise ValueError(
                f"{name} must be one of {', '.join(map(repr, choices))}{also}, got {group[name]!r}"
            )
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be a pair of numbers, got {betas!r}")
    for index, beta in enumerate(betas):
        check_number(beta, f"betas[{index}]", 0.0, 1.0)
        if beta == 1:
            raise ValueError(f"betas[{index}] must be less than 1, got {beta}")
    for name, high in POSITIVE.items():
        if group[name] is not None or name == "root":
            check_number(group[name], name, 0.0, high)
            if group[name] == 0:
                raise ValueError(f"{name} must be greater than 0, got {group[name]}")
    if not isinstance(group["nesterov"], bool):
        check_number(group["nesterov"], "nesterov", 0.0, 1.0)
    if group["max_ratio"] is not None:
        check_number(group["max_ratio"], "max_ratio", 1.0)
    for name in (*FLAGS, *TORCH):
        if not isinstance(group[name], bool):
            raise TypeError(f"{name} must be True or False, got {group[name]!r}")
    for name in ("foreach", "fused"):
        if not isinstance(group[name], (bool, type(None))):
            raise TypeError(f"{name} must be True, False or None, got {group[name]!r}")
    for name, reason in TORCH.items():
        if group[name]:
            raise ValueError(f"Spectral cannot do {name}=True: {reason}; leave it out")
    if group["max_dim"] is not None and (
        not isinstance(group["max_dim"], int) or group["max_dim"] < 1
    ):
        raise ValueError(f"max_dim must be a whole number, at least 1, got {group['max_dim']!r}")
    interval_at(group["interval"], 0)
    _check_fused(group)
    for name, more in (("basis_dtype", ()), ("state_dtype", (torch.int8,))):
        if group[name] not in (None, torch.float64, torch.float32, torch.bfloat16, *more):
            also = ", bfloat16 or int8" if more else " or bfloat16"
            raise ValueError(f"{name} must be None, float64, float32{also}, got {group[name]!r}")
    _check_rotations(group)
    if (
        group["damping"] == 0
        and group["eigenvalues"] == "kronecker"
        and not group["relative_damping"]
    ):
        raise ValueError(
            'damping must be greater than 0 for eigenvalues="kronecker" with '
            "relative_damping=False: without any, "
            "directions that have hardly seen a gradient get steps of any length"
        )
    if group["capturable"] and (
        group["interval"] != 1 or group["nonfinite"] != "ignore" or group["offload"]
    ):
        raise ValueError(
            'capturable=True needs interval=1, nonfinite="ignore" and offload=False, which need no '
            "host"
        )


def _check_fused(group: Group) -> None:
    """Raise unless the options that say which matrices a parameter holds are possible."""
    if group["batch_dims"] is not None and not _is_count(group["batch_dims"], 0):
        raise ValueError(
            f"batch_dims must be None or a whole number of axes, got {group['batch_dims']!r}"
        )
    if group["split_dim"] not in (0, 1):
        raise ValueError(f"split_dim must be 0 or 1, got {group['split_dim']!r}")
    for name in ("split_sizes", "num_heads"):
        given = group[name]
        numbers = [given] if name == "num_heads" and isinstance(given, int) else given
        many = isinstance(numbers, (tuple, list)) and len(numbers) > 0
        if given is not None and not (many and all(_is_count(n, 1) for n in numbers)):
            raise ValueError(f"{name} must be None or positive whole numbers, got {given!r}")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_parameters(group: Mapping[str, Any], distributed: bool) -> None:
    """Raise unless all parameters of a group can be stepped, by ranks that may share the work if
    ``distributed``.
    """
    for param in group["params"]:
        if hasattr(param, "device_mesh") and not distributed:
            raise ValueError(
                "DTensor parameters cannot be stepped with distributed=False: pass distributed=True"
            )
        if param.numel():
            plan_of(group, param)  # raises if there is none
    flat = [
        param.numel()
        for param in group["params"]
        if param.ndim == 1 and param.numel() > LONGEST_VECTOR
    ]
    if flat and group["structure"] != "diagonal":
        warnings.warn(
            f"a vector of {max(flat):,} entries looks like matrices in a row, as DeepSpeed ZeRO "
            "and FSDP1 make: it "
            "steps as in AdamW, for its matrices cannot be seen. Use DDP or FSDP2 (fully_shard), "
            "which keep them, or "
            'pass structure="diagonal" if this is meant',
            stacklevel=4,
        )


def _check_names(group: Mapping[str, Any]) -> None:
    """Raise if there is an option that does not exist."""
    known = FOREIGN | POSTERIOR if group.keys() >= POSTERIOR else FOREIGN
    for name in group:
        if name not in OPTIONS and name not in known:
            near = difflib.get_close_matches(str(name), OPTIONS, 1, 0.7)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else "Spectral has no such option for parameter groups"
            )
            raise ValueError(f"unknown option {name!r} in a parameter group: {hint}")


def _check_scalar(value: object, name: str) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point():
            raise ValueError(
                f"{name} must be a number or a real tensor with one element, "
                f"got {value.dtype} of shape {tuple(value.shape)}"
            )
    else:
        check_number(value, name, 0.0)


def _check_rotations(group: Mapping[str, Any]) -> None:
    """Raise if rotations could be so long that bases lose their orthogonality."""
    basis_lr, normalized = group["basis_lr"], group["rotation"] == "normalized"
    if basis_lr is not None and basis_lr > 1 and not normalized:
        raise ValueError(
            f'basis_lr must be at most 1, or below 2 for rotation="normalized", got {basis_lr}'
        )
    if basis_lr == 2:
        raise ValueError("basis_lr must be less than 2, got 2")
    # Quadratic maps stretch by up to sqrt(1 + 4 |N|^4), and Newton-Schulz steps come back from
    # below sqrt(3). That is always so: the norm is at most 0.5, or basis_lr / sqrt(8) < 1 / sqrt(2)
    # for normalized generators, whose Frobenius norm is basis_lr / 2, of which a skew-symmetric
    # matrix has half in each of two equal singular values or more.
    if group["maps"] == "quadratic" and not group["reorthonormalize"]:
        raise ValueError(
            'reorthonormalize must be True for maps="quadratic", which stretch bases a little at '
            "every turn: use "
            'maps="truncated" or "exact" to do without'
        )


EARLY = 100
"""Eigenvectors change ever more slowly, so gaps between turns begin at one step and grow by one in
so many steps.
"""


def turns_at(group: Mapping[str, Any], count: int) -> bool:
    """Tell whether bases turn after so many steps. Schedules, and intervals with ``start=0``, hold
    to the letter.
    """
    interval = group["interval"]
    if isinstance(interval, int):
        return count % (min(interval, 1 + count // EARLY) if group["start"] > 0 else interval) == 0
    return count % interval_at(interval, count) == 0


def interval_at(interval: Any, count: int) -> int:
    """Return how many steps go by between turns, at a given step of a fixed interval or
    a schedule.
    """
    schedule = (
        [(0, interval)]
        if isinstance(interval, int) and not isinstance(interval, bool)
        else interval
    )
    try:
        pairs = [(int(start), int(every)) for start, every in schedule]
    except (TypeError, ValueError):
        pairs = []
    starts = [start for start, _ in pairs]
    if (
        not pairs
        or starts[0] != 0
        or starts != sorted(set(starts))
        or any(every < 1 for _, every in pairs)
    ):
        raise ValueError(
            "interval must be a positive integer, or pairs (first step, interval) in rising order "
            "from step 0, such as "
            f"[(0, 1), (1000, 4)], got {interval!r}"
        )
    return [every for start, every in pairs if start <= count][-1]


def check_gradient(param: Tensor) -> None:
    """Raise unless the parameter's gradient is one that can be used."""
    gradient = param.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise TypeError(
            f"a gradient of shape {tuple(gradient.shape)} is sparse; Spectral needs dense "
            "gradients "
            "(for torch.nn.Embedding, pass sparse=False)"
        )
    if not gradient.is_floating_point():
        raise TypeError(
            f"gradients must be real floating point, got {gradient.dtype}; view complex weights as "
            "real"
        )


def nonfinite(
    work: Work, samples: Mapping[Tensor, Tensor], gradient: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Return ``GO``, ``SKIP`` or ``RAISE`` as a tensor, so that nothing waits for the device;
    ``None`` if all goes.

    Looked at are curvature that was given, and ``gradient(parameter)``, what is here of it.
    """
    verdict = None
    for group, params in work:
        if group["nonfinite"] == "ignore" or not params:
            continue
        tensors = list(map(gradient, params))
        if samples:
            tensors += [samples[p] for p in params if p in samples]
        # The least and the largest entry show NaN as well, and take one reading of a tensor.
        ends: list[Tensor] = []
        for tensor in tensors:
            if tensor.numel():
                ends += map(torch.Tensor.to, torch.aminmax(tensor), (tensors[0].device,) * 2)
        bad = ~torch.isfinite(torch.stack(ends)).all() if ends else torch.tensor(False)
        found = bad * (SKIP if group["nonfinite"] == "skip" else RAISE)
        verdict = found if verdict is None else torch.maximum(verdict, found.to(verdict.device))
    return verdict


def custom_name(function: object) -> str:
    """Return what checkpoints hold in place of a user's own function."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{CUSTOM_PREFIX}{named.__module__}.{named.__qualname__}"


def nonfinite_sentence(names: Sequence[str], curvature: bool) -> str:
    """Say which gradients are not finite; if none, the curvature that was given may be to blame."""
    where = names[:5] or ["the curvature" if curvature else "a parameter on another rank"]
    return (
        f"gradient of {', '.join(where)} has NaN or infinite entries; nothing was changed. Lower "
        "the learning rate, "
        'clip gradients, or pass nonfinite="skip" to skip such steps'
    )


def plan_of(group: Group, param: Tensor) -> Plan:
    """Choose the layout of a parameter."""
    options = {name: group[name] for name in LAYOUT}
    return plan(tuple(param.shape), **options, elementwise=group["eigenvalues"] == "corrected")


def mends_at(group: Group, count: int, turns: int) -> bool:
    """Tell whether bases are mended at a turn, every second time wherever that is enough.

    Quadratic maps of generators of a norm up to 0.5 stretch bases by at most ``sqrt(1 + 4 |N|^4)``,
    two turns by 1.25, and Newton-Schulz steps come back from below ``sqrt(3)``. Normalized
    generators may be longer, other maps are exact enough to be held to it or the user's own, a CUDA
    graph takes one step for ever. Turns are the parameter's own.
    """
    early = isinstance(group["interval"], int) and group["start"] > 0 and count < EARLY
    always = (
        group["maps"] != "quadratic" or group["rotation"] == "normalized" or group["capturable"]
    )
    return bool(group["reorthonormalize"] and (always or early or turns % 2 == 0))


def rule_of(group: Group, turns: int = 0) -> Rule:
    """Return what decides what a step computes; ``turns`` is the number of the turn, if it turns
    bases.
    """
    options = dict(
        zip(Rule.__dataclass_fields__, itemgetter(*Rule.__dataclass_fields__)(group), strict=True)
    )
    return Rule(**{**options, "reorthonormalize": mends_at(group, group["count"] - 1, turns)})


def rates_of(group: Group, like: Tensor) -> Rates:
    """Return the numbers of a step, in the number format and on the device of a tensor."""
    beta1, beta2 = group["betas"]
    basis = 1 - beta2 if group["basis_lr"] is None else group["basis_lr"]
    floor = (
        LEAST_DAMPING if group["eigenvalues"] == "kronecker" and group["relative_damping"] else 0.0
    )
    # Filled in on the device: copying a number to it would wait for it.
    number = partial(torch.full, (), dtype=like.dtype, device=like.device)
    return Rates(*map(number, (beta1, beta2, basis, max(floor, group["damping"]))))


def initial_state(
    group: Group, param: Tensor, plan: Plan, device: torch.device | str | None = None
) -> State:
    """Return the state of a parameter before its first step."""
    wide = torch.float64 if param.dtype == torch.float64 else torch.float32
    eight = group["state_dtype"] == torch.int8
    dtype = wide if eight else group["state_dtype"] or wide
    found: State = {}
    for index, layout in enumerate(plan.layouts):
        own = new_state(
            (plan.units, layout.blocks, *layout.sizes),
            layout.full,
            rule_of(group),
            momentum=group["betas"][0] > 0,
            residual=group["residual"],
            dtype=dtype,
            basis_dtype=group["basis_dtype"] or (torch.bfloat16 if eight else dtype),
            device=torch.device(device or param.device),
        )
        own = (
            packed(own)
            if eight
            else rounded(own)
            if group["state_dtype"] is None and "scale" in own
            else own
        )
        for name, tensor in own.items():
            place = home(name, tensor.device, group["offload"] and device is None)
            found[name + suffix(plan, index)] = tensor.to(place)
    return found
