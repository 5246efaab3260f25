"""State as it is kept: by name, in 32, 16 or 8 bits.

In 16 bits, second moments of matrices are the upper half of a float32. In 8 bits, the largest entry
of every 256 is their unit, and each entry is the upper part of a float32 in this unit: the sign and
16 powers of two for momentum, 32 powers of two for second moments, which never become zero, and
three more bits. The last bit is one of 6 to 12 percent (in 16 bits, of 0.4 to 0.8), and averages
change by less in a step: so entries are rounded up or down in turn, with a phase that follows the
golden ratio from step to step, and their mean over time is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from . import matrix, vector
from .layout import Plan
from .matrix import MatrixState, Side
from .options import Options
from .vector import VectorState

State = dict[str, Tensor]
"""Tensors of one parameter, or of one of its rectangles, by name."""

BLOCK = 256
"""This many entries share a unit."""
SMALLEST_PACKED = 1024
"""Tensors with fewer entries are kept as they are computed with: packing would gain nothing."""
ROUNDED = "second_moment"
"""What can be kept in 16 bits and computed with in 32."""
LARGEST_CODE = {"momentum": 127, "second_moment": 255}
"""What can be kept in 8 bits, and the code of the largest entry."""
UNIT = "_unit"
SCALARS = ("step", "turns", "scale", "gain", "agreement")
"""What has one number for each element of a batch."""
CUT = 20
"""Bits of a float32 that are cut off; of the 23 that divide a power of two, three remain."""
ONE = 127 << (23 - CUT)
"""Code of 1.0."""
LARGEST_ROUNDED = 0x7F7F7FFF
"""The largest float32 that 16 bits do not round to infinity, as an integer."""
GOLDEN = 648055
PLASTIC = 791547
"""2^20 divided by the golden ratio, and by the root of x^3 = x + 1: multiples of these numbers fill
20 bits evenly.
"""


def to_names(state: MatrixState | VectorState) -> State:
    """Return the tensors of a state by the names that checkpoints have for them."""
    tensors: State = {}
    for name, value in zip(state._fields, state, strict=True):
        if isinstance(value, Tensor):
            tensors[name] = value
    for axis, side in enumerate(getattr(state, "sides", ())):
        for name, value in zip(side._fields, side, strict=True):
            if value is not None:
                tensors[f"{name}_{axis}"] = value
    return tensors


def is_matrix(tensors: Mapping[str, Tensor], suffix: str = "") -> bool:
    """Tell whether these are the tensors of a matrix, rather than of a vector."""
    return "scale" + suffix in tensors


def matrix_state(tensors: Mapping[str, Tensor]) -> MatrixState:
    """Undo ``to_names`` for matrices."""
    sides: list[Side] = []
    while f"eigs_{len(sides)}" in tensors:
        axis = len(sides)
        parts = (tensors.get(f"{name}_{axis}") for name in ("basis", "speed"))
        sides.append(Side(tensors[f"eigs_{axis}"], *parts))
    return MatrixState(
        step=tensors["step"],
        turns=tensors["turns"],
        scale=tensors["scale"],
        sides=tuple(sides),
        momentum=tensors.get("momentum"),
        second_moment=tensors.get("second_moment"),
        gain=tensors.get("gain"),
        agreement=tensors.get("agreement"),
    )


def vector_state(tensors: Mapping[str, Tensor]) -> VectorState:
    """Undo ``to_names`` for vectors."""
    return VectorState(tensors["step"], tensors["second_moment"], tensors.get("momentum"))


def suffix_of(plan: Plan, part: int) -> str:
    """Return what the names of a rectangle's state end with; nothing if it is the only one."""
    return f".{part}" if len(plan.layouts) > 1 else ""


def part_of(state: Mapping[str, Tensor], plan: Plan, part: int) -> State:
    """Return the tensors of one rectangle, of all that a parameter has."""
    suffix = suffix_of(plan, part)
    return {
        name.removesuffix(suffix): value for name, value in state.items() if name.endswith(suffix)
    }


def initial_state(
    options: Options, plan: Plan, dtype: torch.dtype, device: torch.device | str
) -> State:
    """Return a parameter's state before its first step, as it is kept.

    Args:
        options: of its group.
        plan: how it is laid out.
        dtype: its number format.
        device: where it is.
    """
    device = torch.device(device)
    state: State = {}
    for part, layout in enumerate(plan.layouts):
        shape = (plan.units, layout.blocks, *layout.sizes)
        wide = _computed(options, dtype)
        tensors = _new_tensors(wide, shape, layout.has_basis, device)
        if options.state_dtype == torch.int8:
            tensors = packed(tensors)
        elif options.state_dtype is None and is_matrix(tensors):
            tensors = rounded(tensors)
        for name, tensor in tensors.items():
            state[name + suffix_of(plan, part)] = tensor
    return state


