"""Predictions of a model that is linear in its weights around their mean: outputs that are Gaussian exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, jacrev, vmap

from ..core.checks import check_nonempty, check_number, describe

AT_ONCE = 2**24
"""So many entries of Jacobians are held at a time."""


def linear_outputs(
    model: Any,
    inputs: Tensor,
    samples: int,
    params: set[Tensor],
    whiten: Callable[[Mapping[Tensor, Tensor]], Iterable[Tensor]],
    temperature: float,
    generator: Generator | None,
) -> Tensor:
    """Draw outputs ``f(mu) + J x`` with ``x`` from the posterior, shape ``(samples, examples, outputs)``.

    Args:
        model: a module that returns ``(examples, outputs)``.
        inputs: examples along the first axis.
        samples: how many to draw; every second one mirrors the one before.
        params: those that are random.
        whiten: multiplies Jacobians ``(*shape, K)`` by the square root of the covariance, part by part.
        temperature: of variances.
        generator: source of random numbers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module to be linearized, got {describe(model)}")
    check_nonempty(inputs, "inputs")
    check_number(temperature, "temperature", 0.0)
    named = {name: p.detach() for name, p in model.named_parameters() if p in params}
    if not named:
        raise ValueError("the model has none of the parameters that are drawn: pass the model that was trained")
    tensors = {name: p for name, p in model.named_parameters() if p in params}
    with torch.no_grad():
        mean = model(inputs)
        if mean.ndim != 2 or len(mean) != len(inputs):
            raise ValueError(f"outputs must have shape (examples, outputs) to be linearized, got {tuple(mean.shape)}")

        def output(weights: dict[str, Tensor], one: Tensor) -> Tensor:
            return functional_call(model, weights, (one[None],))[0]

        count = max(1, AT_ONCE // (sum(p.numel() for p in named.values()) * mean.shape[1]))
        covariances = []
        for some in inputs.split(count):
            found = vmap(jacrev(output), (None, 0))(named, some)  # (examples, outputs, *shape)
            jacobians = {tensors[name]: j.flatten(0, 1).movedim(0, -1) for name, j in found.items()}
            roots = [part.view(len(part), len(some), -1) for part in whiten(jacobians)]
            covariances.append(sum(torch.einsum("wec,wed->ecd", part, part) for part in roots))
        covariance = temperature * torch.cat(covariances)
        noise = torch.randn(
            -(-samples // 2), *mean.shape, dtype=covariance.dtype, device=mean.device, generator=generator
        )
        half = torch.einsum("ecd,sed->sec", _root(covariance), noise)
        both = torch.stack([half, -half], 1).flatten(0, 1)[:samples]
        return mean + both.to(mean.dtype)


def _root(covariance: Tensor) -> Tensor:
    """Return the symmetric square roots of small matrices, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp_min(0.0).sqrt()[..., None, :]) @ vectors.mT
