"""Gaussians with an inverse covariance in spectral form: what inference learns and returns.

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
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.linalg import diagonal

from ..core.checks import check_beside, check_finite, check_positive, check_size, check_wide
from ..core.curvature import Curvature, project, project_identity
from ..core.matrices import SPD, Diagonal, Full, Kronecker, factors_of
from ..core.step import Turning, symmetrize
from ..core.update import update

Parameters = Tensor | dict[str, Tensor]
"""What a model depends on: one tensor, or named ones."""
Blocks = dict[str, Tensor]
ONLY = ""
"""Name of the only block where parameters are one tensor."""


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
        """Return the Gaussian where learning starts, as ``fit_gaussian`` explains its arguments.

        A Kronecker product has one factor for each axis of its block.
        """
        means = as_blocks(mean, "mean")
        if not isinstance(precision, Mapping):
            precision = dict.fromkeys(means, precision)
        if set(precision) != set(means):
            raise ValueError(
                f"precision must be given for each of {list(means)}, got {list(precision)}"
            )
        precisions = {
            name: _matrix(precision[name], tensor, label("precision", name))
            for name, tensor in means.items()
        }
        return cls(means, precisions)

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
        """Return the covariance of the flattened parameters, or one for each block, dense."""
        return unwrap({name: S.dense(-1) for name, S in self.precisions.items()})

    def std(self) -> Parameters:
        """Return the standard deviation of every parameter, in the shape of the mean."""
        variances = {name: S.dense(-1).diagonal() for name, S in self.precisions.items()}
        return unwrap(
            {name: v.sqrt().reshape(self.means[name].shape) for name, v in variances.items()}
        )

    def logdet(self) -> float:
        """Return ``log det S`` of all blocks together."""
        return sum(S.logdet().item() for S in self.precisions.values())

    def deviations(self, count: int, generator: torch.Generator | None = None) -> Blocks:
        """Draw ``w - mean`` as events of the precision matrices, shape ``(count, *sizes)``."""
        return {n: S.sample((count,), generator=generator) for n, S in self.precisions.items()}

    def points(self, deviations: Blocks) -> Blocks:
        """Return ``w``, shape ``(K, *shape)``, given deviations of the mean."""
        return {n: mean + deviations[n].reshape(-1, *mean.shape) for n, mean in self.means.items()}

    def whitened_square(self, deviations: Blocks) -> Tensor:
        """Return ``(w - mean)^T S (w - mean)`` for each of the deviations, shape ``(K,)``."""
        parts = []
        for name, S in self.precisions.items():
            x = deviations[name]
            parts.append(x.mul(S.matmul(x)).flatten(1).sum(1))
        return torch.stack(parts).sum(0)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Parameters:
        """Draw parameters, stacked along a new first axis."""
        check_size(count, "count")
        return unwrap(self.points(self.deviations(count, generator)))

    def log_prob(self, parameters: Parameters) -> Tensor:
        """Return the log density of parameters, stacked along the first axis as by ``sample``."""
        points = as_blocks(parameters, "parameters")
        if set(points) != set(self.means):
            raise ValueError(f"parameters must name {list(self.means)}, got {list(points)}")
        for name, mean in self.means.items():
            got = tuple(points[name].shape)
            if not got or got[1:] != mean.shape:
                want = ", ".join(["K", *map(str, mean.shape)])
                raise ValueError(f"{label('parameters', name)} must have shape ({want}), got {got}")
            check_beside(points[name], "parameters", mean, "the mean")
        if len({len(tensor) for tensor in points.values()}) > 1:
            raise ValueError(
                "parameters must hold as many entries along the first axis of each tensor"
            )
        deviations = {n: event(S, points[n] - self.means[n]) for n, S in self.precisions.items()}
        square = self.whitened_square(deviations)
        return 0.5 * (self.logdet() - self.size * math.log(2 * math.pi) - square)


def event(S: SPD, x: Tensor) -> Tensor:
    """Reshape tensors along the first axis to what ``S`` acts on."""
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


def _matrix(precision: object, mean: Tensor, name: str) -> SPD:
    """Return a precision matrix of one block from what a user says about it."""
    if isinstance(precision, SPD):
        return _fitting(precision, mean, name)
    if precision == "kronecker" and mean.ndim == 0:
        raise ValueError(f'{name}="kronecker" needs a mean with at least one axis')
    if isinstance(precision, str) and precision in STRUCTURES:
        return STRUCTURES[precision](mean)
    if isinstance(precision, (int, float)) and not isinstance(precision, bool):
        if not 0 < precision < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {precision}")
        identity = _identity(Full, mean)
        return replace(identity, eigs=precision * identity.eigs)
    raise _no_matrix(precision, name)


def _identity(kind: type[Full] | type[Diagonal], mean: Tensor) -> Full | Diagonal:
    return kind.identity(mean.numel(), dtype=mean.dtype, device=mean.device)


STRUCTURES: dict[str, Callable[[Tensor], SPD]] = {
    "full": partial(_identity, Full),
    "diagonal": partial(_identity, Diagonal),
    "kronecker": lambda mean: Kronecker.identity(
        tuple(mean.shape), dtype=mean.dtype, device=mean.device
    ),
}
"""Identities by structure, to fit a mean."""


def _no_matrix(precision: object, name: str) -> Exception:
    if isinstance(precision, Tensor):
        return TypeError(
            f"{name} must be a structure, a number or a matrix in spectral form, got a tensor: "
            "wrap it in Full.from_dense or Diagonal.from_dense"
        )
    wanted = f"{name} must be one of full, diagonal, kronecker, a number or a matrix"
    if isinstance(precision, str):
        return ValueError(f"{wanted}, got {precision!r}")
    return TypeError(f"{wanted}, got {type(precision).__name__}")


def _fitting(S: SPD, mean: Tensor, name: str) -> SPD:
    """Return a matrix of the user's, after a check that it fits the mean."""
    factors_of(S)
    want = tuple(mean.shape) if isinstance(S, Kronecker) else (mean.numel(),)
    if S.batch_shape or S.sizes != want:
        raise ValueError(
            f"{name} must act on shape {want} without a batch, got {tuple(S.spectrum.shape)}"
        )
    check_beside(S.spectrum, name, mean, "mean")
    check_finite(S.spectrum, f"the spectrum of {name}")
    check_positive(S.spectrum, name)
    return S


