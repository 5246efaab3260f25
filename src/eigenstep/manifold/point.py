"""Points of a product of spaces, and one flat vector of coordinates for all tangent vectors at all
points.

A point consists of blocks: full factors, positive vectors (diagonal factors and the scale of a
Kronecker product) and Euclidean tensors. The coordinates of a tangent vector are orthonormal, so
that the dot product of two vectors is the affine-invariant metric, and they do not change when the
vector is carried along to another point (parallel transport). Methods for Euclidean space, such as
L-BFGS or momentum, therefore work on them as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.linalg import diagonal

from ..core.checks import check_finite, check_positive, choose
from ..core.matrices import SPD, Diagonal, Full, Identity, Kronecker, factors_of
from ..core.step import symmetrize
from .retractions import (
    RETRACTIONS,
    Retraction,
    check_frame,
    check_range,
    checked,
    decompose,
    geodesic,
    stretch,
)
from .tangent_view import TangentView


class Block:
    """One of the spaces whose product a point lives in; by default flat, with the axes as
    eigenbasis.
    """

    def leaf(self) -> Tensor:
        """Return what to differentiate with respect to: coordinates, all zero, or a Euclidean
        tensor itself.
        """
        raise NotImplementedError

    def tangent(self, leaf: Tensor) -> Tensor:
        """Return the coordinates of a leaf in the eigenbasis, or a Euclidean tensor itself."""
        return leaf

    def length(self, step: Tensor) -> Tensor:
        """Return by how much a step, of the shape of ``leaf``, changes logarithms of eigenvalues at
        most.
        """
        return step.new_zeros(())

    def move(self, step: Tensor) -> Block:
        """Return the block after a step."""
        raise NotImplementedError

    def to_eigenbasis(self, vector: Tensor, back: bool = False) -> Tensor:
        """Return coordinates in the eigenbasis of the matrix, or turn such coordinates back."""
        return vector

    def metrics(self, exponents: Tensor) -> Tensor:
        """Return diagonal metrics in the eigenbasis, one for each of the exponents, shape ``(K,
        *leaf)``.
        """
        return torch.ones_like(self.leaf()).expand(len(exponents), *self.leaf().shape)

    def steepest_growth(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return slope and direction of the change of rank one along which an objective falls most
        steeply.
        """
        return gradient.new_zeros(()), torch.zeros_like(gradient)


