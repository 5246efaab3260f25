"""Gaussians whose inverse covariance is held as spectral factors: what inference learns and returns.

Parameters are one tensor of any shape, or a dictionary of tensors such as a network's; each tensor is a *block* with a
precision matrix ``S`` of its own, and blocks are independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_beside, check_finite, check_positive, check_size, check_wide
from ..core.curvature import factors_of
from ..core.kronecker import Kronecker
from ..core.matrices import SPD, Diagonal, Full

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
        """Return the Gaussian where learning starts, after a look at all that was passed in.

        Args:
            mean: a tensor of any shape, or a dictionary of them.
            precision: "full", "diagonal" or "kronecker" for the identity of this structure, a positive number for a
                multiple of it, or a matrix: ``Full``, ``Diagonal`` or ``Kronecker``. A dictionary says it for each
                block. A Kronecker product has one factor for each axis of the block.
        """
        means = as_blocks(mean, "mean")
        given = precision if isinstance(precision, Mapping) else dict.fromkeys(means, precision)
        if set(given) != set(means):
            raise ValueError(f"precision must be given for each of {list(means)}, got {list(given)}")
        return cls(means, {name: _matrix(given[name], tensor, label(name)) for name, tensor in means.items()})

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
        """Return the covariance of the flattened parameters as an ordinary matrix, or one for each block."""
        return unwrap({name: S.dense(-1) for name, S in self.precisions.items()})

    def std(self) -> Parameters:
        """Return the standard deviation of every parameter, in the shape of the mean."""
        return unwrap(
            {n: S.dense(-1).diagonal().sqrt().reshape(self.means[n].shape) for n, S in self.precisions.items()}
        )

    def logdet(self) -> float:
        """Return ``log det S`` of all blocks together."""
        return sum(S.logdet().item() for S in self.precisions.values())

    def entropy(self) -> float:
        """Return the differential entropy in nats."""
        return 0.5 * (self.size * math.log(2 * math.pi * math.e) - self.logdet())

    def deviations(self, count: int, generator: torch.Generator | None = None) -> Blocks:
        """Draw ``w - mean`` as events of the precision matrices, shape ``(count, *sizes)``."""
        return {name: S.sample((count,), generator=generator) for name, S in self.precisions.items()}

    def points(self, deviations: Blocks) -> Blocks:
        """Return ``w``, shape ``(K, *shape)``, given deviations of the mean."""
        return {name: mean + deviations[name].reshape(-1, *mean.shape) for name, mean in self.means.items()}

    def whitened_square(self, deviations: Blocks) -> Tensor:
        """Return ``(w - mean)^T S (w - mean)`` for each of the deviations, shape ``(K,)``."""
        parts = [deviations[n].mul(S.matmul(deviations[n])).flatten(1).sum(1) for n, S in self.precisions.items()]
        return torch.stack(parts).sum(0)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Parameters:
        """Draw parameters, stacked along a new first axis."""
        check_size(count, "count")
        return unwrap(self.points(self.deviations(count, generator)))

    def log_prob(self, parameters: Parameters) -> Tensor:
        """Return the log density of parameters that are stacked along the first axis, as ``sample`` does."""
        points = as_blocks(parameters, "parameters")
        if set(points) != set(self.means):
            raise ValueError(f"parameters must name {list(self.means)}, got {list(points)}")
        for name, mean in self.means.items():
            if points[name].ndim == 0 or points[name].shape[1:] != mean.shape:
                place = "parameters" if name == ONLY else f"parameters[{name!r}]"
                wanted = ", ".join(["K", *map(str, mean.shape)])
                raise ValueError(f"{place} must have shape ({wanted}), got {tuple(points[name].shape)}")
            check_beside(points[name], "parameters", mean, "the mean")
        if len({len(tensor) for tensor in points.values()}) > 1:
            raise ValueError("parameters must hold as many entries along the first axis of each tensor")
        deviations = {n: event(S, points[n] - self.means[n]) for n, S in self.precisions.items()}
        square = self.whitened_square(deviations)
        return 0.5 * (self.logdet() - self.size * math.log(2 * math.pi) - square)


def event(S: SPD, x: Tensor) -> Tensor:
    """Reshape tensors along the first axis to what ``S`` acts on: vectors, or tensors for a Kronecker product."""
    return x.reshape(len(x), *S.sizes)


def as_blocks(parameters: object, name: str) -> Blocks:
    """Return parameters as a dictionary, after a check of all tensors."""
    if isinstance(parameters, Tensor):
        parameters = {ONLY: parameters}
    if not isinstance(parameters, Mapping) or not parameters:
        raise TypeError(f"{name} must be a tensor or a dictionary of tensors, got {type(parameters).__name__}")
    for key, tensor in parameters.items():
        place = f"{name}[{key!r}]" if key != ONLY else name
        check_wide(tensor, place)
        check_finite(tensor, place)
        if tensor.numel() == 0:
            raise ValueError(f"{place} must have at least one entry, got shape {tuple(tensor.shape)}")
    first = next(iter(parameters.values()))
    for key, tensor in parameters.items():
        check_beside(tensor, f"{name}[{key!r}]", first, "the first tensor")
    return {key: tensor.detach() for key, tensor in parameters.items()}


def unwrap(blocks: Blocks) -> Parameters:
    """Return the only tensor as such, or the dictionary."""
    return blocks.get(ONLY, blocks)


def label(block: str) -> str:
    """Name the precision of a block in messages."""
    return "precision" if block == ONLY else f"precision[{block!r}]"


def _matrix(given: object, mean: Tensor, name: str) -> SPD:
    if isinstance(given, Tensor):
        raise TypeError(
            f"{name} must be a structure, a number or a matrix in spectral form, got a tensor: wrap it in "
            "Full.from_dense, Diagonal.from_dense or Kronecker.from_dense"
        )
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        if not 0 < given < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {given}")
        size = mean.numel()
        return Full(torch.eye(size).to(mean), torch.full((size,), float(given)).to(mean))
    like: Any = {"dtype": mean.dtype, "device": mean.device}
    if given == "full":
        return Full.identity(mean.numel(), **like)
    if given == "diagonal":
        return Diagonal.identity(mean.numel(), **like)
    if given == "kronecker":
        if mean.ndim == 0:
            raise ValueError(f'{name}="kronecker" needs a mean with at least one axis')
        return Kronecker.identity(tuple(mean.shape), **like)
    if not isinstance(given, SPD):
        kind, got = (ValueError, repr(given)) if isinstance(given, str) else (TypeError, type(given).__name__)
        raise kind(f"{name} must be one of full, diagonal, kronecker, a number or a matrix, got {got}")
    factors_of(given)
    want = tuple(mean.shape) if isinstance(given, Kronecker) else (mean.numel(),)
    if given.batch_shape or given.sizes != want:
        raise ValueError(f"{name} must act on shape {want} without a batch, got {tuple(given.spectrum.shape)}")
    check_beside(given.spectrum, name, mean, "mean")
    check_finite(given.spectrum, f"the spectrum of {name}")
    check_positive(given.spectrum, name)
    return given
