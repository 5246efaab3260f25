"""Generators of the basis rotation: which skew-symmetric ``N`` turns the basis towards new
curvature.

One step of learning wants the eigenvectors of ``A = (1 - gamma beta) Diag(d) + beta W``, the
average of old and new curvature in the current eigenbasis. Its off-diagonal entries say how far the
basis ``B`` is from diagonalizing it; a rotation turns them into ``N``, and the basis becomes ``B
Cayley(N)``. All agree to first order in ``beta`` where eigenvalues are distinct; they differ in
what happens where eigenvalues are close.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.linalg import diagonal

Rotation = Callable[[Tensor, Tensor], Tensor]
"""``rotation(d, A) -> N``: eigenvalues ``(*batch, n)``, average ``(*batch, n, n)``, generator
``(*batch, n, n)``.
"""


def moore_penrose(eigs: Tensor, average: Tensor, *, gap: float = 1e-6) -> Tensor:
    """The paper's rotation, ``N_ij = -A_ij / (2 (d_i - d_j))``, zero for eigenvalues that are
    nearly equal.

    Those differ by at most the fraction ``gap`` of the larger one (Moore-Penrose inverse of the
    Fisher metric).
    """
    difference = eigs[..., :, None] - eigs[..., None, :]
    larger = torch.maximum(eigs[..., :, None], eigs[..., None, :])
    apart = difference.abs() > gap * larger
    generator = -0.5 * average / difference.where(apart, 1.0)
    limit = torch.finfo(generator.dtype).max
    return torch.where(apart, generator.clamp(-limit, limit), 0.0)


def normalized(
    eigs: Tensor, average: Tensor, *, rate: float | Tensor = 0.5, gap: float = 0.1
) -> Tensor:
    """The paper's rotation for neural networks, ``moore_penrose`` rescaled to the norm ``rate /
    2``.

    The rate is the paper's second step size, beta-bar-2: below 2, so that the truncated Cayley map
    converges.
    """
    direction = moore_penrose(eigs, average, gap=gap)
    # The entries may be huge: scale by the largest before squaring them.
    largest = direction.abs().amax((-2, -1), keepdim=True)
    direction = direction / largest.clamp_min(torch.finfo(direction.dtype).tiny)
    norm = torch.linalg.matrix_norm(direction, keepdim=True)
    return (rate / 2) * direction / norm.clamp_min(torch.finfo(direction.dtype).tiny)


def bounded(eigs: Tensor, average: Tensor, *, pairwise: bool = False) -> Tensor:
    """Our rotation: Jacobi angles softened so that they stay bounded and move at exact ties.

    ``N_ij = -A_ij sgn(D_ij) / (|D_ij| + sqrt(D_ij^2 + 4 e_ij))`` with ``D_ij = A_ii - A_jj``. Every
    row has a norm of at most ``1/sqrt(2)``, without any threshold for eigenvalues that are nearly
    equal. By default ``e_ij`` is the mean squared norm of rows ``i`` and ``j`` off the diagonal,
    best for noisy gradients. With ``pairwise`` it is ``A_ij^2``, which gives the exact Jacobi angle
    of each pair by itself, best for low-rank or deterministic curvature.
    """
    # Scaling A leaves N unchanged; at unit size, squares neither overflow nor vanish.
    tiny, off = torch.finfo(average.dtype).tiny, average.abs()
    torch.div(average, off.amax((-2, -1), keepdim=True).clamp_min_(tiny), out=off)
    values = diagonal(off).clone()
    diagonal(off).zero_()
    # From here on in place: these matrices are as large as the bases, and memory is what takes the
    # time.
    size = values[..., None, :] - values[..., :, None]  # -D
    # Too small to matter except where two eigenvalues are equal: there it decides the sign, one way
    # round.
    size.sub_(torch.full_like(off[(0,) * (off.ndim - 2)], 2 * tiny).triu_().sub_(tiny))
    # Entries whose squares vanish in this number format must not blow up: with this floor their
    # rows stay short, too.
    floor = 2 * off.shape[-1] ** 2 * tiny
    if pairwise:
        root = (4 * off).mul_(off).add_(2 * floor)
    else:
        rows = torch.linalg.vector_norm(off, dim=-1).square_().mul_(2).add_(floor)
        root = rows[..., :, None] + rows[..., None, :]
    root.addcmul_(size, size).sqrt_()
    return off.div_(size.add_(root.copysign_(size)))


# Rotations by name
ROTATIONS: Mapping[str, Rotation] = {
    "bounded": bounded,
    "pairwise": partial(bounded, pairwise=True),
    "normalized": normalized,
    "moore_penrose": moore_penrose,
}