@dataclass(frozen=True)
class Matrix(Block):
    """A full factor ``S = F F^T``, by a frame ``F`` that is carried along as the matrix moves.

    Coordinates are with respect to the frame, ``F e^X F^T``: along a geodesic, ``F e^(X/2)``, they
    are those of parallel transport. The spectral form ``F = B D^1/2 O^T`` is computed, by a
    singular value decomposition, when somebody asks for it, which a function of dense matrices does
    not.
    """

    frame: Tensor  # F, shape (*batch, n, n)
    weight: float  # length of a unit step: the other factors of a Kronecker product repeat it
    unit: bool  # whether the determinant stays one
    retraction: Retraction  # how the factor follows a step
    known: tuple[Full, Tensor] | None = None  # the spectral form, if it is known already

    @classmethod
    def of(
        cls, factor: Full, orientation: Tensor, weight: float, unit: bool, retraction: Retraction
    ) -> Matrix:
        """Return the block of a matrix in spectral form."""
        frame = factor.basis * factor.eigs.sqrt()[..., None, :] @ orientation.mT
        return cls(frame, weight, unit, retraction, (factor, orientation))

    @cached_property
    def spectral(self) -> tuple[Full, Tensor]:
        """The matrix and the orientation ``O``, by one singular value decomposition unless they are
        known.
        """
        return self.known or decompose(self.frame)

    @property
    def factor(self) -> Full:
        """The matrix ``B Diag(d) B^T``."""
        return self.spectral[0]

    @property
    def orientation(self) -> Tensor:
        """The orthogonal ``O`` from the eigenbasis to the frame."""
        return self.spectral[1]

    def leaf(self) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(self.frame)

    def in_frame(self, leaf: Tensor) -> Tensor:
        """Return the symmetric ``X`` of a leaf with respect to the frame, without a trace if the
        determinant stays.
        """
        tangent = symmetrize(leaf) / self.weight
        if not self.unit:
            return tangent
        values = diagonal(tangent)
        return tangent - torch.diag_embed(values.mean(-1, keepdim=True).expand_as(values))

    def dense(self) -> Tensor:
        """Return ``F F^T``."""
        return self.frame @ self.frame.mT

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return the gradient with respect to a leaf, given that with respect to the
        dense matrix.
        """
        return self.in_frame(self.frame.mT @ gradient @ self.frame)

    def tangent(self, leaf: Tensor) -> Tensor:
        """Return ``X`` with respect to the eigenbasis."""
        return self.to_eigenbasis(self.in_frame(leaf))

    def length(self, step: Tensor) -> Tensor:
        """Return the spectral norm of ``X``."""
        return torch.linalg.eigvalsh(step).abs().amax() / self.weight

    def move(self, step: Tensor) -> Matrix:
        """Follow the step and carry the frame along."""
        if self.retraction is geodesic:
            frame = check_frame(self.frame @ stretch(self.in_frame(step)))
            if self.unit:
                frame = (
                    frame
                    * (-torch.linalg.slogdet(frame)[1] / frame.shape[-1]).exp()[..., None, None]
                )
            return replace(self, frame=frame, known=None)
        factor, transport = checked(self.retraction, self.factor, self.tangent(step))
        factor = factor.with_unit_determinant() if self.unit else factor
        return Matrix.of(
            factor, self.orientation @ transport, self.weight, self.unit, self.retraction
        )

    def to_eigenbasis(self, vector: Tensor, back: bool = False) -> Tensor:
        """Return ``O^T X O``, or ``O X O^T``."""
        turn = self.orientation.mT if back else self.orientation
        return symmetrize(turn.mT @ vector @ turn)

    def metrics(self, exponents: Tensor) -> Tensor:
        """Return ``(d_i d_j)^a (d_i / d_j)^c``, made symmetric."""
        logs = _centered_logs(self.factor)[..., :, None]
        a, c = exponents.reshape(-1, 2, *[1] * logs.ndim).unbind(1)
        return symmetrize(((a + c) * logs + (a - c) * logs.mT).exp())

    def steepest_growth(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``mean(d) v^T G v``, ``v`` the lowest eigenvector of ``G``, and ``F^-1 v v^T
        F^-T``, normalized.
        """
        roots = self.factor.eigs.rsqrt()
        dense = (
            roots[..., :, None] * self.to_eigenbasis(gradient * self.weight) * roots[..., None, :]
        )
        values, vectors = torch.linalg.eigh(dense)
        slopes = values[..., 0] * self.factor.eigs.mean(-1)
        worst = slopes == slopes.min()
        w = torch.nn.functional.normalize(roots * vectors[..., 0] * worst[..., None], dim=-1)
        return slopes.min(), self.to_eigenbasis(w[..., :, None] * w[..., None, :], back=True)


