"""Draws of weights from a posterior: random numbers that can be had again, on one rank
or on many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from . import kernel
from .diagonal import Diagonals
from .posterior_kernel import bases_of, roots
from .stacks import Stack, complete

Groups = Sequence[dict[str, Any]]
Known = Callable[[dict[str, Any]], Sequence[Stack | Diagonals]]
Drawn = dict[Tensor, tuple[Tensor | None, Tensor]]
"""For each parameter, the noise of a draw in the eigenbasis, if it will be needed, and the
deviation from the mean.
"""
LARGEST_SEED = 2**62


def draw(
    groups: Groups,
    known: Known,
    temperature: float,
    generator: Generator | None,
    number: int | None,
    ranks: int,
) -> Drawn:
    """Draw deviations from the mean of all parameters in stacks that are ``known``.

    If it is for training, ``number`` says how many draws this step has had before: then the group's
    seed decides, and the rank if several draw different weights. Otherwise random numbers come from
    the generator, or torch's global one.
    """
    drawn: Drawn = {}
    sources: dict[torch.device, Generator] = {}
    for group in groups:
        sign = -1.0 if number is not None and group["antithetic"] and number % 2 == 1 else 1.0
        noises, deviations, stacks = {}, {}, known(group)
        for stack in stacks:
            device = stack.members[0].param.device
            if number is not None and device not in sources:
                seed = _seed(group, number // 2 if group["antithetic"] else number, ranks)
                sources[device] = Generator(device).manual_seed(seed)
            noises[id(stack)], found = _deviations(
                stack, sources.get(device, generator), group["damping"]
            )
            deviations[id(stack)] = torch._foreach_mul(
                found, sign * (temperature / group["ess"]) ** 0.5
            )
        for params, moves in complete(stacks, lambda stack: deviations[id(stack)]):  # noqa: B023
            drawn.update((param, (None, each)) for param, each in zip(params, moves, strict=True))
        if number is not None and group["curvature"] == "reparametrization":
            for params, each in complete(stacks, lambda stack: noises[id(stack)]):  # noqa: B023
                drawn.update(
                    (p, (sign * noise, drawn[p][1])) for p, noise in zip(params, each, strict=True)
                )
    return drawn


def _deviations(
    stack: Any, generator: Generator | None, damping: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Return noise and ``S^(-1/2)`` times the noise for each member of a stack."""
    if isinstance(stack, Stack):
        root = roots(stack.state)
        noise = torch.randn(root.shape, dtype=root.dtype, device=root.device, generator=generator)
        colored = kernel.rotate(noise / root, bases_of(stack.state), back=True)
        return list(torch.split(noise, stack.units)), list(torch.split(colored, stack.units))
    found: list[Tensor] = []
    for moments, sizes in stack.second_moments():
        noise = torch.randn(
            moments.shape, dtype=moments.dtype, device=moments.device, generator=generator
        )
        found += torch.split(noise / (moments + damping).sqrt_(), sizes)
    return [], found


def _seed(group: Mapping[str, Any], number: int, ranks: int) -> int:
    """Return the seed of a draw: another one for each step, draw and rank."""
    found: int = group["seed"]
    for part in (group["count"], number, dist.get_rank() if ranks > 1 else 0):
        found = (found * 6364136223846793005 + part + 1442695040888963407) % LARGEST_SEED
    return found


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


def joined(
    param: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], count: int, prior: float
) -> Tensor:
    """Return noise and gradients (with the prior's) of so many draws; where some are missing,
    others count twice.
    """
    gradient = cast(Tensor, param.grad)
    if not pairs:
        return torch.stack([torch.zeros_like(gradient), gradient.add(param, alpha=prior)])
    noise = torch.stack([pairs[at % len(pairs)][0] for at in range(count)])
    found = torch.stack([pairs[at % len(pairs)][1] for at in range(count)]).to(noise.dtype)
    if gradient is not pairs[0][1]:  # it may have been unscaled or clipped since
        mean = found.mean(0)
        found *= (gradient * mean).sum() / mean.square().sum().clamp_min(
            torch.finfo(mean.dtype).tiny
        )
    return torch.cat([noise, found.add(param, alpha=prior)])


def average_gradients(groups: Groups) -> float:
    """Average gradients over all ranks, unless DDP has, and return how many times too small
    curvature is for that.

    The noise of a rank meets its own gradient in one of as many parts of DDP's average, and without
    DDP its own alone.
    """
    gradients = [
        param.grad for group in groups for param in group["params"] if param.grad is not None
    ]
    sizes = [gradient.double().abs().sum().item() for gradient in gradients]
    said = groups[0]["params"][0].new_tensor(
        [sum(sizes), -sum(sizes), len(sizes), -len(sizes)], dtype=torch.float64
    )
    dist.all_reduce(said, dist.ReduceOp.MAX)
    if said[2] != -said[3]:
        raise ValueError(
            "ranks have gradients of different parameters, so that they cannot step together"
        )
    if said[0] == -said[1]:
        return float(dist.get_world_size())
    for gradient in gradients:
        gradient.copy_(average_over_ranks(1.0, gradient))
    return 1.0


def average_over_ranks(factor: float, tensor: Tensor) -> Tensor:
    """Return a factor times the mean of a tensor over all ranks."""
    tensor = tensor.contiguous()
    dist.all_reduce(tensor)
    return tensor * (factor / dist.get_world_size())
