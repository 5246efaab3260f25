"""Points of a product of spaces, with one flat vector of coordinates for all tangent vectors.

A point consists of blocks: full factors, positive vectors (diagonal factors and the scale of a
Kronecker product) and Euclidean tensors. The coordinates of a tangent vector are orthonormal, so
that the dot product of two vectors is the affine-invariant metric, and they do not change when the
vector is carried along to another point (parallel transport). Methods for Euclidean space, such as
L-BFGS or momentum, therefore work on them as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.linalg import diagonal

from ..core.checks import check_finite, check_positive
from ..core.matrices import SPD, Diagonal, Full, Identity, Kronecker, factors_of
from ..core.step import largest, symmetrize
from .tangent_view import TangentView

Retraction = Callable[[Full, Tensor], tuple[Full, Tensor]]
"""``retraction(S, X) -> (new S, U)``, as ``eigenstep.manifold.retractions`` explains."""


def geodesic(S: Full, tangent: Tensor) -> tuple[Full, Tensor]:
    """Follow the geodesic ``F e^X F^T`` of the affine-invariant metric exactly.

    This takes a singular value decomposition.
    """
    return decompose(check_frame(S.basis * S.eigs.sqrt()[..., None, :] @ stretch(tangent)))


def stretch(tangent: Tensor) -> Tensor:
    """Return ``e^(X/2)``.

    It is a diagonal Pade approximant (exact to rounding) of ``X / 2^k``, squared ``k`` times.
    """
    size = torch.linalg.matrix_norm(tangent).amax().item()
    # So that ||X / 2^(k+1)|| < 1/2.
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


def check_range(eigs: Tensor) -> Tensor:
    """Return eigenvalues that their number format can hold, and raise for others."""
    if not ((eigs > torch.finfo(eigs.dtype).tiny) & (eigs < largest(eigs.dtype))).all():
        raise FloatingPointError(
            f"the step leads to eigenvalues that {eigs.dtype} cannot hold: take smaller steps or "
            "scale the problem"
        )
    return eigs


def check_frame(frame: Tensor) -> Tensor:
    """Return a frame ``F`` if the number format can hold the diagonal of ``F F^T``, else raise."""
    check_range(frame.square().sum(-1))
    return frame


def _follow(retraction: Retraction, S: Full, tangent: Tensor) -> tuple[Full, Tensor]:
    """Apply a retraction, and raise unless what it returns can be used."""
    pair: Any = retraction(S, tangent)
    fits = isinstance(pair, tuple) and len(pair) == 2
    fits = fits and isinstance(pair[0], Full) and isinstance(pair[1], Tensor)
    if not fits or not pair[0].basis.shape == pair[1].shape == S.basis.shape:
        raise TypeError(
            "retraction must return a Full and an orthogonal tensor, both of shape "
            f"{tuple(S.basis.shape)}"
        )
    return pair


class Block:
    """One of the spaces whose product a point lives in.

    By default it is flat, with the axes as eigenbasis.
    """

    def leaf(self) -> Tensor:
        """Return what to differentiate with respect to: zero coordinates, or a tensor itself."""
        raise NotImplementedError

    def tangent(self, leaf: Tensor) -> Tensor:
        """Return the coordinates of a leaf in the eigenbasis, or a Euclidean tensor itself."""
        return leaf

    def length(self, step: Tensor) -> Tensor:
        """Return the largest change of a logarithm of an eigenvalue that a step may make."""
        return step.new_zeros(())

    def move(self, step: Tensor) -> Block:
        """Return the block after a step of the shape of ``leaf``."""
        raise NotImplementedError

    def to_eigenbasis(self, vector: Tensor, back: bool = False) -> Tensor:
        """Return coordinates in the eigenbasis of the matrix, or turn such coordinates back."""
        return vector

    def metrics(self, exponents: Tensor) -> Tensor:
        """Return a diagonal metric in the eigenbasis for each of ``K`` pairs of exponents.

        Their shape is ``(K, *leaf)``.
        """
        return torch.ones_like(self.leaf()).expand(len(exponents), *self.leaf().shape)

    def steepest_growth(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return slope and direction of the rank-one change that lowers an objective fastest."""
        raise NotImplementedError