Structure = TypeVar("Structure", bound=SPD)
SWEEPS = (4, 16, 64)
"""Numbers of turns that an exact step tries; 64 suit a condition of 1e12 in an unknown basis."""
KEEP = 0.25
"""Where curvature is negative, an exact step leaves this part of S or more in every direction."""


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
    """Return ``(1 - lr decay) S + lr (H + damping I)`` in spectral form, factor by factor.

    Either exactly, up to rounding, or ``NotPositiveDefinite`` is raised; or by the paper's update,
    which agrees to first order in ``lr`` and stays positive definite whatever comes.
    """
    step = partial(update, curvature=curvature, lr=lr, decay=decay, damping=damping)
    if not exact:
        return step(S)
    start = _map_full(S, Full.with_residual)
    for sweeps in SWEEPS:
        turning = Turning(sweeps=sweeps, rayleigh=True)
        new = step(start, positive=_move_exactly, turning=turning)
        if all(_is_diagonal(factor) for factor in factors_of(new) if isinstance(factor, Full)):
            break
    return _map_full(new, lambda factor: replace(factor, residual=None))


def _map_full(S: Structure, function: Callable[[Full], Full]) -> Structure:
    """Apply a function to all full factors."""
    factors = tuple(function(f) if isinstance(f, Full) else f for f in factors_of(S))
    return cast(Structure, replace(S, factors=factors) if isinstance(S, Kronecker) else factors[0])


def _is_diagonal(factor: Full) -> bool:
    """Tell whether the average, kept as the residual, is diagonal up to rounding."""
    residual = cast(Tensor, factor.residual)
    off = residual - torch.diag_embed(diagonal(residual))
    roots = factor.eigs.rsqrt()
    return bool((roots[:, None] * off * roots).abs().max() <= torch.finfo(roots.dtype).eps ** 0.75)


def _move_exactly(eigs: Tensor, target: Tensor) -> Tensor:
    """Return where the linear update puts the eigenvalues, or raise: nothing is cut off."""
    if not (target > 0).all() or not torch.isfinite(target).all():
        raise NotPositiveDefinite(
            f"the average of S and the curvature has an eigenvalue {target.min():.3g} beside "
            f"{target.max():.3g}: it is not positive definite, or not to {eigs.dtype} rounding"
        )
    return target


def tangent_vector(
    S: SPD, curvature: Curvature, damping: float = 0.0
) -> tuple[Tensor, float, float]:
    """Return the natural gradient step ``H - S`` as one vector, and the range of ``H``.

    The coordinates are orthonormal in the Fisher-Rao metric: the squared length is twice the
    decrease of the variational objective that a full step promises. The range is the smallest and
    the largest eigenvalue of ``S^-1/2 H S^-1/2``. The damping is a part of ``H``.
    """
    total = math.prod(S.sizes)
    parts = []
    low = math.inf
    high = -math.inf
    for factor, w, identity in zip(
        factors_of(S), project(S, curvature), project_identity(S), strict=True
    ):
        roots = factor.eigs.rsqrt()
        damped = damping * identity * roots.square()
        if isinstance(factor, Full):
            relative = symmetrize(roots[:, None] * w * roots) + torch.diag(damped)
            extremes = torch.linalg.eigvalsh(relative)
            turned = factor.basis @ relative @ factor.basis.mT
        else:
            extremes = w * roots.square() + damped
            turned = torch.diag(extremes)
        low = min(low, extremes.min().item())
        high = max(high, extremes.max().item())
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
