"""Small numerical helpers that every other module shares."""

import math

import torch
from torch import Tensor

# In these only bases are stored; eigenvalues then stay in float32
HALF = (torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the format in which sums over ``dtype`` numbers are kept: float32 for half
    precision.
    """
    return torch.float32 if dtype in HALF else dtype


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices in their common dtype, accumulating half precision in float32 on every
    device.

    Accelerators do so by themselves; many CPUs are a hundred times slower in half precision than in
    float32, or crash.
    """
    if a.dtype != b.dtype:
        dtype = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(dtype), b.to(dtype)
    if a.dtype in HALF and a.device.type == "cpu":
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


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


def symmetrize(matrix: Tensor) -> Tensor:
    """Return ``(M + M^T) / 2``, which rounding leaves exactly symmetric."""
    return (matrix + matrix.mT).mul_(0.5)


def centered_exp(logs: Tensor, mean: Tensor | None = None) -> Tensor:
    """Return ``exp(logs - mean(logs))``, positive vectors with product one; the mean, if known, has
    an axis of one.

    Vectors that spread beyond the square root of the number format's range are shortened to it,
    which keeps their product at one and leaves room for products and inverses of eigenvalues.
    """
    centered = logs - (logs.mean(-1, keepdim=True) if mean is None else mean)
    bound = 0.5 * math.log(torch.finfo(logs.dtype).max)
    return (
        centered * centered.abs().amax(-1, keepdim=True).clamp_min(bound).reciprocal().mul(bound)
    ).exp()
