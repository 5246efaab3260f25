"""What follows from the options of a parameter group: layout, state, rule and rates of a step, and what it costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .distributed.sharding import Candidate
from .layout import Layout, plan
from .options import interval_at
from .report import matmul_flops
from .state import Rates, Rule, State, new_state

Group = dict[str, Any]


def layout_of(group: Group, param: Tensor) -> Layout:
    """Choose the layout of a parameter."""
    options = {name: group[name] for name in ("structure", "max_dim", "max_ratio", "long_sides")}
    return plan(tuple(param.shape), **options)


def rule_of(group: Group) -> Rule:
    """Return the options that decide what is computed."""
    names = Rule.__dataclass_fields__
    return Rule(**{name: group[name] for name in names})


def rates_of(group: Group, like: Tensor) -> Rates:
    """Return the numbers of a step, in the number format and on the device of a tensor."""
    beta1, beta2 = group["betas"]
    basis = 1 - beta2 if group["basis_lr"] is None else group["basis_lr"]
    values = (beta1, beta2, basis, group["damping"])
    # Filled in on the device: copying a number to it would wait for it.
    return Rates(*(torch.full((), x, dtype=like.dtype, device=like.device) for x in values))


def initial_state(group: Group, param: Tensor, layout: Layout, device: torch.device | str | None = None) -> State:
    """Return the state of a parameter before its first step."""
    dtype = group["state_dtype"] or (torch.float64 if param.dtype == torch.float64 else torch.float32)
    return new_state(
        (layout.pieces, layout.blocks, *layout.sizes),
        layout.full,
        rule_of(group),
        momentum=group["betas"][0] > 0,
        residual=group["residual"],
        dtype=dtype,
        basis_dtype=group["basis_dtype"] or dtype,
        device=torch.device(device or param.device),
    )


def candidate_of(group: Group, param: Tensor) -> Candidate:
    """Say what stepping a parameter costs, so that ranks can share the work."""
    layout = layout_of(group, param)
    state = initial_state(group, param, layout, device="meta")
    flops = matmul_flops(layout, group, interval_at(group["interval"], group["count"]))
    memory = sum(t.numel() * t.element_size() for t in state.values())
    costs = (flops / layout.pieces, memory / layout.pieces, param.numel() / layout.pieces)
    return Candidate(param, layout, costs, state["scale"].dtype)
