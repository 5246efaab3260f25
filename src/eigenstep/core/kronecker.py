"""Kronecker products of spectral matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_beside, check_sizes, check_wide
from .matrices import KINDS, SPD, Device, Diagonal, Dtype, Full, eigs_to
from .numerics import contract


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
                found = (
                    f"batch shape {tuple(factor.batch_shape)}, but scale has shape "
                    f"{tuple(self.scale.shape)}"
                )
                raise ValueError(f"factors[{index}] has {found}")

    @classmethod
    def identity(
        cls,
        sizes: Sequence[int],
        batch: Sequence[int] = (),
        dtype: Dtype = None,
        device: Device = None,
        kinds: Sequence[str] | None = None,
    ) -> Kronecker:
        """Return the identity, its factors of these sizes and kinds: "full" (the default),
        "diagonal" or "identity".
        """
        kinds = ["full"] * len(sizes) if kinds is None else kinds
        check_sizes(sizes, kinds)
        factors = (
            KINDS[kind].identity(n, batch, dtype, device)
            for kind, n in zip(kinds, sizes, strict=True)
        )
        return cls(torch.ones(tuple(batch), dtype=dtype, device=device), tuple(factors))

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
        return self._turn(
            x, {at: f.basis for at, f in enumerate(self.factors) if isinstance(f, Full)}
        )

    def unrotate(self, x: Tensor) -> Tensor:
        """Return ``(B1 x ... x BL) x``."""
        return self._turn(
            x, {at: f.basis.mT for at, f in enumerate(self.factors) if isinstance(f, Full)}
        )

    def _turn(self, x: Tensor, bases: dict[int, Tensor]) -> Tensor:
        for at, basis in bases.items():
            x = contract(x, basis, at - len(self.factors), len(self.factors))
        return x

    def logdet(self) -> Tensor:
        """Return the logarithm of the determinant."""
        size = math.prod(self.sizes)
        return size * (self.scale.log() + sum(f.eigs.log().mean(-1) for f in self.factors))

    def normalized(self) -> Kronecker:
        """Return the same matrix with the determinants of the factors moved into the scale."""
        log_scale = self.scale.log() + sum(factor.eigs.log().mean(-1) for factor in self.factors)
        return Kronecker(
            log_scale.exp(), tuple(factor.with_unit_determinant() for factor in self.factors)
        )

    def with_residual(self) -> Kronecker:
        """Return the same matrix, with a residual in each full factor."""
        factors = (
            factor.with_residual() if isinstance(factor, Full) else factor
            for factor in self.factors
        )
        return Kronecker(self.scale, tuple(factors))

    def to(self, target: torch.dtype | torch.device | str) -> Kronecker:
        """Return a copy in another number format or on another device; half precision is for the
        bases only.
        """
        return Kronecker(
            eigs_to(self.scale, target), tuple(factor.to(target) for factor in self.factors)
        )