@dataclass(frozen=True)
class Matrix(Block):
    """A full factor ``S = F F^T``, by a frame ``F`` that is carried along as the matrix moves.

    Coordinates are with respect to the frame, ``F e^X F^T``: along a geodesic, ``F e^(X/2)``, they
    are those of parallel transport. The spectral form ``F = B D^1/2 O^T`` is computed, by a
    singular value decomposition, when somebody asks for it, which a function of dense matrices does
    not.

    Attributes:
        frame: ``F``, shape ``(*batch, n, n)``.
        weight: length of a unit step: the other factors of a Kronecker product repeat it.
        unit: whether the determinant stays one.
        retraction: how the factor follows a step.
        known: the spectral form, if it is known already.
    """

    frame: Tensor
    weight: float
    unit: bool
    retraction: Retraction
    known: tuple[Full, Tensor] | None = None

    @classmethod
    def of(
        cls, factor: Full, orientation: Tensor, weight: float, unit: bool, retraction: Retraction
    ) -> Matrix:
        """Return the block of a matrix in spectral form."""
        frame = factor.basis * factor.eigs.sqrt()[..., None, :] @ orientation.mT
        return cls(frame, weight, unit, retraction, (factor, orientation))

    @cached_property
    def spectral(self) -> tuple[Full, Tensor]:
        """The matrix ``B Diag(d) B^T``, and the orthogonal ``O`` from eigenbasis to frame."""
        return self.known or decompose(self.frame)

    @property
    def factor(self) -> Full:
        """The matrix."""
        return self.spectral[0]

    def leaf(self) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(self.frame)

    def in_frame(self, leaf: Tensor) -> Tensor:
        """Return the symmetric ``X`` of a leaf, without a trace if the determinant stays."""
        tangent = symmetrize(leaf) / self.weight
        if not self.unit:
            return tangent
        values = diagonal(tangent)
        return tangent - torch.diag_embed(values.mean(-1, keepdim=True).expand_as(values))

    def dense(self) -> Tensor:
        """Return ``F F^T``."""
        return self.frame @ self.frame.mT

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Turn the gradient with respect to the dense matrix into that with respect to a leaf."""
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
                log_mean = torch.linalg.slogdet(frame)[1] / frame.shape[-1]
                frame = frame * (-log_mean).exp()[..., None, None]
            return replace(self, frame=frame, known=None)
        factor, orientation = self.spectral
        new, transport = _follow(self.retraction, factor, self.tangent(step))
        new = new.with_unit_determinant() if self.unit else new
        return Matrix.of(new, orientation @ transport, self.weight, self.unit, self.retraction)

    def to_eigenbasis(self, vector: Tensor, back: bool = False) -> Tensor:
        """Return ``O^T X O``, or ``O X O^T``."""
        orientation = self.spectral[1]
        turn = orientation.mT if back else orientation
        return symmetrize(turn.mT @ vector @ turn)

    def metrics(self, exponents: Tensor) -> Tensor:
        """Return ``(d_i d_j)^a (d_i / d_j)^c``, made symmetric."""
        logs = _centered_logs(self.factor)[..., :, None]
        a, c = exponents.reshape(-1, 2, *[1] * logs.ndim).unbind(1)
        return symmetrize(((a + c) * logs + (a - c) * logs.mT).exp())

    def steepest_growth(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``mean(d) v^T G v`` and ``F^-1 v v^T F^-T``, normalized.

        Here ``v`` is the lowest eigenvector of ``G``.
        """
        eigs = self.factor.eigs
        roots = eigs.rsqrt()
        relative = self.to_eigenbasis(gradient * self.weight)
        values, vectors = torch.linalg.eigh(roots[..., :, None] * relative * roots[..., None, :])
        slopes = values[..., 0] * eigs.mean(-1)
        worst = slopes == slopes.min()
        w = torch.nn.functional.normalize(roots * vectors[..., 0] * worst[..., None], dim=-1)
        return slopes.min(), self.to_eigenbasis(w[..., :, None] * w[..., None, :], back=True)


@dataclass(frozen=True)
class Positive(Block):
    """Positive numbers: a diagonal factor, or the scale of a Kronecker product.

    Attributes:
        factor: the diagonal matrix of the numbers.
        weight: length of a unit step in their logarithms.
        unit: whether the product of the numbers stays one.
    """

    factor: Diagonal
    weight: float
    unit: bool

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
        eigs = self.factor.eigs
        slopes = gradient * self.weight / eigs * eigs.mean(-1, keepdim=True)
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
    """Return logarithms of eigenvalues minus their mean: metrics do not depend on units."""
    logs = factor.eigs.log()
    return logs - logs.mean(-1, keepdim=True)


