"""Checks of arguments. Errors name the argument, what came and what is expected.

torch is imported only where tensors are checked, because the NumPy side does without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Choice = TypeVar("Choice", bound=Callable[..., Any])


def describe(value: object) -> str:
    """Say what an argument is: the number format of a tensor, or the name of another type."""
    return str(getattr(value, "dtype", type(value).__name__))


def check_number(value: object, name: str, low: float, high: float = math.inf) -> None:
    """Raise unless ``value`` is a real number with ``low <= value <= high``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {describe(value)}")
    if not low <= value <= high or abs(value) == math.inf:
        wanted = f"at least {low}" if math.isinf(high) else f"between {low} and {high}"
        raise ValueError(f"{name} must be finite and {wanted}, got {value}")


def check_size(value: object, name: str) -> None:
    """Raise unless ``value`` is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {describe(value)}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_function(value: object, name: str) -> None:
    """Raise unless ``value`` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {describe(value)}")


def choose(value: str | Choice, table: Mapping[str, Choice], name: str) -> Choice:
    """Return the function that a name in ``table`` stands for; functions stand for themselves."""
    if not isinstance(value, str) and callable(value):
        return value
    if isinstance(value, str) and value in table:
        return table[value]
    wanted = f"{name} must be one of {', '.join(table)} or a function"
    if isinstance(value, str):
        raise ValueError(f"{wanted}, got {value!r}")
    raise TypeError(f"{wanted}, got {describe(value)}")


def check_real(tensor: torch.Tensor, name: str) -> None:
    """Raise unless ``tensor`` is a real floating-point tensor."""
    import torch

    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise TypeError(f"{name} must be a real floating-point tensor, got {describe(tensor)}")


def check_wide(tensor: torch.Tensor, name: str) -> None:
    """Raise unless ``tensor`` is a real tensor in full precision."""
    check_real(tensor, name)
    if tensor.element_size() < 4:
        raise TypeError(
            f"{name} must be float32 or float64, got {tensor.dtype}; only bases may be half "
            "precision"
        )


def check_beside(
    tensor: torch.Tensor,
    name: str,
    other: torch.Tensor,
    other_name: str,
    also: Sequence[torch.dtype] = (),
) -> None:
    """Raise unless ``tensor`` has the device and number format of ``other``, or of ``also``."""
    check_real(tensor, name)
    if tensor.dtype not in (other.dtype, *also):
        formats = " or ".join(map(str, (other.dtype, *also)))
        raise TypeError(f"{name} must be {formats} to fit {other_name}, got {tensor.dtype}")
    check_device(tensor, name, other, other_name)


def check_device(tensor: torch.Tensor, name: str, other: torch.Tensor, other_name: str) -> None:
    """Raise unless two tensors are on the same device."""
    if tensor.device != other.device:
        raise ValueError(
            f"{name} is on device {tensor.device}, but {other_name} is on {other.device}"
        )


def check_nonempty(tensor: torch.Tensor, name: str) -> None:
    """Raise unless ``tensor`` holds something along its first axis."""
    check_real(tensor, name)
    if tensor.ndim == 0 or len(tensor) == 0:
        raise ValueError(
            f"{name} must hold at least one entry along the first axis, got shape "
            f"{tuple(tensor.shape)}"
        )


def check_finite(tensor: torch.Tensor, name: str) -> None:
    """Raise unless ``tensor`` is a real floating-point tensor without NaN or infinite entries."""
    check_real(tensor, name)
    if not tensor.is_meta and not tensor.isfinite().all():
        raise ValueError(f"{name} must be finite, but it contains NaN or infinite entries")


def check_symmetric(matrix: torch.Tensor, name: str) -> None:
    """Raise unless ``matrix`` is a finite, symmetric, real matrix or a batch of them."""
    import torch

    check_finite(matrix, name)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] == 0:
        raise ValueError(
            f"{name} must be square with at least one row, got shape {tuple(matrix.shape)}"
        )
    if not matrix.numel() or matrix.is_meta:
        return
    gap = (matrix - matrix.mT).abs().amax()
    if gap > 1e3 * torch.finfo(matrix.dtype).eps * matrix.abs().amax():
        raise ValueError(
            f"{name} must be symmetric, but entries differ from their mirror images by up to "
            f"{gap:.3g}"
        )


