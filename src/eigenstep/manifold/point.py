"""Points of a product of spaces, and one flat vector of coordinates for all tangent vectors at all points.

A point consists of blocks (``eigenstep.manifold.blocks``): full factors, positive vectors (diagonal factors and the
scale of a Kronecker product) and Euclidean tensors. The coordinates of a tangent vector are orthonormal, so that the
dot product of two vectors is the affine-invariant metric, and they do not change when the vector is carried along to
another point (parallel transport). Methods for Euclidean space, such as L-BFGS or momentum, therefore work on them as
they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..core.checks import check_finite, check_positive, choose
from ..core.curvature import factors_of
from ..core.kronecker import Kronecker
from ..core.matrices import SPD, Diagonal, Full, Identity
from .blocks import Block, Euclidean, Matrix, Positive
from .retractions import RETRACTIONS, Retraction
from .tangent_view import TangentView


@dataclass(frozen=True)
class Point:
    """A matrix and ordinary tensors beside it."""

    like: SPD  # a matrix of the same structure
    blocks: tuple[Block, ...]  # the scale of a Kronecker product, all factors that can move, the tensors

    @classmethod
    def start(cls, S: SPD | Tensor, retraction: str | Retraction = "geodesic", name: str = "S") -> Point:
        """Return a point with fresh frames and without Euclidean tensors."""
        S = _checked(S, name)
        follow = choose(retraction, RETRACTIONS, "retraction")
        total, product = math.prod(S.sizes), isinstance(S, Kronecker)
        blocks: list[Block] = []
        if isinstance(S, Kronecker):
            blocks.append(Positive(Diagonal(S.scale[..., None]), total**0.5, unit=False))
        for factor, size in zip(factors_of(S), S.sizes, strict=True):
            weight = (total / size) ** 0.5
            if isinstance(factor, Full):
                identity = torch.eye(size, dtype=factor.eigs.dtype, device=factor.eigs.device).expand_as(factor.basis)
                blocks.append(Matrix.of(factor, identity, weight, product, follow))
            elif not isinstance(factor, Identity):
                blocks.append(Positive(factor, weight, product))
        return cls(S, tuple(blocks))

    def with_blocks(self, blocks: Sequence[Block]) -> Point:
        """Return a point of the same structure with other blocks."""
        return Point(self.like, tuple(blocks))

    @cached_property
    def S(self) -> SPD:
        """The matrix."""
        moved = iter([block.factor for block in self.blocks if isinstance(block, (Matrix, Positive))])
        if not isinstance(self.like, Kronecker):
            return next(moved)
        scale = next(moved).eigs[..., 0]
        factors = (Identity(f.eigs.to(scale)) if isinstance(f, Identity) else next(moved) for f in self.like.factors)
        return Kronecker(scale, tuple(factors))

    @property
    def others(self) -> tuple[Tensor, ...]:
        """The Euclidean tensors."""
        return tuple(block.tensor for block in self.blocks if isinstance(block, Euclidean))

    @property
    def plain(self) -> bool:
        """Whether the matrix is one full factor, so that its dense form can be differentiated with respect to."""
        return isinstance(self.blocks[0], Matrix)

    def leaves(self, dense: bool = False) -> list[Tensor]:
        """Return what to differentiate with respect to, for each block."""
        leaves = [block.leaf() for block in self.blocks]
        if dense:
            assert isinstance(self.blocks[0], Matrix)
            leaves[0] = self.blocks[0].dense()
        return [leaf.requires_grad_() for leaf in leaves]

    def flat(self, gradients: Sequence[Tensor], dense: bool = False) -> Tensor:
        """Return gradients with respect to ``leaves`` as a flat vector of coordinates."""
        first, *rest = gradients
        if dense:
            assert isinstance(self.blocks[0], Matrix)
            first = self.blocks[0].pull_back(first)
        return torch.cat([gradient.flatten() for gradient in (first, *rest)])

    def view(self, leaves: Sequence[Tensor]) -> TangentView:
        """Return the matrix as a function of the leaves."""
        queue = [block.tangent(leaf) for block, leaf in zip(self.blocks, leaves, strict=True)]
        log_scale = queue.pop(0)[..., 0] if isinstance(self.like, Kronecker) else None
        tangents = [
            torch.zeros_like(factor.eigs) if isinstance(factor, Identity) else queue.pop(0)
            for factor in factors_of(self.S)
        ]
        return TangentView(self.S, tangents, log_scale)

    def length(self, step: Tensor) -> float:
        """Return by how much a step changes the logarithms of eigenvalues at most."""
        return max(block.length(part).item() for block, part in self._split(step))

    def move(self, step: Tensor) -> Point:
        """Return the point after a step, given as a flat vector."""
        return self.with_blocks([block.move(part) for block, part in self._split(step)])

    def to_eigenbasis(self, vector: Tensor) -> Tensor:
        """Return flat coordinates in the eigenbases of the factors."""
        return torch.cat([block.to_eigenbasis(part).flatten() for block, part in self._split(vector)])

    def from_eigenbasis(self, vector: Tensor) -> Tensor:
        """Return flat coordinates as they are used elsewhere: the inverse of ``to_eigenbasis``."""
        return torch.cat([block.from_eigenbasis(part).flatten() for block, part in self._split(vector)])

    def metrics(self, exponents: Tensor) -> Tensor:
        """Return diagonal metrics in the eigenbases of the factors (``eigenstep.manifold.directions``)."""
        return torch.cat([block.metrics(exponents).flatten(1) for block in self.blocks], 1)

    def steepest_growth(self, gradient: Tensor) -> tuple[float, Tensor]:
        """Return the rank-one change of the matrix along which the objective falls most steeply."""
        parts, slope = [torch.zeros_like(part) for _, part in self._split(gradient)], 0.0
        if not isinstance(self.like, Kronecker):
            block, first = self._split(gradient)[0]
            found, parts[0] = block.steepest_growth(first)
            slope = found.item()
        return slope, torch.cat([part.flatten() for part in parts])

    @cached_property
    def _shapes(self) -> list[torch.Size]:
        return [block.leaf().shape for block in self.blocks]

    def _split(self, step: Tensor) -> list[tuple[Block, Tensor]]:
        shapes = self._shapes
        parts = torch.split(step, [shape.numel() for shape in shapes])
        return [(block, part.reshape(shape)) for block, part, shape in zip(self.blocks, parts, shapes, strict=True)]


def _checked(S: SPD | Tensor, name: str) -> SPD:
    """Return a matrix in spectral form and full precision, after a look at its eigenvalues."""
    if isinstance(S, Tensor):
        S = Full.from_dense(S.detach())
        worst = S.condition().max().item()
        if worst > 0.1 / torch.finfo(S.eigs.dtype).eps:
            raise ValueError(
                f"{name} must be positive definite beyond rounding, but its condition number is {worst:.3g}"
            )
    elif not isinstance(S, SPD):
        raise TypeError(f"{name} must be a tensor, Full, Diagonal or Kronecker, got {type(S).__name__}")
    check_finite(S.spectrum, f"the spectrum of {name}")
    check_positive(S.spectrum, name)
    return S.to(S.spectrum.dtype)