@dataclass(frozen=True)
class Point:
    """A matrix and ordinary tensors beside it.

    Attributes:
        like: a matrix of the same structure.
        blocks: the scale of a Kronecker product, all factors that can move, the tensors.
    """

    like: SPD
    blocks: tuple[Block, ...]

    @classmethod
    def start(cls, S: SPD | Tensor, retraction: Retraction = geodesic, name: str = "S") -> Point:
        """Return a point with fresh frames and without Euclidean tensors."""
        S = _checked(S, name)
        total = math.prod(S.sizes)
        unit = isinstance(S, Kronecker)
        blocks: list[Block] = []
        if isinstance(S, Kronecker):
            blocks.append(Positive(Diagonal(S.scale[..., None]), total**0.5, unit=False))
        for factor, size in zip(factors_of(S), S.sizes, strict=True):
            weight = (total / size) ** 0.5
            if isinstance(factor, Full):
                identity = torch.diag_embed(torch.ones_like(factor.eigs))
                blocks.append(Matrix.of(factor, identity, weight, unit, retraction))
            elif not isinstance(factor, Identity):
                blocks.append(Positive(factor, weight, unit))
        return cls(S, tuple(blocks))

    def beside(self, tensors: Sequence[Tensor]) -> Point:
        """Return the point with Euclidean tensors."""
        return self.with_blocks([*self.blocks, *map(Euclidean, tensors)])

    def with_blocks(self, blocks: Sequence[Block]) -> Point:
        """Return a point of the same structure with other blocks."""
        return Point(self.like, tuple(blocks))

    @cached_property
    def S(self) -> SPD:
        """The matrix."""
        factors = [block.factor for block in self.blocks if isinstance(block, (Matrix, Positive))]
        if not isinstance(self.like, Kronecker):
            return factors[0]
        scale, *moved = factors
        for at, factor in enumerate(self.like.factors):
            if isinstance(factor, Identity):
                moved.insert(at, Identity(factor.eigs.to(scale.eigs)))
        return Kronecker(scale.eigs[..., 0], tuple(moved))

    @property
    def others(self) -> tuple[Tensor, ...]:
        """The Euclidean tensors."""
        return tuple(block.tensor for block in self.blocks if isinstance(block, Euclidean))

    @property
    def plain(self) -> bool:
        """Whether the matrix is one full factor, whose dense form can be a leaf."""
        return isinstance(self.blocks[0], Matrix)

    def leaves(self, dense: bool = False) -> list[Tensor]:
        """Return what to differentiate with respect to, for each block."""
        leaves = [block.leaf() for block in self.blocks]
        first = self.blocks[0]
        if dense and isinstance(first, Matrix):
            leaves[0] = first.dense()
        return [leaf.requires_grad_() for leaf in leaves]

    def flat(self, gradients: Sequence[Tensor], dense: bool = False) -> Tensor:
        """Return gradients with respect to ``leaves`` as a flat vector of coordinates."""
        first = self.blocks[0]
        if dense and isinstance(first, Matrix):
            gradients = [first.pull_back(gradients[0]), *gradients[1:]]
        return _join(gradients)

    def view(self, leaves: Sequence[Tensor]) -> TangentView:
        """Return the matrix as a function of the leaves."""
        tangents = [block.tangent(leaf) for block, leaf in zip(self.blocks, leaves, strict=True)]
        log_scale = tangents.pop(0)[..., 0] if isinstance(self.like, Kronecker) else None
        for at, factor in enumerate(factors_of(self.S)):
            if isinstance(factor, Identity):
                tangents.insert(at, torch.zeros_like(factor.eigs))
        return TangentView(self.S, tangents[: len(self.S.sizes)], log_scale)

    def length(self, step: Tensor) -> float:
        """Return the largest change of a logarithm of an eigenvalue that a step may make."""
        return max(block.length(part).item() for block, part in self._split(step))

    def move(self, step: Tensor) -> Point:
        """Return the point after a step, given as a flat vector."""
        return self.with_blocks([block.move(part) for block, part in self._split(step)])

    def to_eigenbasis(self, vector: Tensor, back: bool = False) -> Tensor:
        """Return flat coordinates in the eigenbases of the factors, or turn such ones back."""
        return _join([block.to_eigenbasis(part, back) for block, part in self._split(vector)])

    def metrics(self, exponents: Tensor) -> Tensor:
        """Return diagonal metrics in the eigenbases (``eigenstep.manifold.descent``)."""
        parts = [block.metrics(exponents).reshape(len(exponents), -1) for block in self.blocks]
        return torch.cat(parts, 1)

    def steepest_growth(self, gradient: Tensor) -> tuple[float, Tensor]:
        """Return the rank-one change of the matrix along which the objective falls most steeply."""
        if isinstance(self.like, Kronecker):
            return 0.0, torch.zeros_like(gradient)
        (block, part), *rest = self._split(gradient)
        slope, direction = block.steepest_growth(part)
        return slope.item(), _join([direction, *(torch.zeros_like(part) for _, part in rest)])

    @cached_property
    def _shapes(self) -> list[torch.Size]:
        return [block.leaf().shape for block in self.blocks]

    def _split(self, step: Tensor) -> list[tuple[Block, Tensor]]:
        parts = torch.split(step, [shape.numel() for shape in self._shapes])
        shaped = (part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True))
        return list(zip(self.blocks, shaped, strict=True))


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


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