def check_dense(matrix: torch.Tensor) -> None:
    """Raise unless ``matrix`` can be factorized: symmetric, and in full precision."""
    check_symmetric(matrix, "matrix")
    check_wide(matrix, "matrix")


def check_positive(eigs: torch.Tensor, name: str) -> None:
    """Raise unless all these eigenvalues of the matrix ``name`` are positive."""
    if not (eigs > 0).all():
        raise ValueError(
            f"{name} must be positive definite, but has an eigenvalue {eigs.min():.3g}"
        )


def check_eigs(eigs: torch.Tensor) -> None:
    """Raise unless ``eigs`` can be eigenvalues.

    Their sign is not looked at, to spare a device synchronization.
    """
    check_wide(eigs, "eigs")
    if eigs.ndim == 0 or eigs.shape[-1] == 0:
        raise ValueError(f"eigs must have shape (*batch, n) with n >= 1, got {tuple(eigs.shape)}")


def check_sizes(sizes: Sequence[int], kinds: Sequence[str]) -> None:
    """Raise unless ``sizes`` and ``kinds`` describe the factors of a Kronecker product."""
    if not sizes:
        raise ValueError("sizes must hold at least one size, got none")
    for index, size in enumerate(sizes):
        check_size(size, f"sizes[{index}]")
    if len(kinds) != len(sizes):
        raise ValueError(
            f"kinds must name one kind for each of the {len(sizes)} factors, got {list(kinds)}"
        )
    for kind in kinds:
        if kind not in ("full", "diagonal", "identity"):
            raise ValueError(f'kinds must be "full", "diagonal" or "identity", got {kind!r}')


def check_damping(damping: float | torch.Tensor, scale: torch.Tensor) -> None:
    """Raise unless damping is a number, or a tensor of one for each matrix, and not negative."""
    if isinstance(damping, (int, float)) or not hasattr(damping, "shape"):
        return check_number(damping, "damping", 0.0)
    check_finite(damping, "damping")
    check_beside(damping, "damping", scale, "S")
    if damping.shape != scale.shape:
        raise ValueError(
            f"damping must be a number or have shape {tuple(scale.shape)}, got "
            f"{tuple(damping.shape)}"
        )
    if (damping < 0).any():
        raise ValueError(f"damping must be at least 0.0, got {damping.min():.3g}")


def check_linear(
    semidefinite: bool, lr: float, basis_rate: float, decay: float, rayleigh: bool
) -> None:
    """Raise if eigenvalues that follow the linear update could turn negative."""
    if not semidefinite:
        raise ValueError(
            "positive=truncated_exp needs curvature without negative eigenvalues, or the "
            "eigenvalues of S could turn negative; use positive=exp, or pass semidefinite=True to "
            "Dense if the matrix is known to have none"
        )
    if lr * decay > 1:
        raise ValueError(
            f"positive=truncated_exp needs lr * decay <= 1, got lr={lr} and decay={decay}"
        )
    if rayleigh and basis_rate not in (0, lr):
        raise ValueError(
            "positive=truncated_exp with rayleigh=True needs turning.rate equal to lr or 0, or the "
            f"eigenvalues of S could turn negative; got rate={basis_rate} and lr={lr}"
        )


def show(value: Any) -> str:
    """Return a dataclass as one would write it: without defaults, and functions by their names."""
    parts = []
    for field in fields(value):
        content = getattr(value, field.name)
        if content != field.default:
            parts.append(f"{field.name}={_shown(content)}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _shown(value: Any) -> str:
    if isinstance(value, partial):
        options = [f"{name}={content!r}" for name, content in value.keywords.items()]
        return f"partial({', '.join([_shown(value.func), *map(repr, value.args), *options])})"
    return str(getattr(value, "__qualname__", repr(value)))
