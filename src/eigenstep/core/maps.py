"""Maps from local coordinates to the constraint sets: orthogonal matrices and positive vectors.

The paper's update moves a basis ``B`` by ``B Cayley(N)`` with a skew-symmetric generator ``N`` and
the eigenvalues ``d`` by ``d * exp(h / d)`` with a tangent vector ``h``. Both maps come exact and
truncated; the truncated ones need matrix products only, so they run in low precision and on every
accelerator.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.linalg import diagonal

from .numerics import HALF, accumulation_dtype, largest, matmul

Orthogonal = Callable[[Tensor], Tensor]
"""``orthogonal(N) -> Q``: skew-symmetric generators to orthogonal matrices, shape ``(*batch, n,
n)``.
"""
Positive = Callable[[Tensor, Tensor], Tensor]
"""``positive(d, n) -> d``: old eigenvalues and the linear update's to new ones, shape ``(*batch,
n)``.
"""


def _plus_identity(matrix: Tensor) -> Tensor:
    result = matrix.clone()
    diagonal(result).add_(1)
    return result


def cayley(generator: Tensor) -> Tensor:
    """Return ``Cayley(N) = (I + N)(I - N)^-1``, an orthogonal matrix for every skew-symmetric
    ``N``.

    Entries are cut at ``1 / sqrt(eps)``, where a pair of axes turns by half a turn up to
    ``sqrt(eps)``: beyond it, rounding in the solve would spoil the orthogonality.
    """
    n = generator.to(accumulation_dtype(generator.dtype))
    limit = torch.finfo(n.dtype).eps ** -0.5
    n = n.clamp(-limit, limit)
    # The two factors commute, so one solve from the left is enough.
    return torch.linalg.solve(_plus_identity(-n), _plus_identity(n)).to(generator.dtype)


def truncated_cayley(generator: Tensor, cap: float | None = 0.6) -> Tensor:
    """Return the Cayley map with its Neumann series cut, ``(I + N)^2 (I + N^2)(I + N^4)``.

    With ``Y = N^2`` this is ``(I + Y)(I + Y^2)(I + Y + 2N)``: four products here, and a fifth with
    the basis. It misses orthogonality by ``2 ||N||^8``, so generators are shortened until
    ``||N^2||_F^(1/2)``, a bound on the spectral norm, is at most the cap; ``None`` leaves them as
    they are, as the paper does after normalizing: the series converges.
    """
    n = generator
    y = matmul(n, n)
    if cap is not None:
        shrink = shrink_factor(y, cap)
        n, y = n * shrink, y * shrink.square()
    tail = matmul(_plus_identity(y), _plus_identity(matmul(y, y)))
    return matmul(tail, _plus_identity(y + 2 * n))


def shrink_factor(square: Tensor, cap: float) -> Tensor:
    """Return ``min(1, cap / ||N^2||_F^(1/2))`` for each generator of a batch, given ``square =
    N^2``.
    """
    norm = torch.linalg.matrix_norm(
        square.float() if square.dtype in HALF else square, keepdim=True
    )
    return (cap / norm.sqrt_().clamp_min_(cap)).to(square.dtype)


def quadratic(generator: Tensor, cap: float = 0.5) -> Tensor:
    """Return the Cayley map to second order, ``I + 2 c N + 2 N^2``: one product.

    Squares of lengths in a plane that turns by ``s`` become ``1 + 4 s^2 (s^2 + c^2 - 1)`` times
    what they were. Here ``1 - c^2`` is ``||N^2||_F^2 / ||N||_F^2``, the mean of all ``s^2`` with
    weights ``s^2``: one plane turns exactly, and otherwise at most ``4 ||N||^4`` is missing, which
    a Newton-Schulz step on the turned basis makes good.
    """
    result = matmul(generator, generator)
    dtype = result.dtype
    norm = torch.linalg.matrix_norm(result.float() if dtype in HALF else result, keepdim=True)
    # Of a generator beyond all measure nothing is left
    norm.clamp_max_(torch.finfo(norm.dtype).max)
    trace = diagonal(result).sum(-1, keepdim=True, dtype=norm.dtype)[..., None]  # -||N||_F^2
    shrink = norm.clamp_min(cap**2).reciprocal_().mul_(cap**2)  # of N^2
    norm.mul_(shrink).square_()
    tilted = (
        shrink.addcdiv(norm, trace.clamp_max_(-torch.finfo(norm.dtype).tiny))
        .clamp_min_(0.0)
        .sqrt_()
    )
    result.mul_(shrink.mul_(2).to(dtype)).addcmul_(generator, tilted.to(dtype), value=2)
    diagonal(result).add_(1)
    return result


def exp(eigs: Tensor, target: Tensor) -> Tensor:
    """Move eigenvalues from ``d`` towards ``n`` by the factor ``e^((n - d)/d)``, so that they stay
    positive.

    Results that the number format cannot hold are cut at its limits, so that one huge curvature
    matrix leaves finite, positive eigenvalues behind, with which one can still calculate.
    """
    root = (
        (target - eigs) / eigs / 2
    ).exp()  # squared only beside d, lest the factor overflow where the result fits
    return (eigs * root * root).clamp(torch.finfo(eigs.dtype).tiny, largest(eigs.dtype))


def truncated_exp(eigs: Tensor, target: Tensor) -> Tensor:
    """Return ``n``, the first-order truncation of ``exp``, for ``n >= 0``.

    What vanishes against ``d`` is set to ``eps^2 d``, so that eigenvalues stay positive and can be
    inverted.
    """
    limits = torch.finfo(eigs.dtype)
    return torch.maximum(target, limits.eps**2 * eigs).clamp(limits.tiny, limits.max * limits.eps)


def reorthonormalize(basis: Tensor) -> Tensor:
    """Pull an almost orthogonal basis back with one Newton-Schulz step, ``1.5 B - 0.5 B B^T B``.

    The defect ``||B^T B - I||`` is squared, up to the rounding of the basis' own number format.
    """
    b = basis.float() if basis.dtype in HALF else basis
    return (b @ (b.mT @ b)).lerp_(b, 1.5).to(basis.dtype)


ORTHOGONAL: Mapping[str, Orthogonal] = {
    f.__name__: f for f in (cayley, truncated_cayley, quadratic)
}
POSITIVE: Mapping[str, Positive] = {"exp": exp, "truncated_exp": truncated_exp}
