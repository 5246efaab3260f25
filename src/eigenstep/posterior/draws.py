"""Draws of weights from a posterior: random numbers that can be had again, on one rank or many.

The posterior of a batch of weights is ``N(mu, (ess S)^-1)``. A draw deviates from the mean by
``(ess S)^(-1/2) z`` with standard normal ``z``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from ..core.step import rotate
from ..optim.batches import Assembly, Batch, MatrixBatch, VectorBatch
from ..optim.matrix import MatrixState, column, products_of_eigs
from ..optim.options import Options, check_positive

LARGEST_SEED = 2**62


@dataclass(frozen=True)
class PosteriorOptions(Options):
    """Options of a parameter group, with the posterior's own."""

    ess: float
    batch_size: float
    prior_precision: float
    seed: int

    def __post_init__(self) -> None:
        """Raise unless all options are possible."""
        super().__post_init__()
        for name in ("ess", "prior_precision", "batch_size"):
            check_positive(getattr(self, name), name)
        seed = self.seed
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < LARGEST_SEED:
            raise ValueError(f"seed must be a whole number from 0, got {seed!r}")


def roots(state: MatrixState) -> Tensor:
    """Return the square roots of the eigenvalues of ``S``, shape ``(b, k, n, m)``."""
    products = state.second_moment
    if products is None:
        products = products_of_eigs(state.sides)
    return products.to(state.scale.dtype).sqrt().mul_(column(state.scale, products))


def whitened(state: MatrixState, vectors: Tensor) -> Tensor:
    """Return ``S^(-1/2) v`` in the eigenbasis for vectors along the last axis."""
    root = roots(state)[..., None]
    return rotate(vectors.to(root.dtype), [side.basis for side in state.sides]) / root


def draw(
    options: PosteriorOptions,
    batches: Sequence[Batch],
    temperature: float,
    generators: Mapping[torch.device, Generator | None],
) -> dict[Tensor, Tensor]:
    """Draw deviations from the mean of all parameters in batches.

    Args:
        options: of their group.
        batches: what is known of the parameters.
        temperature: of the variances.
        generators: sources of random numbers by device; ``None`` for torch's global one.
    """
    drawn: dict[Tensor, Tensor] = {}
    assembly = Assembly()
    size = (temperature / options.ess) ** 0.5
    for batch in batches:
        generator = generators.get(batch.members[0].param.device)
        if isinstance(batch, MatrixBatch):
            deviations = _matrix_deviations(batch, generator)
        else:
            deviations = _vector_deviations(batch, generator, options.damping)
        scaled = torch._foreach_mul(deviations, size)
        params, whole = assembly.complete(batch.members, list(scaled))
        drawn.update(zip(params, whole, strict=True))
    return drawn


def _matrix_deviations(batch: MatrixBatch, generator: Generator | None) -> list[Tensor]:
    """Return ``S^(-1/2) z`` for each member of a batch."""
    state = batch.open_state()
    root = roots(state)
    z = torch.randn(root.shape, dtype=root.dtype, device=root.device, generator=generator)
    back = [None if side.basis is None else side.basis.mT for side in state.sides]
    return list(torch.split(rotate(z / root, back), batch.units))


def _vector_deviations(
    batch: VectorBatch, generator: Generator | None, damping: float
) -> list[Tensor]:
    """Return ``S^(-1/2) z`` for each member of a batch without bases."""
    deviations: list[Tensor] = []
    for flat in batch.flats:
        v = flat.state["second_moment"]
        z = torch.randn(v.shape, dtype=v.dtype, device=v.device, generator=generator)
        deviations += torch.split(z / (v + damping).sqrt_(), flat.sizes)
    return deviations


def seed_of(options: PosteriorOptions, step: int, number: int, rank: int) -> int:
    """Return the seed of a draw: another one for each step, draw and rank."""
    seed = options.seed
    for part in (step, number, rank):
        seed = (seed * 6364136223846793005 + part + 1442695040888963407) % LARGEST_SEED
    return seed


@contextmanager
def moved(deviations: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Add deviations to parameters, and take back the very same numbers at the end."""
    means = {param: param.detach().clone() for param in deviations}
    try:
        with torch.no_grad():
            for param, deviation in deviations.items():
                param.copy_(means[param].to(deviation.dtype) + deviation)
        yield
    finally:
        with torch.no_grad():
            for param, mean in means.items():
                param.copy_(mean)


def average_gradients(params: Sequence[Tensor]) -> None:
    """Average gradients over all ranks, unless DDP has: then all ranks have the same already."""
    gradients = [param.grad for param in params if param.grad is not None]
    total = sum(gradient.double().abs().sum().item() for gradient in gradients)
    numbers = [total, -total, len(gradients), -len(gradients)]
    extremes = params[0].new_tensor(numbers, dtype=torch.float64)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if extremes[2] != -extremes[3]:
        raise ValueError(
            "ranks have gradients of different parameters, so that they cannot step together"
        )
    if extremes[0] == -extremes[1]:
        return
    for gradient in gradients:
        mean = gradient.contiguous()
        dist.all_reduce(mean)
        gradient.copy_(mean * (1 / dist.get_world_size()))
