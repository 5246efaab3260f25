"""Curvature as data: what a matrix ``S`` learns from, and its projection onto the factors of ``S``.

A curvature matrix ``H`` of size ``N`` by ``N`` is either a weighted sum of outer products, which is
never formed, or a dense symmetric matrix. ``project`` turns both into one small matrix ``W`` per
factor, and that is all the update ever sees. ``eigenstep.core.sources`` makes curvature out of
losses, samples and gradients.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import diagonal

from .checks import check_device, check_finite, check_number, check_symmetric
from .matrices import SPD, Factor, Full, Identity, factors_of, scale_of
from .step import saturate


@dataclass(frozen=True)
class OuterProducts:
    """``H = sum_k w_k v_k v_k^T + shift S``, where ``S`` is the matrix that learns from it.

    Attributes:
        vectors: ``v_k``, shape ``(K, *batch, *sizes)``; for a layer with a Kronecker ``S``, matrix
            gradients.
        weights: ``w_k``, shape ``(K,)`` or ``(K, *batch)``; all one if left out. May be negative.
        shift: multiple of ``S`` itself, a number or shape ``(*batch,)``; REINFORCE estimates carry
            one.
        semidefinite: whether ``H`` has no negative eigenvalue. ``None`` means: if there is no
            weight nor shift.
    """

    vectors: Tensor
    weights: Tensor | None = None
    shift: Tensor | float = 0.0
    semidefinite: bool | None = None

    def __post_init__(self) -> None:
        """Check the tensors and fill in ``semidefinite``."""
        check_finite(self.vectors, "vectors")
        if self.vectors.ndim < 2:
            raise ValueError(
                f"vectors must have shape (K, *batch, *sizes), got {tuple(self.vectors.shape)}"
            )
        if self.weights is not None:
            _check_weights(self.weights, self.vectors)
        if isinstance(self.shift, Tensor):
            check_finite(self.shift, "shift")
        else:
            check_number(self.shift, "shift", -math.inf)
        if self.semidefinite is None:
            plain = self.weights is None and not isinstance(self.shift, Tensor)
            object.__setattr__(self, "semidefinite", plain and self.shift >= 0)


def _check_weights(weights: Tensor, vectors: Tensor) -> None:
    check_finite(weights, "weights")
    if weights.ndim == 0 or weights.shape != vectors.shape[: weights.ndim]:
        wanted = f"the leading shape (K, *batch) of vectors {tuple(vectors.shape)}"
        raise ValueError(f"weights must have {wanted}, got {tuple(weights.shape)}")
    check_device(weights, "weights", vectors, "vectors")


@dataclass(frozen=True)
class Dense:
    """A symmetric curvature matrix, indefinite allowed.

    Attributes:
        matrix: ``H``, shape ``(*batch, N, N)``.
        semidefinite: promise that ``H`` has no negative eigenvalue, which permits truncated maps.
    """

    matrix: Tensor
    semidefinite: bool = False

    def __post_init__(self) -> None:
        """Check that the matrix is symmetric and finite."""
        check_symmetric(self.matrix, "matrix")


Curvature = OuterProducts | Dense


def project(S: SPD, curvature: Curvature) -> tuple[Tensor, ...]:
    """Return ``W`` of each factor: the curvature in its eigenbasis, in units of its eigenvalues.

    For ``Full``, ``W = B^T H B``; for factor ``l`` of a Kronecker product, ``W = B^T Q B / (alpha
    k)`` with the paper's ``Q`` and ``k``, so that learning comes to rest where ``W = Diag(d)`` on
    average. Diagonal factors get the diagonal of ``W`` only, shape ``(*batch, n)``; identity
    factors its mean, repeated. Curvature so huge in these units that it overflows is cut at the
    largest number.
    """
    factors_of(S)
    if isinstance(curvature, OuterProducts):
        return _project_outer_products(S, curvature)
    if isinstance(curvature, Dense):
        return _project_dense(S, curvature)
    raise TypeError(f"curvature must be OuterProducts or Dense, got {type(curvature).__name__}")


def project_identity(S: SPD) -> tuple[Tensor, ...]:
    """Return ``w`` of each factor, shape ``(*batch,)``: of ``H = I``, ``W`` is ``w I``.

    For Kronecker factors this is the paper's adaptive damping, ``Lambda / (alpha k)`` with ``lambda
    = 1``.
    """
    means = [factor.eigs.reciprocal().mean(-1) for factor in factors_of(S)]
    one = 1 / scale_of(S)
    return tuple(math.prod(means[:at] + means[at + 1 :], start=one) for at in range(len(means)))


def _inverse_others(S: SPD, at: int) -> Tensor:
    """Return ``1 / (alpha k d)``, shape ``(*batch, k)``, for the eigenvalues of all others."""
    product = scale_of(S)[..., None]
    for index, factor in enumerate(factors_of(S)):
        if index != at:
            product = (product[..., :, None] * factor.eigs[..., None, :]).flatten(-2)
    return saturate(1 / (product * product.shape[-1]))


def _project_outer_products(S: SPD, curvature: OuterProducts) -> tuple[Tensor, ...]:
    _check_fit(S, curvature)
    batch = S.batch_shape
    dtype = S.spectrum.dtype
    count = len(curvature.vectors)
    total = math.prod(S.sizes)
    axis = 1 + len(batch)
    rotated = S.rotate(curvature.vectors).to(dtype).expand(count, *batch, *S.sizes)
    weights = curvature.weights
    if weights is None:
        weights = torch.ones(count, device=rotated.device)
    weights = weights.to(dtype).reshape(*weights.shape, *[1] * (axis - weights.ndim)).movedim(0, -1)
    shift = torch.as_tensor(curvature.shift, dtype=dtype, device=rotated.device)[..., None]
    projected = []
    for at, factor in enumerate(factors_of(S)):
        # Everything but the axis of this factor is summed over, weighted by 1/d of the rest.
        size = S.sizes[at]
        columns = rotated.movedim(axis + at, axis).reshape(count, *batch, size, total // size)
        columns = columns.movedim(0, -2)  # (*batch, n, K, rest)
        weighted = weights[..., :, None] * _inverse_others(S, at)[..., None, :]
        if isinstance(factor, Full):
            flat = columns.flatten(-2)
            w = (flat * weighted.flatten(-2)[..., None, :]) @ flat.mT
            w = w + torch.diag_embed(shift * factor.eigs)
        else:
            w = (columns.square() * weighted[..., None, :, :]).sum((-2, -1))
            w = w + shift * factor.eigs
        projected.append(_tie(factor, saturate(w)))
    return tuple(projected)


def _check_fit(S: SPD, curvature: OuterProducts) -> None:
    """Raise unless vectors, weights and shift are of the shape of ``S``."""
    vectors = curvature.vectors
    weights = curvature.weights
    shift = curvature.shift
    S.check_event(vectors, "curvature.vectors")
    batch = S.batch_shape
    wanted = f"(K, *{tuple(batch)}"
    if vectors.ndim != 1 + len(batch) + len(S.sizes):
        raise ValueError(
            f"curvature.vectors must have shape {wanted}, *{S.sizes}), got {tuple(vectors.shape)}"
        )
    if weights is not None and weights.ndim > 1 + len(batch):
        raise ValueError(
            f"curvature.weights must have shape (K,) or {wanted}), got {tuple(weights.shape)}"
        )
    if isinstance(shift, Tensor) and shift.shape not in ((), batch):
        raise ValueError(
            f"curvature.shift must have shape () or {tuple(batch)} to fit S, got "
            f"{tuple(shift.shape)}"
        )


def _project_dense(S: SPD, curvature: Dense) -> tuple[Tensor, ...]:
    batch = S.batch_shape
    sizes = S.sizes
    matrix = curvature.matrix
    lead = len(batch)
    total = math.prod(sizes)
    want = (*batch, total, total)
    if matrix.shape != want:
        raise ValueError(
            f"curvature.matrix must have shape {want} to fit S, got {tuple(matrix.shape)}"
        )
    check_device(matrix, "curvature.matrix", S.spectrum, "S")
    matrix = matrix.to(S.spectrum.dtype)
    # Rotate the columns, then the rows; either way the events are laid out in front of the batch.
    for _ in range(2):
        events = matrix.movedim(-1, 0).reshape(total, *batch, *sizes)
        matrix = S.rotate(events).reshape(total, *batch, total).movedim(0, -2)
    tensor = matrix.reshape(*batch, *sizes, *sizes)
    projected = []
    for at, factor in enumerate(factors_of(S)):
        size = sizes[at]
        others = total // size
        rows_first = tensor.movedim((lead + at, lead + len(sizes) + at), (-2, -1))
        blocks = rows_first.reshape(*batch, others, others, size, size)
        traced = blocks.diagonal(dim1=lead, dim2=lead + 1).movedim(-1, lead)
        w = saturate((traced * _inverse_others(S, at)[..., None, None]).sum(lead))
        projected.append(_tie(factor, w if isinstance(factor, Full) else diagonal(w)))
    return tuple(projected)


def _tie(factor: Factor, w: Tensor) -> Tensor:
    return w.mean(-1, keepdim=True).expand_as(w) if isinstance(factor, Identity) else w
