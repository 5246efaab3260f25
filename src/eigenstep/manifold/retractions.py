"""How a full matrix follows a tangent vector and stays ``B Diag(d) B^T``.

A tangent vector is given by tangent coordinates ``X``, a symmetric matrix: the step leads from ``S
= F F^T`` with ``F = B D^1/2`` to ``F (I + X) F^T`` and terms of second order. Each retraction also
returns an orthogonal ``U``: the coordinates of a tangent vector that is carried along to the new
point, without turning, are ``U^T X U`` there.
"""

import math

import torch
from torch import Tensor

from ..core.matrices import Full
from ..core.step import Turning, learn, reorthonormalize, symmetrize
from .point import Retraction, check_range, geodesic

JACOBI = Turning("pairwise", rayleigh=True)
"""Turns equal eigenvalues, too, and suits exact gradients best."""
LITERAL = Turning("moore_penrose")
"""The paper's turning."""
MOST_PARTS = 100
"""A long step is cut into at most this many parts."""


def spectral(S: Full, tangent: Tensor) -> tuple[Full, Tensor]:
    """Take the paper's step, made safe at equal eigenvalues and for long steps.

    It needs no decomposition. The basis turns by Jacobi angles, and the new eigenvalues are read
    off in the new basis: where all are equal, turning alone would change nothing. A step that may
    change logarithms by more than one is taken in several parts. It agrees with ``geodesic`` to
    first order.
    """
    square = tangent @ tangent
    # At least the spectral norm of X.
    longest = torch.linalg.matrix_norm(square @ square).amax().item() ** 0.25
    parts = min(max(1, math.ceil(longest)), MOST_PARTS) if math.isfinite(longest) else 1
    new = S
    part = tangent / parts
    for _ in range(parts):
        new, transport = _learn(new, part, JACOBI)
        part = transport.mT @ part @ transport
    return new, transport if parts == 1 else _transport_between(S, new)


def paper(S: Full, tangent: Tensor) -> tuple[Full, Tensor]:
    """Take the paper's step to the letter: Cayley map for the basis, exponential for eigenvalues.

    Nearly equal eigenvalues do not turn (Moore-Penrose inverse).
    """
    return _learn(S, tangent, LITERAL)


RETRACTIONS: dict[str, Retraction] = {"geodesic": geodesic, "spectral": spectral, "paper": paper}
"""Retractions by name."""


def _learn(S: Full, tangent: Tensor, turning: Turning) -> tuple[Full, Tensor]:
    """Let the one step of the core learn the change ``W = D^1/2 X D^1/2``, with gamma = 0."""
    roots = S.eigs.sqrt()
    change = symmetrize(roots[..., :, None] * tangent * roots[..., None, :])
    learned = learn(S.eigs, change, rate=1.0, decay=0.0, turning=turning)
    assert learned.turn is not None
    new = Full(reorthonormalize(S.basis @ learned.turn), check_range(learned.eigs))
    return new, _transport_between(S, new)


def _transport_between(old: Full, new: Full) -> Tensor:
    """Return the orthogonal ``U`` with ``F^-1 F_new = P U`` and ``P`` positive definite."""
    u = old.basis.mT @ new.basis * (new.eigs.sqrt()[..., None, :] / old.eigs.sqrt()[..., :, None])
    u = u / torch.linalg.matrix_norm(u, keepdim=True)
    tolerance = u.shape[-1] * torch.finfo(u.dtype).eps
    # Newton-Schulz steps: small singular values grow by half in each, so that this many are enough
    # for ratios up to 1e17.
    for _ in range(100):
        previous = u
        u = reorthonormalize(u)
        if (u - previous).abs().amax() <= tolerance:
            return u
    raise FloatingPointError(
        "the step is too long to carry tangent vectors along: take smaller steps"
    )