def _computed(options: Options, dtype: torch.dtype) -> Options:
    """Return options with the formats that state is computed with."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if options.state_dtype == torch.int8:
        bases = options.turning.dtype or torch.bfloat16
        return replace(options, state_dtype=wide, turning=replace(options.turning, dtype=bases))
    return replace(options, state_dtype=options.state_dtype or wide)


def _new_tensors(
    options: Options, shape: tuple[int, ...], has_basis: bool, device: torch.device
) -> State:
    if not has_basis and options.eigenvalues == "corrected":
        return to_names(vector.new_state(shape, options, device=device))
    return to_names(matrix.new_state(shape, options, has_basis=has_basis, device=device))


def packed(tensors: State) -> State:
    """Return new state with what can be kept in 8 bits in that form."""
    kept = dict(tensors)
    for name in LARGEST_CODE:
        if name in tensors and tensors[name].shape[1:].numel() >= SMALLEST_PACKED:
            value = tensors[name]
            code = torch.int8 if name == "momentum" else torch.uint8
            kept[name] = torch.zeros_like(value, dtype=code)
            kept[name + UNIT] = value.new_zeros(len(value), -(-value.shape[1:].numel() // BLOCK))
    return kept


def rounded(tensors: State) -> State:
    """Return new state with second moments of float32 in 16 bits."""
    value = tensors.get(ROUNDED, torch.empty(0))
    if value.dtype == torch.float32 and value.shape[1:].numel() >= SMALLEST_PACKED:
        return {**tensors, ROUNDED: value.bfloat16()}
    return tensors


def is_packed(tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether something is kept otherwise than it is computed with."""
    if any(name + UNIT in tensors for name in LARGEST_CODE):
        return True
    moment = tensors.get(ROUNDED)
    return moment is not None and moment.dtype == torch.bfloat16 and is_matrix(tensors)


def formats_of(tensors: Mapping[str, Tensor]) -> tuple[torch.dtype, ...]:
    """Return the formats of what is as large as the gradients; others cannot share a tensor."""
    return tuple(tensors[name].dtype for name in LARGEST_CODE if name in tensors)


def unpack(tensors: Mapping[str, Tensor]) -> State:
    """Return state as it is computed with."""
    computed = {}
    for name, value in tensors.items():
        if name.endswith(UNIT):
            continue
        if name + UNIT in tensors:
            computed[name] = _decode(value, tensors[name + UNIT], LARGEST_CODE[name])
        elif name == ROUNDED and value.dtype == torch.bfloat16:
            computed[name] = value.float()
        else:
            computed[name] = value
    return computed


def pack_(tensors: State, computed: State) -> None:
    """Take over into ``tensors``, as they are kept, what a step has computed, using it up."""
    step = computed["step"]
    for name, value in computed.items():
        if name + UNIT in tensors:
            codes, unit = _encode(value, step, LARGEST_CODE[name])
            tensors[name].copy_(codes)
            tensors[name + UNIT].copy_(unit)
        elif name == ROUNDED and (value.dtype, tensors[name].dtype) == WIDE_AND_ROUNDED:
            tensors[name].copy_(_shifted_(value, step))
        elif value is not tensors[name]:
            tensors[name].copy_(value)


WIDE_AND_ROUNDED = (torch.float32, torch.bfloat16)


def _shifted_(x: Tensor, step: Tensor) -> Tensor:
    """Move numbers that are not negative by up to half a last bit of 16, to round up or down."""
    phase = (step.long() * (GOLDEN >> 4) & 0xFFFF).int() - 0x8000
    bits = x.view(torch.int32)  # new memory would cost more
    bits.add_(phase.view(-1, *[1] * (x.ndim - 1))).clamp_(0, LARGEST_ROUNDED)
    return x


def _blocks(x: Tensor) -> Tensor:
    """Return the entries of each element of a batch in blocks, of which the last is filled up."""
    flat = x.flatten(1)
    filled = torch.nn.functional.pad(flat, (0, -flat.shape[1] % BLOCK))
    return filled.view(len(x), filled.shape[1] // BLOCK, BLOCK)


def _encode(x: Tensor, step: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return codes of numbers, and the unit of each block; ``top`` is the code of the unit."""
    blocks = _blocks(x)
    unit = blocks.abs().amax(-1)
    ratio = blocks / unit.clamp_min(torch.finfo(unit.dtype).tiny)[..., None]
    place = torch.arange(BLOCK, dtype=torch.int64, device=x.device)
    phase = (step.long()[:, None, None] * GOLDEN + place * PLASTIC) & ((1 << CUT) - 1)
    shifted = (ratio.abs().float().view(torch.int32) + phase.int()) >> CUT
    codes = (shifted + (top - ONE)).clamp_(0, top)
    if top == LARGEST_CODE["momentum"]:
        codes = codes * ratio.sign().int()
    return codes.flatten(1)[:, : x.shape[1:].numel()].view(x.shape), unit


def _decode(codes: Tensor, unit: Tensor, top: int) -> Tensor:
    """Undo ``_encode``, but for what was cut off."""
    blocks = _blocks(codes).int()
    size = ((blocks.abs() + (ONE - top)) << CUT).view(torch.float32)
    if top == LARGEST_CODE["momentum"]:
        size = size * blocks.sign()
    whole = (size * unit[..., None]).flatten(1)[:, : codes.shape[1:].numel()]
    return whole.contiguous().view(codes.shape)
