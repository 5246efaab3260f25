"""Small numerical helpers that every other module shares."""

import torch
from torch import Tensor

# In these only bases are stored; eigenvalues then stay in float32
HALF = (torch.bfloat16, torch.float16)


def largest(dtype: torch.dtype) -> float:
    """Return the largest number of a format that leaves room for sums of many: ``max * eps``."""
    limits = torch.finfo(dtype)
    return limits.max * limits.eps


def saturate(x: Tensor) -> Tensor:
    """Cut numbers at ``largest``; what overflowed on the way becomes that, too, and undecidable
    signs zero.
    """
    return x.nan_to_num(0.0).clamp(-largest(x.dtype), largest(x.dtype))


def contract(x: Tensor, matrix: Tensor, axis: int, event_ndim: int) -> Tensor:
    """Contract axis ``axis`` (negative) of ``x`` with the first axis of ``matrix``."""
    spread = matrix.reshape(*matrix.shape[:-2], *[1] * (event_ndim - 1), *matrix.shape[-2:])
    dtype = torch.promote_types(x.dtype, matrix.dtype)
    compute = torch.float32 if dtype in HALF and x.device.type == "cpu" else dtype
    moved = x.movedim(axis, -1).to(compute)
    return torch.einsum("...i,...ij->...j", moved, spread.to(compute)).to(dtype).movedim(-1, axis)