@dataclass(frozen=True)
class Positive(Block):
    """Positive numbers: a diagonal factor, or the scale of a Kronecker product."""

    factor: Diagonal  # the diagonal matrix of the numbers
    weight: float  # length of a unit step in their logarithms
    unit: bool  # whether the product of the numbers stays one

    def leaf(self) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(self.factor.eigs)

    def tangent(self, leaf: Tensor) -> Tensor:
        """Return the change of the logarithms."""
        logs = leaf / self.weight
        return logs - logs.mean(-1, keepdim=True) if self.unit else logs

    def length(self, step: Tensor) -> Tensor:
        """Return the largest change of a logarithm."""
        return step.abs().amax() / self.weight

    def move(self, step: Tensor) -> Positive:
        """Multiply by the exponentials of the step."""
        factor = Diagonal(check_range(self.factor.eigs * self.tangent(step).exp()))
        return replace(self, factor=factor.with_unit_determinant() if self.unit else factor)

    def metrics(self, exponents: Tensor) -> Tensor:
        """Return ``d_i^(2a)``, the diagonal of what a full factor would have."""
        logs = _centered_logs(self.factor)
        return (2 * exponents[:, 0].reshape(-1, *[1] * logs.ndim) * logs).exp()

    def steepest_growth(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lowest slope in units of the mean, and the axis that it belongs to."""
        slopes = gradient * self.weight / self.factor.eigs * self.factor.eigs.mean(-1, keepdim=True)
        return slopes.min(), (slopes == slopes.min()).to(slopes)


@dataclass(frozen=True)
class Euclidean(Block):
    """An ordinary tensor."""

    tensor: Tensor

    def leaf(self) -> Tensor:
        """Return the tensor."""
        return self.tensor.clone()

    def move(self, step: Tensor) -> Euclidean:
        """Add the step."""
        return Euclidean(self.tensor + step)


def _centered_logs(factor: Full | Diagonal) -> Tensor:
    """Return the logarithms of the eigenvalues, relative to their mean: metrics do not depend on
    units.
    """
    logs = factor.eigs.log()
    return logs - logs.mean(-1, keepdim=True)


@dataclass(frozen=True)
class Point:
    """A matrix and ordinary tensors beside it."""

    like: SPD  # a matrix of the same structure
    # The scale of a Kronecker product, all factors that can move, the tensors
    blocks: tuple[Block, ...]

    @classmethod
    def start(
        cls, S: SPD | Tensor, retraction: str | Retraction = "geodesic", name: str = "S"
    ) -> Point:
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
                identity = torch.eye(
                    size, dtype=factor.eigs.dtype, device=factor.eigs.device
                ).expand_as(factor.basis)
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
        moved = iter(
            [block.factor for block in self.blocks if isinstance(block, (Matrix, Positive))]
        )
        if not isinstance(self.like, Kronecker):
            return next(moved)
        scale = next(moved).eigs[..., 0]
        factors = (
            Identity(f.eigs.to(scale)) if isinstance(f, Identity) else next(moved)
            for f in self.like.factors
        )
        return Kronecker(scale, tuple(factors))

    @property
    def others(self) -> tuple[Tensor, ...]:
        """The Euclidean tensors."""
        return tuple(block.tensor for block in self.blocks if isinstance(block, Euclidean))

    @property
    def plain(self) -> bool:
        """Whether the matrix is one full factor, so that its dense form can be differentiated with
        respect to.
        """
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

    def to_eigenbasis(self, vector: Tensor, back: bool = False) -> Tensor:
        """Return flat coordinates in the eigenbases of the factors, or turn such
        coordinates back.
        """
        return torch.cat(
            [block.to_eigenbasis(part, back).flatten() for block, part in self._split(vector)]
        )

    def metrics(self, exponents: Tensor) -> Tensor:
        """Return diagonal metrics in the eigenbases of the factors
        (``eigenstep.manifold.directions``).
        """
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
        parts = torch.split(step, [shape.numel() for shape in self._shapes])
        return [
            (b, part.reshape(shape))
            for b, part, shape in zip(self.blocks, parts, self._shapes, strict=True)
        ]


def _checked(S: SPD | Tensor, name: str) -> SPD:
    """Return a matrix in spectral form and full precision, after a look at its eigenvalues."""
    if isinstance(S, Tensor):
        S = Full.from_dense(S.detach())
        worst = S.condition().max().item()
        if worst > 0.1 / torch.finfo(S.eigs.dtype).eps:
            raise ValueError(
                f"{name} must be positive definite beyond rounding, but its condition is "
                f"{worst:.3g}"
            )
    elif not isinstance(S, SPD):
        raise TypeError(
            f"{name} must be a tensor, Full, Diagonal or Kronecker, got {type(S).__name__}"
        )
    check_finite(S.spectrum, f"the spectrum of {name}")
    check_positive(S.spectrum, name)
    return S.to(S.spectrum.dtype)
