"""How a full matrix follows a tangent vector and stays ``B Diag(d) B^T``.

A tangent vector is given by tangent coordinates ``X``, a symmetric matrix: the step leads from ``S
= F F^T`` with ``F = B D^1/2`` to ``F (I + X) F^T`` and terms of second order. Each retraction also
returns an orthogonal ``U``: the coordinates of a tangent vector that is carried along to the new
point, without turning, are ``U^T X U`` there.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.matrices import Full
from ..core.step import (
    Turning,
    largest,
    learn,
    reorthonormalize,
    symmetrize,
)

Retraction = Callable[[Full, Tensor], tuple[Full, Tensor]]  # retraction(S, X) -> (new S, U)


def geodesic(S: Full, tangent: Tensor) -> tuple[Full, Tensor]:
    """Follow the geodesic ``F e^X F^T`` of the affine-invariant metric exactly, by a singular value
    decomposition.
    """
    return decompose(check_frame(S.basis * S.eigs.sqrt()[..., None, :] @ stretch(tangent)))


def stretch(tangent: Tensor) -> Tensor:
    """Return ``e^(X/2)``, by a diagonal Pade approximant (exact to rounding) of ``X / 2^k``,
    squared ``k`` times.
    """
    size = torch.linalg.matrix_norm(tangent).amax().item()
    # So that ||X / 2^(k+1)|| < 1/2
    squarings = max(0, math.frexp(size)[1]) if math.isfinite(size) else 0
    x = tangent / 2 ** (squarings + 1)
    square = x @ x
    fourth = square @ square
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    even = identity + square / 9 + fourth / 1008
    odd = x @ (identity / 2 + square / 72 + fourth / 30240)
    result = torch.linalg.solve(even - odd, even + odd)
    for _ in range(squarings):
        result = result @ result
    return symmetrize(result)


def decompose(frame: Tensor) -> tuple[Full, Tensor]:
    """Return ``B Diag(d) B^T = F F^T`` and the orthogonal ``O`` for which ``F = B D^1/2 O^T``.

    The singular values of ``F``, roots of the eigenvalues, keep twice as many digits of the small
    ones as an eigendecomposition would. Those that it cannot tell from zero count as the least that
    it can.
    """
    basis, roots, orientation = torch.linalg.svd(frame)
    roots = roots.clamp_min(torch.finfo(roots.dtype).eps * roots[..., :1])
    return Full(basis, check_range(roots.square())), orientation.mT


JACOBI = Turning("pairwise", rayleigh=True)
"""Turns equal eigenvalues, too, and suits exact gradients best."""
LITERAL = Turning("moore_penrose")
"""The paper's turning."""
LONGEST = 100  # Into how many parts a step is cut at most


def spectral(S: Full, tangent: Tensor) -> tuple[Full, Tensor]:
    """Take the paper's step without any decomposition, made safe at equal eigenvalues and for long
    steps.

    The basis turns by Jacobi angles, and the new eigenvalues are read off in the new basis: where
    all are equal, turning alone would change nothing. A step that may change logarithms by more
    than one is taken in several parts. It agrees with ``geodesic`` to first order.
    """
    square = tangent @ tangent
    # At least the spectral norm of X
    longest = torch.linalg.matrix_norm(square @ square).amax().item() ** 0.25
    parts = min(max(1, math.ceil(longest)), LONGEST) if math.isfinite(longest) else 1
    new, part = S, tangent / parts
    for _ in range(parts):
        new, transport = _learn(new, part, JACOBI)
        part = transport.mT @ part @ transport
    return new, transport if parts == 1 else _transport_between(S, new)


def paper(S: Full, tangent: Tensor) -> tuple[Full, Tensor]:
    """Take the paper's step to the letter: Cayley map for the basis, exponential map for the
    eigenvalues.

    Nearly equal eigenvalues do not turn (Moore-Penrose inverse).
    """
    return _learn(S, tangent, LITERAL)


def _learn(S: Full, tangent: Tensor, turning: Turning) -> tuple[Full, Tensor]:
    """Let the one step of the core learn the change ``W = D^1/2 X D^1/2``, with gamma = 0."""
    roots = S.eigs.sqrt()
    change = symmetrize(roots[..., :, None] * tangent * roots[..., None, :])
    learned = learn(S.eigs, change, rate=1.0, decay=0.0, turning=turning)
    assert learned.turn is not None
    new = Full(reorthonormalize(S.basis @ learned.turn), check_range(learned.eigs))
    return new, _transport_between(S, new)


# Retractions by name
RETRACTIONS: dict[str, Retraction] = {"geodesic": geodesic, "spectral": spectral, "paper": paper}


def checked(retraction: Retraction, S: Full, tangent: Tensor) -> tuple[Full, Tensor]:
    """Apply a retraction, which may be a function of the user's, and raise unless what it returns
    can be used.
    """
    found: Any = retraction(S, tangent)
    pair = (
        isinstance(found, tuple)
        and len(found) == 2
        and isinstance(found[0], Full)
        and isinstance(found[1], Tensor)
    )
    if not pair or not found[0].basis.shape == found[1].shape == S.basis.shape:
        raise TypeError(
            "retraction must return a Full and an orthogonal tensor, both of shape "
            f"{tuple(S.basis.shape)}"
        )
    return found


def check_range(eigs: Tensor) -> Tensor:
    """Return eigenvalues that their number format can hold, and raise for others, instead of
    cutting them off.
    """
    if not ((eigs > torch.finfo(eigs.dtype).tiny) & (eigs < largest(eigs.dtype))).all():
        raise FloatingPointError(
            f"the step leads to eigenvalues that {eigs.dtype} cannot hold: take smaller steps or "
            "scale the problem"
        )
    return eigs


def check_frame(frame: Tensor) -> Tensor:
    """Return a frame ``F`` if the number format can hold the diagonal of ``F F^T``, and raise
    otherwise.
    """
    check_range(frame.square().sum(-1))
    return frame


def _transport_between(old: Full, new: Full) -> Tensor:
    """Return the orthogonal ``U`` with ``F^-1 F_new = P U`` and ``P`` positive definite, by
    Newton-Schulz steps.
    """
    u = old.basis.mT @ new.basis * (new.eigs.sqrt()[..., None, :] / old.eigs.sqrt()[..., :, None])
    u = u / torch.linalg.matrix_norm(u, keepdim=True)
    tolerance = u.shape[-1] * torch.finfo(u.dtype).eps
    for _ in range(
        100
    ):  # small singular values grow by half in each step: enough for ratios up to 1e17
        previous, u = u, reorthonormalize(u)
        if (u - previous).abs().amax() <= tolerance:
            return u
    raise FloatingPointError(
        "the step is too long to carry tangent vectors along: take smaller steps"
    )
