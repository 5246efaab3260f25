"""How a full matrix follows a tangent vector and stays ``B Diag(d) B^T``.

A tangent vector is given by local coordinates ``X``, a symmetric matrix: the step leads from ``S = F F^T`` with
``F = B D^1/2`` to ``F (I + X) F^T`` and terms of second order. Each retraction also returns an orthogonal ``U``: the
coordinates of a tangent vector that is carried along to the new point, without turning, are ``U^T X U`` there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..checks import check_function
from ..curvature import Dense
from ..linalg import largest, symmetrize, transpose
from ..maps import reorthonormalize
from ..rotation import Rotation, bounded, moore_penrose
from ..spd import Full
from ..update import update

Retraction = Callable[[Full, Tensor], tuple[Full, Tensor]]
"""``retraction(S, X) -> (new S, U)``."""


def geodesic(S: Full, tangent: Tensor) -> tuple[Full, Tensor]:
    """Follow the geodesic ``F e^X F^T`` of the affine-invariant metric exactly, by a singular value decomposition.

    The singular values of ``F e^(X/2)`` are the square roots of the new eigenvalues, which keeps twice as many digits
    of the small ones as an eigendecomposition of the matrix itself would.

    Args:
        S: the current matrix, shape ``(*batch, n, n)``.
        tangent: symmetric ``X``, same shape.
    """
    logs, vectors = torch.linalg.eigh(tangent)
    stretch = vectors * (logs / 2).exp()[..., None, :] @ transpose(vectors)
    frame = S.basis * S.eigs.sqrt()[..., None, :] @ stretch
    check_range(frame.abs().amax(-1))
    basis, roots, turn = torch.linalg.svd(frame)
    return Full(basis, check_range(roots.square())), transpose(turn)


JACOBI: Rotation = partial(bounded, pairwise=True)
"""The Jacobi angle of each pair: turns equal eigenvalues, too, and suits exact gradients best."""


def spectral(S: Full, tangent: Tensor, *, rotation: Rotation = JACOBI) -> tuple[Full, Tensor]:
    """Take the paper's step: Cayley map for the basis, exponential map for the eigenvalues, no decomposition.

    It agrees with :func:`geodesic` to first order.

    Args:
        S: the current matrix, shape ``(*batch, n, n)``.
        tangent: symmetric ``X``, same shape.
        rotation: how the basis turns; see :mod:`eigenstep.rotation`.
    """
    roots = S.eigs.sqrt()
    change = S.basis @ (roots[..., :, None] * tangent * roots[..., None, :]) @ transpose(S.basis)
    new = update(S, Dense(symmetrize(change)), lr=1.0, decay=0.0, rotation=rotation)
    assert isinstance(new, Full)
    between = transpose(S.basis) @ new.basis * (new.eigs.sqrt()[..., None, :] / roots[..., :, None])
    check_range(new.eigs)
    return new, _polar(between)


def paper(S: Full, tangent: Tensor) -> tuple[Full, Tensor]:
    """Take the paper's step to the letter, where nearly equal eigenvalues do not turn (Moore-Penrose inverse).

    Args:
        S: the current matrix, shape ``(*batch, n, n)``.
        tangent: symmetric ``X``, same shape.
    """
    return spectral(S, tangent, rotation=moore_penrose)


RETRACTIONS: dict[str, Retraction] = {"geodesic": geodesic, "spectral": spectral, "paper": paper}
"""Retractions by name."""


def find_retraction(retraction: str | Retraction) -> Retraction:
    """Return a retraction given by name or as a function."""
    if isinstance(retraction, str):
        if retraction not in RETRACTIONS:
            raise ValueError(f"retraction must be one of {', '.join(RETRACTIONS)} or a function, got {retraction!r}")
        return RETRACTIONS[retraction]
    check_function(retraction, "retraction")
    return retraction


def check_range(eigs: Tensor) -> Tensor:
    """Return eigenvalues that their number format can hold, and raise for others, instead of cutting them off."""
    if not ((eigs > torch.finfo(eigs.dtype).tiny) & (eigs < largest(eigs.dtype))).all():
        raise FloatingPointError(
            f"the step leads to eigenvalues that {eigs.dtype} cannot hold: take smaller steps or scale the problem"
        )
    return eigs


def _polar(matrix: Tensor) -> Tensor:
    """Return the orthogonal ``U`` with ``M = P U`` and ``P`` positive definite, by Newton-Schulz steps."""
    u = matrix / torch.linalg.matrix_norm(matrix, keepdim=True)
    tolerance = u.shape[-1] * torch.finfo(u.dtype).eps
    for _ in range(60):  # small singular values grow by half in each step: enough for ratios up to 1e10
        previous, u = u, reorthonormalize(u)
        if (u - previous).abs().amax() <= tolerance:
            return u
    raise FloatingPointError("the step is too long to carry tangent vectors along: take smaller steps")
