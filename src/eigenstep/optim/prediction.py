"""What a posterior says of a model that is linear in its weights around their mean: outputs are
exactly Gaussian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from ..core.checks import check_nonempty, describe
from . import posterior_kernel
from .diagonal import Diagonals

AT_ONCE = 2**24
"""So many entries of Jacobians are held at a time."""


def linear_part(
    model: Any,
    inputs: Tensor,
    params: set[Tensor],
    whiten: Callable[[Mapping[Tensor, Tensor]], Iterable[Tensor]],
) -> tuple[Tensor, Tensor]:
    """Return mean ``(examples, outputs)`` and root of the covariance of a linear model, of which
    some ``params`` vary.

    Their Jacobians are multiplied by the root of the posterior's covariance by ``whiten``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module to be linearized, got {describe(model)}")
    check_nonempty(inputs, "inputs")
    tensors: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p in params}
    if not tensors:
        raise ValueError(
            "the model has none of the parameters that are drawn: pass the model that was trained"
        )
    named = {name: p.detach() for name, p in tensors.items()}
    with torch.no_grad():
        mean = model(inputs)
        if mean.ndim != 2 or len(mean) != len(inputs):
            raise ValueError(
                "outputs must have shape (examples, outputs) to be linearized, got "
                f"{tuple(mean.shape)}"
            )

        def output(weights: dict[str, Tensor], one: Tensor) -> Tensor:
            return functional_call(model, weights, (one[None],))[0]

        count = max(1, AT_ONCE // (sum(p.numel() for p in named.values()) * mean.shape[1]))
        covariances = []
        for some in torch.split(inputs, count):
            found = vmap(jacrev(output), (None, 0))(named, some)  # (examples, outputs, *shape)
            roots = whiten(
                {tensors[name]: j.flatten(0, 1).movedim(0, -1) for name, j in found.items()}
            )
            parts = [root.view(len(root), len(some), -1) for root in roots]
            covariances.append(
                torch.stack([torch.einsum("wec,wed->ecd", part, part) for part in parts]).sum(0)
            )
        values, vectors = torch.linalg.eigh(torch.cat(covariances))  # which may be singular
        return mean, vectors * values.clamp_min(0.0).sqrt()[..., None, :]


def whitened(
    groups: Sequence[Mapping[str, Any]],
    known: Callable[[Any], Any],
    jacobians: Mapping[Tensor, Tensor],
) -> Iterator[Tensor]:
    """Give out ``(ess S)^(-1/2) J`` part by part, shape ``(weights, K)``, given Jacobians
    ``(*shape, K)``.
    """
    count = next(iter(jacobians.values())).shape[-1]
    for group in groups:
        for stack in known(group):
            own = [member for member in stack.members if member.param in jacobians]
            if isinstance(stack, Diagonals):
                moments = [
                    x for joint, sizes in stack.second_moments() for x in torch.split(joint, sizes)
                ]
                for member, moment in zip(stack.members, moments, strict=True):
                    if member.param in jacobians:
                        vectors = member.plan.split(jacobians[member.param], member.part).flatten(
                            0, -2
                        )
                        yield vectors / (group["ess"] * (moment + group["damping"])).sqrt()[:, None]
            elif own:
                zero = jacobians[own[0].param].new_zeros(())
                full = [
                    jacobians.get(m.param, zero).expand(*m.param.shape, count)
                    for m in stack.members
                ]
                yield (
                    posterior_kernel.whitened(stack.gather(full), stack.state).flatten(0, -2)
                    / group["ess"] ** 0.5
                )
