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
            check_finite(self.weights, "weights")
            leading = self.vectors.shape[: self.weights.ndim]
            if self.weights.ndim == 0 or self.weights.shape != leading:
                wanted = f"the leading shape (K, *batch) of vectors {tuple(self.vectors.shape)}"
                raise ValueError(f"weights must have {wanted}, got {tuple(self.weights.shape)}")
            check_device(self.weights, "weights", self.vectors, "vectors")
        if isinstance(self.shift, Tensor):
            check_finite(self.shift, "shift")
        else:
            check_number(self.shift, "shift", -math.inf)
        if self.semidefinite is None:
            plain = (
                self.weights is None and isinstance(self.shift, (int, float)) and self.shift >= 0
            )
            object.__setattr__(self, "semidefinite", plain)


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
    """Return ``w`` of each factor, shape ``(*batch,)``, with which ``W = w I`` for the curvature
    ``H = I``.

    For Kronecker factors this is the paper's adaptive damping, ``Lambda / (alpha k)`` with ``lambda
    = 1``.
    """
    inverses = [factor.eigs.reciprocal().mean(-1) for factor in factors_of(S)]
    one = 1 / scale_of(S)
    return tuple(
        math.prod(inverses[:at] + inverses[at + 1 :], start=one) for at in range(len(inverses))
    )


def _inverse_others(S: SPD, at: int) -> Tensor:
    """Return ``1 / (alpha k d)`` with ``d`` the eigenvalues of all other factors, flattened, shape
    ``(*batch, k)``.
    """
    product = scale_of(S)[..., None]
    for index, factor in enumerate(factors_of(S)):
        if index != at:
            product = (product[..., :, None] * factor.eigs[..., None, :]).flatten(-2)
    return saturate(1 / (product * product.shape[-1]))


def _project_outer_products(S: SPD, curvature: OuterProducts) -> tuple[Tensor, ...]:
    vectors, batch, sizes, dtype = curvature.vectors, S.batch_shape, S.sizes, S.spectrum.dtype
    S.check_event(vectors, "curvature.vectors")
    count, wanted = len(vectors), f"(K, *{tuple(batch)}"
    if vectors.ndim != 1 + len(batch) + len(sizes):
        raise ValueError(
            f"curvature.vectors must have shape {wanted}, *{sizes}), got {tuple(vectors.shape)}"
        )
    if curvature.weights is not None and curvature.weights.ndim > 1 + len(batch):
        raise ValueError(
            f"curvature.weights must have shape (K,) or {wanted}), got "
            f"{tuple(curvature.weights.shape)}"
        )
    rotated = S.rotate(vectors).to(dtype).expand(count, *batch, *sizes)
    weights = (
        torch.ones(count, device=rotated.device) if curvature.weights is None else curvature.weights
    )
    weights = (
        weights.to(dtype)
        .reshape(*weights.shape, *[1] * (1 + len(batch) - weights.ndim))
        .expand(count, *batch)
    )
    shift = torch.as_tensor(curvature.shift, dtype=dtype, device=rotated.device)
    if shift.shape not in ((), batch):
        raise ValueError(
            f"curvature.shift must have shape () or {tuple(batch)} to fit S, got "
            f"{tuple(shift.shape)}"
        )

    projected = []
    for at, factor in enumerate(factors_of(S)):
        size, others = sizes[at], math.prod(sizes) // sizes[at]
        # (*batch, n, K, rest): everything but the axis of this factor is summed over, weighted by
        # 1/d of the rest.
        columns = rotated.movedim(1 + len(batch) + at, 1 + len(batch)).reshape(
            count, *batch, size, others
        )
        columns = columns.movedim(0, -2)
        weighted = weights.movedim(0, -1)[..., :, None] * _inverse_others(S, at)[..., None, :]
        if isinstance(factor, Full):
            flat = columns.flatten(-2)
            w = (flat * weighted.flatten(-2)[..., None, :]) @ flat.transpose(-2, -1)
            w = w + shift[..., None, None] * torch.diag_embed(factor.eigs)
        else:
            w = (columns.square() * weighted[..., None, :, :]).sum((-2, -1)) + shift[
                ..., None
            ] * factor.eigs
        projected.append(_tie(factor, saturate(w)))
    return tuple(projected)


def _project_dense(S: SPD, curvature: Dense) -> tuple[Tensor, ...]:
    batch, sizes = S.batch_shape, S.sizes
    total = math.prod(sizes)
    want, got = (*batch, total, total), tuple(curvature.matrix.shape)
    if got != want:
        raise ValueError(f"curvature.matrix must have shape {want} to fit S, got {got}")
    check_device(curvature.matrix, "curvature.matrix", S.spectrum, "S")
    matrix = curvature.matrix.to(S.spectrum.dtype)
    # Rotate the columns, then the rows; either way the events are laid out in front of the batch.
    for _ in range(2):
        events = matrix.movedim(-1, 0).reshape(total, *batch, *sizes)
        matrix = S.rotate(events).reshape(total, *batch, total).movedim(0, -2)
    tensor = matrix.reshape(*batch, *sizes, *sizes)

    projected = []
    for at, factor in enumerate(factors_of(S)):
        size, others = sizes[at], total // sizes[at]
        rows_first = tensor.movedim((len(batch) + at, len(batch) + len(sizes) + at), (-2, -1))
        blocks = rows_first.reshape(*batch, others, others, size, size)
        own = blocks.diagonal(dim1=len(batch), dim2=len(batch) + 1).movedim(-1, len(batch))
        w = saturate((own * _inverse_others(S, at)[..., None, None]).sum(len(batch)))
        projected.append(_tie(factor, w if isinstance(factor, Full) else diagonal(w)))
    return tuple(projected)


def _tie(factor: Factor, w: Tensor) -> Tensor:
    return w.mean(-1, keepdim=True).expand_as(w) if isinstance(factor, Identity) else w
