"""Symmetric positive-definite matrices held as spectral factors, so that every root is elementwise.

``Full`` is ``S = B Diag(d) B^T``, ``Diagonal`` is ``S = Diag(d)``, and ``Kronecker`` is ``S = alpha
S1 x ... x SL`` with factors of determinant one. A matrix of size ``N`` acts on *events*: vectors of
shape ``(N,)`` for ``Full`` and ``Diagonal``, tensors of shape ``(n1, ..., nL)`` for ``Kronecker``,
flattened in row-major order. All tensors may carry leading batch dimensions; an event may carry
more of them in front.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.linalg import diagonal

from .checks import (
    check_beside,
    check_dense,
    check_device,
    check_eigs,
    check_positive,
    check_real,
    check_size,
    check_sizes,
    check_wide,
)
from .step import HALF, centered_exp, saturate

Self = TypeVar("Self", bound="SPD")
DiagonalLike = TypeVar("DiagonalLike", bound="Diagonal")
Dtype = torch.dtype | None
Device = torch.device | str | None


class SPD(ABC):
    """What all spectral matrices can do, given how they rotate and what their eigenvalues are."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """Shape of an event; its product is the size of the matrix."""

    @property
    @abstractmethod
    def batch_shape(self) -> torch.Size:
        """Leading dimensions: this many matrices are held at once."""

    @property
    @abstractmethod
    def spectrum(self) -> Tensor:
        """All eigenvalues, shape ``(*batch, *sizes)``."""

    @abstractmethod
    def rotate(self, x: Tensor) -> Tensor:
        """Return ``B^T x``, the event in the eigenbasis."""

    @abstractmethod
    def unrotate(self, x: Tensor) -> Tensor:
        """Return ``B x``, the inverse of ``rotate``."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """Return the logarithm of the determinant, shape ``(*batch,)``."""

    @abstractmethod
    def to(self: Self, target: torch.dtype | torch.device | str) -> Self:
        """Return a copy in another format or on another device; half is for bases only."""

    def matmul(self, x: Tensor, power: float = 1.0) -> Tensor:
        """Return ``S^power x`` of events, shape ``(*lead, *batch, *sizes)``."""
        self.check_event(x)
        return self.unrotate(self.rotate(x) * self.spectrum.pow(power)).to(x.dtype)

    def solve(self, x: Tensor) -> Tensor:
        """Return ``S^-1 x``."""
        return self.matmul(x, power=-1.0)

    def trace(self, power: float = 1.0) -> Tensor:
        """Return the trace of ``S^power``, shape ``(*batch,)``."""
        return self.spectrum.pow(power).flatten(len(self.batch_shape)).sum(-1)

    def condition(self) -> Tensor:
        """Return the ratio of the largest to the smallest eigenvalue, shape ``(*batch,)``."""
        values = self.spectrum.flatten(len(self.batch_shape))
        return values.amax(-1) / values.amin(-1)

    def dense(self, power: float = 1.0) -> Tensor:
        """Return ``S^power`` as an ordinary matrix, shape ``(*batch, N, N)``."""
        size = math.prod(self.sizes)
        batch = self.batch_shape
        like = self.spectrum
        identity = torch.eye(size, dtype=like.dtype, device=like.device)
        events = identity.reshape(size, *[1] * len(batch), *self.sizes)
        events = events.expand(size, *batch, *self.sizes)
        return self.matmul(events, power).reshape(size, *batch, size).movedim(0, -1)

    def sample(
        self,
        lead: Sequence[int] = (),
        *,
        power: float = -1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw zero-mean Gaussian events with covariance ``S^power``.

        Their shape is ``(*lead, *batch, *sizes)``. By default ``S`` is the inverse covariance, as
        in the paper; 1 makes it the covariance.
        """
        like = self.spectrum
        shape = (*lead, *like.shape)
        noise = torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
        return self.color(noise, power / 2)

    def color(self, noise: Tensor, power: float) -> Tensor:
        """Return standard normal events times a root of ``S^(2 power)``."""
        return self.unrotate(noise * self.spectrum.pow(power))

    def check_event(self, x: Tensor, name: str = "x") -> None:
        """Raise unless ``x`` is something this matrix can act on."""
        check_real(x, name)
        batch = len(self.batch_shape)
        want = (*self.batch_shape, *self.sizes)
        got = tuple(x.shape[-len(want) :])
        broadcasts = all(g in (w, 1) for g, w in zip(got[:batch], want[:batch], strict=False))
        if len(got) < len(want) or got[batch:] != self.sizes or not broadcasts:
            raise ValueError(
                f"{name} must have shape (..., {str(want)[1:]} to fit the matrix, got "
                f"{tuple(x.shape)}"
            )
        check_device(x, name, self.spectrum, "the matrix")


