"""Gaussians whose inverse covariance is held as spectral factors: what inference learns and
returns.

Parameters are one tensor of any shape, or a dictionary of tensors such as a network's; each tensor
is a *block* with a precision matrix ``S`` of its own, and blocks are independent of each other.

One step of a precision matrix is ``S <- (1 - beta gamma) S + beta H``, by ``eigenstep.update`` on
spectral factors. The exact one turns the basis until the average is diagonal, by products and
solves; the first-order one is the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.linalg import diagonal

from ..core.checks import check_beside, check_finite, check_positive, check_size, check_wide
from ..core.curvature import Curvature, project, project_identity
from ..core.matrices import KINDS, SPD, Full, Kronecker, factors_of
from ..core.step import Turning, symmetrize
from ..core.update import update

Parameters = Tensor | dict[str, Tensor]  # What a model depends on: one tensor, or named ones
Blocks = dict[str, Tensor]
ONLY = ""  # Name of the only block where parameters are one tensor


@dataclass(frozen=True)
class Gaussian:
    """Independent Gaussians over one or several tensors, ``N(mean, S^-1)`` each.

    Attributes:
        means: the paper's mu, one tensor for each block, of any shape.
        precisions: the paper's ``S``, one matrix for each block.
    """

    means: Blocks
    precisions: dict[str, SPD]

    @classmethod
    def start(cls, mean: object, precision: object = "full") -> Gaussian:
        """Return the Gaussian where learning starts; arguments as ``mean0`` and ``precision0`` of
        ``fit_gaussian``.

        A Kronecker product has one factor for each axis of its block.
        """
        means = as_blocks(mean, "mean")
        given = precision if isinstance(precision, Mapping) else dict.fromkeys(means, precision)
        if set(given) != set(means):
            raise ValueError(
                f"precision must be given for each of {list(means)}, got {list(given)}"
            )
        return cls(
            means,
            {n: _matrix(given[n], tensor, label("precision", n)) for n, tensor in means.items()},
        )

    @property
    def mean(self) -> Parameters:
        """The mean, as a tensor or a dictionary, like the start."""
        return unwrap(self.means)

    @property
    def precision(self) -> SPD | dict[str, SPD]:
        """The inverse covariance, or one for each block."""
        return self.precisions.get(ONLY, self.precisions)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(tensor.numel() for tensor in self.means.values())

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(iter(self.means.values())).device

    def covariance(self) -> Tensor | Blocks:
        """Return the covariance of the flattened parameters as an ordinary matrix, or one for each
        block.
        """
        return unwrap({name: S.dense(-1) for name, S in self.precisions.items()})

    def std(self) -> Parameters:
        """Return the standard deviation of every parameter, in the shape of the mean."""
        stds = {n: S.dense(-1).diagonal().sqrt() for n, S in self.precisions.items()}
        return unwrap({n: std.reshape(self.means[n].shape) for n, std in stds.items()})

    def logdet(self) -> float:
        """Return ``log det S`` of all blocks together."""
        return sum(S.logdet().item() for S in self.precisions.values())

    def deviations(self, count: int, generator: torch.Generator | None = None) -> Blocks:
        """Draw ``w - mean`` as events of the precision matrices, shape ``(count, *sizes)``."""
        return {
            name: S.sample((count,), generator=generator) for name, S in self.precisions.items()
        }

    def points(self, deviations: Blocks) -> Blocks:
        """Return ``w``, shape ``(K, *shape)``, given deviations of the mean."""
        return {
            name: mean + deviations[name].reshape(-1, *mean.shape)
            for name, mean in self.means.items()
        }

    def whitened_square(self, deviations: Blocks) -> Tensor:
        """Return ``(w - mean)^T S (w - mean)`` for each of the deviations, shape ``(K,)``."""
        parts = [
            deviations[n].mul(S.matmul(deviations[n])).flatten(1).sum(1)
            for n, S in self.precisions.items()
        ]
        return torch.stack(parts).sum(0)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Parameters:
        """Draw parameters, stacked along a new first axis."""
        check_size(count, "count")
        return unwrap(self.points(self.deviations(count, generator)))

    def log_prob(self, parameters: Parameters) -> Tensor:
        """Return the log density of parameters that are stacked along the first axis, as ``sample``
        does.
        """
        points = as_blocks(parameters, "parameters")
        if set(points) != set(self.means):
            raise ValueError(f"parameters must name {list(self.means)}, got {list(points)}")
        for name, mean in self.means.items():
            if points[name].ndim == 0 or points[name].shape[1:] != mean.shape:
                wanted, got = ", ".join(["K", *map(str, mean.shape)]), tuple(points[name].shape)
                raise ValueError(
                    f"{label('parameters', name)} must have shape ({wanted}), got {got}"
                )
            check_beside(points[name], "parameters", mean, "the mean")
        if len({len(tensor) for tensor in points.values()}) > 1:
            raise ValueError(
                "parameters must hold as many entries along the first axis of each tensor"
            )
        deviations = {n: event(S, points[n] - self.means[n]) for n, S in self.precisions.items()}
        square = self.whitened_square(deviations)
        return 0.5 * (self.logdet() - self.size * math.log(2 * math.pi) - square)


def event(S: SPD, x: Tensor) -> Tensor:
    """Reshape tensors along the first axis to what ``S`` acts on: vectors, or tensors for a
    Kronecker product.
    """
    return x.reshape(len(x), *S.sizes)


def as_blocks(parameters: object, name: str) -> Blocks:
    """Return parameters as a dictionary, after a check of all tensors."""
    if isinstance(parameters, Tensor):
        parameters = {ONLY: parameters}
    if not isinstance(parameters, Mapping) or not parameters:
        raise TypeError(
            f"{name} must be a tensor or a dictionary of tensors, got {type(parameters).__name__}"
        )
    for key, tensor in parameters.items():
        place = label(name, key)
        check_wide(tensor, place)
        check_finite(tensor, place)
        if tensor.numel() == 0:
            raise ValueError(
                f"{place} must have at least one entry, got shape {tuple(tensor.shape)}"
            )
    first = next(iter(parameters.values()))
    for key, tensor in parameters.items():
        check_beside(tensor, f"{name}[{key!r}]", first, "the first tensor")
    return {key: tensor.detach() for key, tensor in parameters.items()}


def unwrap(blocks: Blocks) -> Parameters:
    """Return the only tensor as such, or the dictionary."""
    return blocks.get(ONLY, blocks)


def label(name: str, block: str) -> str:
    """Name what belongs to a block in messages."""
    return name if block == ONLY else f"{name}[{block!r}]"


def _matrix(given: object, mean: Tensor, name: str) -> SPD:
    if isinstance(given, Tensor):
        raise TypeError(
            f"{name} must be a structure, a number or a matrix in spectral form, got a tensor: "
            "wrap it in "
            "Full.from_dense or Diagonal.from_dense"
        )
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        if not 0 < given < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {given}")
        size = mean.numel()
        return Full(torch.eye(size).to(mean), torch.full((size,), float(given)).to(mean))
    like: Any = {"dtype": mean.dtype, "device": mean.device}
    if isinstance(given, str) and given in ("full", "diagonal"):
        return KINDS[given].identity(mean.numel(), **like)
    if given == "kronecker":
        if mean.ndim == 0:
            raise ValueError(f'{name}="kronecker" needs a mean with at least one axis')
        return Kronecker.identity(tuple(mean.shape), **like)
    if not isinstance(given, SPD):
        kind, got = (
            (ValueError, repr(given))
            if isinstance(given, str)
            else (TypeError, type(given).__name__)
        )
        raise kind(
            f"{name} must be one of full, diagonal, kronecker, a number or a matrix, got {got}"
        )
    factors_of(given)
    want = tuple(mean.shape) if isinstance(given, Kronecker) else (mean.numel(),)
    if given.batch_shape or given.sizes != want:
        raise ValueError(
            f"{name} must act on shape {want} without a batch, got {tuple(given.spectrum.shape)}"
        )
    check_beside(given.spectrum, name, mean, "mean")
    check_finite(given.spectrum, f"the spectrum of {name}")
    check_positive(given.spectrum, name)
    return given


Structure = TypeVar("Structure", bound=SPD)
# Turns of an exact step: 64 for a matrix of condition 1e12 in an unknown basis
SWEEPS = (4, 16, 64)
# Where curvature is negative, an exact step leaves at least this fraction of S in every direction
KEEP = 0.25


class NotPositiveDefinite(ArithmeticError):
    """A step would leave the cone of positive-definite matrices."""


def average(
    S: Structure,
    curvature: Curvature,
    *,
    lr: float,
    decay: float = 1.0,
    damping: float = 0.0,
    exact: bool = True,
) -> Structure:
    """Return ``(1 - lr decay) S + lr (H + damping I)`` in spectral form, for a Kronecker product
    factor by factor.

    Either exactly, up to rounding, or ``NotPositiveDefinite`` is raised; or by the paper's update,
    which agrees to first order in ``lr`` and stays positive definite whatever comes.
    """
    if not exact:
        return update(S, curvature, lr=lr, decay=decay, damping=damping)
    start = _map_full(S, Full.with_residual)
    for sweeps in SWEEPS:
        new = update(
            start,
            curvature,
            lr=lr,
            decay=decay,
            damping=damping,
            positive=_move_exactly,
            turning=Turning(sweeps=sweeps, rayleigh=True),
        )
        if all(_is_diagonal(factor) for factor in factors_of(new) if isinstance(factor, Full)):
            break
    return _map_full(new, lambda factor: replace(factor, residual=None))


def _map_full(S: Structure, function: Callable[[Full], Full]) -> Structure:
    """Apply a function to all full factors."""
    if isinstance(S, Kronecker):
        factors = tuple(
            function(factor) if isinstance(factor, Full) else factor for factor in S.factors
        )
        return cast(Structure, replace(S, factors=factors))
    return cast(Structure, function(S)) if isinstance(S, Full) else S


def _is_diagonal(factor: Full) -> bool:
    """Tell whether the average, which the factor remembers, is diagonal up to rounding in the basis
    that was found.
    """
    memory = cast(Tensor, factor.residual)
    off = memory - torch.diag_embed(diagonal(memory))
    roots = factor.eigs.rsqrt()
    return bool((roots[:, None] * off * roots).abs().max() <= torch.finfo(roots.dtype).eps ** 0.75)


def _move_exactly(eigs: Tensor, target: Tensor) -> Tensor:
    """Return where the linear update puts the eigenvalues, or raise: nothing is cut off."""
    if not (target > 0).all() or not torch.isfinite(target).all():
        raise NotPositiveDefinite(
            f"the average of S and the curvature has an eigenvalue {target.min():.3g} beside "
            f"{target.max():.3g}: it is "
            f"not positive definite, or not to {eigs.dtype} rounding"
        )
    return target


def tangent_vector(
    S: SPD, curvature: Curvature, damping: float = 0.0
) -> tuple[Tensor, float, float]:
    """Return the natural gradient step ``H - S`` in orthonormal coordinates of the Fisher-Rao
    metric, as one vector.

    Its squared length is twice the decrease of the variational objective that a full step promises.
    The other numbers are the smallest and the largest eigenvalue of ``S^-1/2 H S^-1/2``. The
    damping is a part of ``H``.
    """
    total, parts, low, high = math.prod(S.sizes), [], math.inf, -math.inf
    for factor, w, identity in zip(
        factors_of(S), project(S, curvature), project_identity(S), strict=True
    ):
        roots = factor.eigs.rsqrt()
        if isinstance(factor, Full):
            relative = symmetrize(roots[:, None] * w * roots) + torch.diag(
                damping * identity * roots.square()
            )
            extremes = torch.linalg.eigvalsh(relative)
            turned = factor.basis @ relative @ factor.basis.mT
        else:
            extremes = w * roots.square() + damping * identity * roots.square()
            turned = torch.diag(extremes)
        low, high = min(low, extremes.min().item()), max(high, extremes.max().item())
        mean = diagonal(turned).mean()
        weight = (total / len(roots) / 2) ** 0.5
        parts.append(weight * (turned - mean * torch.eye(len(roots)).to(turned)).flatten())
    # All factors share one scale, of which each sees the same mean.
    return torch.cat([*parts, ((total / 2) ** 0.5 * (mean - 1))[None]]), low, high


def longest_step(low: float, high: float, exact: bool) -> float:
    """Return the largest ``beta`` that keeps ``S`` well inside the cone.

    An exact step is free where the curvature has no negative eigenvalue, and leaves ``KEEP`` of
    ``S`` elsewhere. A first-order step may change the logarithms of the eigenvalues by one.
    """
    if exact:
        return 1.0 if low > 0 else (1 - KEEP) / (1 - low)
    return 1 / max(abs(low - 1), abs(high - 1), 1.0)
