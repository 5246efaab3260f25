"""State that is kept otherwise than it is computed with: in 8 or 16 bits, or in the memory of the
host.

In 16 bits, second moments of matrices are the upper half of a float32. In 8 bits, the largest entry
of every 256 is their unit, and each entry is the upper part of a float32 in this unit: the sign and
16 powers of two for momentum, 32 powers of two for second moments, which never become zero, and
three more bits. The last bit is one of 6 to 12 percent (in 16 bits, of 0.4 to 0.8), and averages
change by less in a step: so entries are rounded up or down in turn, with a phase that follows the
golden ratio from step to step, and their mean over time is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .state import State

BLOCK = 256
"""So many entries share a unit."""
LEAST = 1024
"""What has fewer entries is kept as it is computed with: packing would gain nothing."""
ROUNDED = "second_moment"  # What can be kept in 16 bits and computed with in 32
PACKED = {"momentum": 127, "second_moment": 255, "graft": 255}
"""What can be kept in 8 bits, and the code of the largest entry."""
BASES = ("basis", "residual")
"""What can be learned anew, by the first words of the names."""
LARGE = (*PACKED, *BASES)
"""What can be kept on the host, by the first words of the names."""
UNIT = "_unit"
# What there may be of a parameter without bases
ADAM = ("step", *PACKED, *(name + UNIT for name in PACKED))
CUT = 20
"""Bits of a float32 that are cut off; of the 23 that tell where between two powers of two it is,
three remain.
"""
ONE = 127 << (23 - CUT)
"""What remains of the number one."""
LAST = 0x7F7F7FFF  # The largest float32 that is not rounded to infinity in 16 bits, as an integer
GOLDEN, OTHER = 648055, 791547
"""2^20 divided by the golden ratio, and by the root of x^3 = x + 1: multiples of these fill the 20
bits evenly.
"""


def packed(state: State) -> State:
    """Return new state with what can be kept in 8 bits in that form."""
    found = dict(state)
    for name in PACKED:
        if name in state and state[name].shape[1:].numel() >= LEAST:
            value = state[name]
            found[name] = torch.zeros_like(
                value, dtype=torch.int8 if name == "momentum" else torch.uint8
            )
            found[name + UNIT] = value.new_zeros(len(value), -(-value.shape[1:].numel() // BLOCK))
    return found


def rounded(state: State) -> State:
    """Return new state with second moments of float32 in 16 bits."""
    value = state.get(ROUNDED, torch.empty(0))
    large = value.dtype == torch.float32 and value.shape[1:].numel() >= LEAST
    return {**state, ROUNDED: value.bfloat16()} if large else state


def is_packed(state: Mapping[str, Tensor], suffix: str = "") -> bool:
    """Tell whether something is kept otherwise than it is computed with, of what the names end
    with.
    """
    moment = state.get(ROUNDED + suffix)
    narrow = moment is not None and moment.dtype == torch.bfloat16 and "scale" + suffix in state
    return narrow or any(name + UNIT + suffix in state for name in PACKED)


def formats(state: Mapping[str, Tensor], suffix: str = "") -> tuple[torch.dtype, ...]:
    """Return the number formats of what is as large as the gradients; what differs in them cannot
    share a tensor.
    """
    return tuple(state[name + suffix].dtype for name in PACKED if name + suffix in state)


def home(name: str, device: torch.device, offload: bool) -> torch.device:
    """Return where something is kept, given its name and where the weights are."""
    return torch.device("cpu") if offload and name.startswith(LARGE) else device


def joined(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Put tensors side by side, where a device can read them fastest if it has no room for them."""
    whole = torch.cat(list(tensors))
    return whole.pin_memory() if device.type == "cuda" and not whole.is_cuda else whole


def opened(state: State, device: torch.device) -> State:
    """Return state as it is computed with."""
    found = {}
    for name, value in state.items():
        if not name.endswith(UNIT):
            moved = value.to(device, non_blocking=True)
            unit = state.get(name + UNIT)
            if unit is not None:
                moved = _decode(moved, unit.to(device, non_blocking=True), PACKED[name])
            found[name] = (
                moved.float() if name == ROUNDED and moved.dtype == torch.bfloat16 else moved
            )
    return found


def close(state: State, changed: State, step: Tensor) -> None:
    """Take over, into state as it is kept, what a step has changed, using it up, and how many there
    were of each.
    """
    for name, value in changed.items():
        if name + UNIT in state:
            for kept, new in zip(
                (state[name], state[name + UNIT]), _encode(value, step, PACKED[name]), strict=True
            ):
                kept.copy_(new)
        elif (
            name == ROUNDED and value.dtype == torch.float32 and state[name].dtype == torch.bfloat16
        ):
            state[name].copy_(_shifted(value, step))
        elif value is not state[name]:
            state[name].copy_(value)


def _shifted(x: Tensor, step: Tensor) -> Tensor:
    """Move numbers that are not negative, in place, by up to half a last bit of 16, which rounds
    them up or down.
    """
    phase = (step.long() * (GOLDEN >> 4) & 0xFFFF).int() - 0x8000
    # New memory would cost more
    x.view(torch.int32).add_(phase.view(-1, *[1] * (x.ndim - 1))).clamp_(0, LAST)
    return x


def _blocks(x: Tensor) -> Tensor:
    """Return the entries of each element of a stack in blocks, the last of which is filled up."""
    flat = x.flatten(1)
    filled = torch.nn.functional.pad(flat, (0, -flat.shape[1] % BLOCK))
    return filled.view(len(x), filled.shape[1] // BLOCK, BLOCK)


def _encode(x: Tensor, step: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return codes of numbers, and the unit of each block; ``top`` is the code of the unit."""
    blocks = _blocks(x)
    unit = blocks.abs().amax(-1)
    ratio = blocks / unit.clamp_min(torch.finfo(unit.dtype).tiny)[..., None]
    place = torch.arange(BLOCK, dtype=torch.int64, device=x.device)
    phase = (step.long()[:, None, None] * GOLDEN + place * OTHER) & ((1 << CUT) - 1)
    codes = (((ratio.abs().float().view(torch.int32) + phase.int()) >> CUT) + (top - ONE)).clamp_(
        0, top
    )
    codes = codes * ratio.sign().int() if top == 127 else codes
    return codes.flatten(1)[:, : x.shape[1:].numel()].view(x.shape), unit


def _decode(codes: Tensor, unit: Tensor, top: int) -> Tensor:
    """Undo ``_encode``, but for what was cut off."""
    blocks = _blocks(codes).int()
    size = ((blocks.abs() + (ONE - top)) << CUT).view(torch.float32)
    size = size * blocks.sign() if top == 127 else size
    return (
        (size * unit[..., None])
        .flatten(1)[:, : codes.shape[1:].numel()]
        .contiguous()
        .view(codes.shape)
    )
