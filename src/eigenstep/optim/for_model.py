"""``Spectral.for_model``: parameter groups that follow from what a model's modules are."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from .diagonal import RARE
from .spectral import Spectral

FUSED = re.compile(r"(^|[._])(qkv|in_proj|c_attn|query_key_value|qkv_proj|wqkv)([._]|$)", re.IGNORECASE)
"""Names of modules whose weights are queries, keys and values in one matrix."""


def for_model(
    cls: type[Spectral],
    model: nn.Module,
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.01,
    **options: Any,
) -> Spectral:
    """Set up the optimizer for a model, with groups by the kind of its modules; ``summary()`` tells what was chosen.

    Embeddings of many rows step as in AdamW with a long memory, fused projections (``nn.MultiheadAttention``, ``qkv``,
    ``c_attn``, ...) as a matrix each for queries, keys and values, and vectors (biases, gains of norms) have no weight
    decay. All else is as in the constructor: stacked experts and convolutions are recognized by their shapes, tied
    weights are stepped once, frozen ones are left out.

    Args:
        cls: ``Spectral`` or a recipe.
        model: the model; parameters that do not require gradients are left out.
        lr: learning rate.
        betas: as in the constructor.
        weight_decay: as in the constructor.
        **options: any other argument of the constructor.
    """
    groups: dict[str, dict[str, Any]] = {}
    seen: set[Tensor] = set()
    for name, module in model.named_modules():
        for own, param in module.named_parameters(recurse=False):
            if param.requires_grad and param not in seen:
                seen.add(param)
                kind, special = _kind(f"{name}.{own}", module, param, betas)
                group = groups.setdefault(kind, {"params": [], "name": kind, **special})
                group["params"].append((f"{name}.{own}".lstrip("."), param))
    if not groups:
        raise ValueError("the model has no parameters that require gradients")
    return cls(groups.values(), lr=lr, betas=betas, weight_decay=weight_decay, **options)


def _kind(name: str, module: nn.Module, param: Tensor, betas: tuple[float, float]) -> tuple[str, dict[str, Any]]:
    """Return what a parameter is, and the options of its group."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and param.shape[0] > 2 * param.shape[1]:
        return "embeddings", {"structure": "diagonal", "betas": (betas[0], 1 - (1 - betas[1]) / RARE)}
    if param.ndim < 2:
        return "vectors", {"weight_decay": 0.0}
    if param.ndim == 2 and FUSED.search(name):
        # Conv1D of transformers multiplies from the right: there, columns are fused.
        axis = 1 if type(module).__name__ == "Conv1D" else 0
        third, rest = divmod(param.shape[axis], 3)
        if not rest and third > 1:
            return f"fused {third} {axis}", {"split_sizes": (third,) * 3, "split_dim": axis}
    return "matrices", {}


Spectral.for_model = classmethod(for_model)  # type: ignore[arg-type, assignment]