class Factor(SPD):
    """What ``Full`` and ``Diagonal`` share: eigenvalues ``eigs``, shape ``(*batch, n)``."""

    eigs: Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape ``(n,)`` of a vector that the matrix acts on."""
        return (self.eigs.shape[-1],)

    @property
    def batch_shape(self) -> torch.Size:
        """Leading dimensions."""
        return self.eigs.shape[:-1]

    @property
    def spectrum(self) -> Tensor:
        """Eigenvalues ``d``, shape ``(*batch, n)``."""
        return self.eigs

    def logdet(self) -> Tensor:
        """Return the logarithm of the determinant."""
        return self.eigs.log().sum(-1)


@dataclass(frozen=True)
class Full(Factor):
    """``S = B Diag(d) B^T``.

    Attributes:
        basis: orthogonal ``B`` with eigenvectors as columns, shape ``(*batch, n, n)``.
        eigs: eigenvalues ``d > 0``, shape ``(*batch, n)``.
        residual: running average of the curvature in the eigenbasis, shape ``(*batch, n, n)``, if
            learning is to keep one: its off-diagonal part is what the basis has still to turn to.
            Not a part of ``S`` itself.
    """

    basis: Tensor
    eigs: Tensor
    residual: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that basis, eigenvalues and residual fit together."""
        check_eigs(self.eigs)
        self._check_square(self.basis, "basis", also=HALF)
        if self.residual is not None:
            self._check_square(self.residual, "residual")

    def _check_square(self, matrix: Tensor, name: str, also: Sequence[torch.dtype] = ()) -> None:
        check_beside(matrix, name, self.eigs, "eigs", also)
        want = (*self.eigs.shape, self.eigs.shape[-1])
        if matrix.shape != want:
            raise ValueError(
                f"{name} must have shape {want} to fit eigs, got {tuple(matrix.shape)}"
            )

    @classmethod
    def identity(
        cls, size: int, batch: Sequence[int] = (), dtype: Dtype = None, device: Device = None
    ) -> Full:
        """Return the identity matrix, where learning usually starts."""
        start = Diagonal.identity(size, batch, dtype, device)
        return cls(torch.diag_embed(start.eigs), start.eigs)

    @classmethod
    def from_dense(cls, matrix: Tensor) -> Full:
        """Factorize an ordinary symmetric positive-definite matrix of shape ``(*batch, n, n)``."""
        check_dense(matrix)
        eigs, basis = torch.linalg.eigh(matrix)
        check_positive(eigs, "matrix")
        return cls(basis, eigs)

    def with_residual(self) -> Full:
        """Return the same matrix, with a residual for ``eigenstep.update`` to keep from now on."""
        return replace(self, residual=torch.diag_embed(self.eigs))

    def with_unit_determinant(self) -> Full:
        """Return the matrix, and its residual, divided by the geometric mean of the eigenvalues."""
        logs = self.eigs.log()
        residual = self.residual
        if residual is not None:
            residual = saturate(residual * (-logs.mean(-1)).exp()[..., None, None])
        return Full(self.basis, centered_exp(logs), residual)

    def rotate(self, x: Tensor) -> Tensor:
        """Return ``B^T x``."""
        return contract(x, self.basis, axis=-1, event_ndim=1)

    def unrotate(self, x: Tensor) -> Tensor:
        """Return ``B x``."""
        return contract(x, self.basis.mT, axis=-1, event_ndim=1)

    def to(self, target: torch.dtype | torch.device | str) -> Full:
        """Return a copy in another format or on another device; only the basis goes half precision.

        Eigenvalues are then float32.
        """
        residual = None if self.residual is None else eigs_to(self.residual, target)
        return Full(self.basis.to(target), eigs_to(self.eigs, target), residual)


