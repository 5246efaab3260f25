"""Curvature that is given to a step, as vectors whose outer products are summed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.checks import describe
from ..core.curvature import OuterProducts


def vectors_of(
    curvature: Mapping[Tensor, Tensor | OuterProducts], groups: Iterable[Mapping[str, Any]]
) -> dict[Tensor, Tensor]:
    """Return the vectors of curvature that was given for parameters of these groups, with the
    sample axis last.
    """
    if not {param for group in groups for param in group["params"]}.issuperset(curvature):
        raise ValueError(
            "curvature was given for a tensor that is not a parameter of this optimizer"
        )
    return {param: _vectors(param, value) for param, value in curvature.items()}


def _vectors(param: Tensor, value: Tensor | OuterProducts) -> Tensor:
    if isinstance(value, OuterProducts):
        if not value.semidefinite or not isinstance(value.shift, float) or value.shift != 0:
            raise ValueError(
                "curvature for Spectral must be a sum of outer products without negative weights; "
                "eigenstep.update learns from indefinite curvature"
            )
        weights = (
            1.0 if value.weights is None else value.weights.sqrt().reshape(-1, *[1] * param.ndim)
        )
        value = value.vectors * weights
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(
            "curvature must be a real floating-point tensor or OuterProducts, got "
            f"{describe(value)}"
        )
    if value.ndim == 0 or len(value) == 0 or value.shape[1:] != param.shape:
        raise ValueError(
            f"curvature must have shape {('K', *param.shape)} with K >= 1 for this parameter, got "
            f"{tuple(value.shape)}"
        )
    return value.movedim(0, -1)


def equal_vectors(
    params: Sequence[Tensor], samples: Mapping[Tensor, Tensor], gradients: Mapping[Tensor, Any]
) -> list[Tensor] | None:
    """Return as many vectors for each parameter, some zero; its gradient if none were given,
    ``None`` if for nobody.
    """
    if samples.keys().isdisjoint(params):
        return None
    found = [samples[p] if p in samples else gradients[p][..., None] for p in params]
    most = max(t.shape[-1] for t in found)
    return [torch.nn.functional.pad(t, (0, most - t.shape[-1])) for t in found]