@dataclass(frozen=True)
class Diagonal(Factor):
    """``S = Diag(d)``, where ``d > 0`` is the attribute ``eigs``, shape ``(*batch, n)``."""

    eigs: Tensor

    def __post_init__(self) -> None:
        """Check the diagonal."""
        check_eigs(self.eigs)

    @classmethod
    def identity(
        cls, size: int, batch: Sequence[int] = (), dtype: Dtype = None, device: Device = None
    ) -> Diagonal:
        """Return the identity matrix."""
        check_size(size, "size")
        return cls(torch.ones(*batch, size, dtype=dtype, device=device))

    @classmethod
    def from_dense(cls, matrix: Tensor) -> Diagonal:
        """Return the diagonal matrix nearest to a symmetric positive-definite one: its diagonal."""
        check_dense(matrix)
        check_positive(diagonal(matrix), "matrix")
        return cls(diagonal(matrix).clone())

    def with_unit_determinant(self: DiagonalLike) -> DiagonalLike:
        """Return the matrix divided by the geometric mean of its eigenvalues."""
        return replace(self, eigs=centered_exp(self.eigs.log()))

    def rotate(self, x: Tensor) -> Tensor:
        """Return ``x``: the axes are the eigenvectors."""
        return x

    def unrotate(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def to(self: DiagonalLike, target: torch.dtype | torch.device | str) -> DiagonalLike:
        """Return a copy in another number format or on another device."""
        return replace(self, eigs=eigs_to(self.eigs, target))


class Identity(Diagonal):
    """A factor of a ``Kronecker`` that stays the identity: its axis learns the scale only."""


KINDS: dict[str, type[Full] | type[Diagonal]] = {
    "full": Full,
    "diagonal": Diagonal,
    "identity": Identity,
}


@dataclass(frozen=True)
class Kronecker(SPD):
    """``S = alpha S1 x ... x SL`` with ``det Sl = 1``, which makes the factorization unique.

    Attributes:
        scale: ``alpha > 0``, shape ``(*batch,)``.
        factors: ``Full``, ``Diagonal`` or ``Identity`` matrices with the same batch dimensions.
    """

    scale: Tensor
    factors: tuple[Full | Diagonal, ...]

    def __post_init__(self) -> None:
        """Check that scale and factors fit together."""
        check_wide(self.scale, "scale")
        if not self.factors:
            raise ValueError("factors must hold at least one factor, got none")
        for index, factor in enumerate(self.factors):
            if not isinstance(factor, (Full, Diagonal)):
                raise TypeError(
                    f"factors[{index}] must be Full, Diagonal or Identity, got "
                    f"{type(factor).__name__}"
                )
            check_beside(factor.eigs, f"factors[{index}]", self.scale, "scale")
            if factor.batch_shape != self.scale.shape:
                raise ValueError(
                    f"factors[{index}] has batch shape {tuple(factor.batch_shape)}, but scale has "
                    f"shape {tuple(self.scale.shape)}"
                )

    @classmethod
    def identity(
        cls,
        sizes: Sequence[int],
        batch: Sequence[int] = (),
        dtype: Dtype = None,
        device: Device = None,
        kinds: Sequence[str] | None = None,
    ) -> Kronecker:
        """Return the identity, its factors of these sizes and kinds.

        Kinds are "full" (the default), "diagonal" or "identity".
        """
        kinds = ["full"] * len(sizes) if kinds is None else kinds
        check_sizes(sizes, kinds)
        pairs = zip(kinds, sizes, strict=True)
        factors = tuple(KINDS[kind].identity(n, batch, dtype, device) for kind, n in pairs)
        return cls(torch.ones(tuple(batch), dtype=dtype, device=device), factors)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape ``(n1, ..., nL)`` of a tensor that the matrix acts on."""
        return tuple(factor.eigs.shape[-1] for factor in self.factors)

    @property
    def batch_shape(self) -> torch.Size:
        """Leading dimensions."""
        return self.scale.shape

    @property
    def spectrum(self) -> Tensor:
        """Eigenvalues ``alpha d1 x ... x dL``, shape ``(*batch, n1, ..., nL)``."""
        spectrum = self.scale
        for factor in self.factors:
            spread = (*self.batch_shape, *[1] * (spectrum.ndim - self.scale.ndim), -1)
            spectrum = spectrum[..., None] * factor.eigs.reshape(spread)
        return spectrum

    def rotate(self, x: Tensor) -> Tensor:
        """Return ``(B1 x ... x BL)^T x``."""
        return self._turn(x, back=False)

    def unrotate(self, x: Tensor) -> Tensor:
        """Return ``(B1 x ... x BL) x``."""
        return self._turn(x, back=True)

    def _turn(self, x: Tensor, back: bool) -> Tensor:
        count = len(self.factors)
        for at, factor in enumerate(self.factors):
            if isinstance(factor, Full):
                x = contract(x, factor.basis.mT if back else factor.basis, at - count, count)
        return x

    def logdet(self) -> Tensor:
        """Return the logarithm of the determinant."""
        size = math.prod(self.sizes)
        return size * (self.scale.log() + sum(f.eigs.log().mean(-1) for f in self.factors))

    def normalized(self) -> Kronecker:
        """Return the same matrix with the determinants of the factors moved into the scale."""
        log_scale = self.scale.log() + sum(factor.eigs.log().mean(-1) for factor in self.factors)
        factors = tuple(factor.with_unit_determinant() for factor in self.factors)
        return Kronecker(log_scale.exp(), factors)

    def with_residual(self) -> Kronecker:
        """Return the same matrix, with a residual in each full factor."""
        factors = (f.with_residual() if isinstance(f, Full) else f for f in self.factors)
        return replace(self, factors=tuple(factors))

    def to(self, target: torch.dtype | torch.device | str) -> Kronecker:
        """Return a copy in another format or on another device; only bases go half precision."""
        factors = tuple(factor.to(target) for factor in self.factors)
        return Kronecker(eigs_to(self.scale, target), factors)


def eigs_to(eigs: Tensor, target: torch.dtype | torch.device | str) -> Tensor:
    """Return eigenvalues in another format or on another device; float32 for half precision."""
    return eigs.to(torch.float32 if target in HALF else target)


def factors_of(S: SPD) -> tuple[Full | Diagonal, ...]:
    """Return the factors of a Kronecker product; another matrix is its own only factor."""
    if isinstance(S, Kronecker):
        return S.factors
    if isinstance(S, (Full, Diagonal)):
        return (S,)
    raise TypeError(f"S must be Full, Diagonal or Kronecker, got {type(S).__name__}")


def scale_of(S: SPD) -> Tensor:
    """Return ``alpha`` of a Kronecker product, or ones, shape ``(*batch,)``."""
    return S.scale if isinstance(S, Kronecker) else torch.ones_like(S.spectrum[..., 0])


def contract(x: Tensor, matrix: Tensor, axis: int, event_ndim: int) -> Tensor:
    """Contract axis ``axis`` (negative) of ``x`` with the first axis of ``matrix``."""
    spread = matrix.reshape(*matrix.shape[:-2], *[1] * (event_ndim - 1), *matrix.shape[-2:])
    dtype = torch.promote_types(x.dtype, matrix.dtype)
    compute = torch.float32 if dtype in HALF and x.device.type == "cpu" else dtype
    moved = x.movedim(axis, -1).to(compute)
    return torch.einsum("...i,...ij->...j", moved, spread.to(compute)).to(dtype).movedim(-1, axis)
