"""``Spectral.for_model``: parameter groups that follow from what a model's modules are, and from
names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .layout import MANY_ROWS
from .spectral import Spectral

FUSED = re.compile(r"(^|[._])(qkv|in_proj|c_attn|qkv_proj|wqkv)([._]|$)", re.IGNORECASE)
"""Names of modules whose weights are queries, keys and values in one matrix, one below the other.
"""
POSITIONS = re.compile(
    r"^(?!.*(rel|bias)).*(^|_)(pos|positions?|positional|posemb|wpe)(_|$)", re.IGNORECASE
)
"""Names of tables with a row for each place of a sequence or picture, but not for distances between
places.
"""
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
FARTHER = 4
"""So many times as far step tables of positions and few words: rows enter a network as they are,
not multiplied.
"""


def for_model(
    cls: type[Spectral],
    model: nn.Module,
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float | Tensor = 0.01,
    *,
    patterns: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Spectral:
    """Set up the optimizer for a model, with groups by the kind of its modules; ``summary()`` tells
    what was chosen.

    Embeddings of many rows step as in AdamW; positions, and embeddings of less than 1024 rows if
    tied to no layer, have four times the learning rate. Fused projections
    (``nn.MultiheadAttention``, ``qkv``, ...) are a matrix each for queries, keys and values
    (``model.config`` may tell the heads), and stacks named ``experts``; vectors do not decay.

    Args: cls: ``Spectral`` or a recipe. model: the model; parameters that do not require gradients
        are left out. lr: learning rate. betas: as in the constructor. weight_decay: as in the
        constructor. patterns: options by patterns of names, ``{"head.*": {"lr": 1e-2}, ...}``; of
        several all count, the last most. **options: any other argument of the constructor.
    """
    groups: dict[str, dict[str, Any]] = {}
    seen: dict[Tensor, str] = {}
    multiplied = {
        layer.weight for layer in model.modules() if isinstance(layer, (nn.Linear, _ConvNd))
    }
    for place, module in model.named_modules():
        for own, param in module.named_parameters(recurse=False):
            if param.requires_grad and param not in seen:
                name = seen[param] = f"{place}.{own}".lstrip(".")
                kind, special = _kind(name, module, param, getattr(model, "config", None))
                few = isinstance(module, EMBEDDINGS) and len(param) < MANY_ROWS
                placed = param.ndim > 1 and POSITIONS.search(
                    name.removesuffix(".weight").rpartition(".")[2]
                )
                if param not in multiplied and (few or placed):
                    kind, special = f"tables, {kind}", {**special, "lr": FARTHER * lr}
                for pattern, more in (patterns or {}).items():
                    if fnmatchcase(name, pattern):
                        kind, special = f"{kind}, {pattern}", {**special, **more}
                group = groups.setdefault(kind, {"params": [], "name": kind, **special})
                group["params"].append((name, param))
    if not groups:
        raise ValueError("the model has no parameters that require gradients")
    for pattern in patterns or {}:
        if not any(fnmatchcase(name, pattern) for name in seen.values()):
            raise ValueError(
                f"no parameter that is trained has a name like {pattern!r}; tied ones have their "
                "first"
            )
    return cls(groups.values(), lr=lr, betas=betas, weight_decay=weight_decay, **options)


def _kind(name: str, module: nn.Module, param: Tensor, config: Any) -> tuple[str, dict[str, Any]]:
    """Return what a parameter is, and the options of its group."""
    if isinstance(module, EMBEDDINGS) and param.shape[0] > 2 * param.shape[1]:
        return "embeddings", {"structure": "diagonal"}
    if param.ndim < 2 or isinstance(module, nn.LayerNorm):
        return "vectors", {"weight_decay": 0.0}
    if "lora_" in name:  # adapters of high rank have the shape of embeddings
        return "adapters", {"structure": "kronecker"}
    if isinstance(module, _ConvNd):
        return "convolutions", {"batch_dims": 0}
    if "expert" in name.lower() and param.ndim == 3 - name.endswith("bias"):
        return "experts", {"batch_dims": 1}
    if param.ndim == 2 and FUSED.search(name):
        # That of transformers multiplies from the right
        axis = int(type(module).__name__ == "Conv1D")
        heads = getattr(config, "num_attention_heads", None) or 1
        shared = getattr(config, "num_key_value_heads", None) or heads
        each, rest = divmod(param.shape[axis], heads + 2 * shared)
        if not rest and each * shared > 1:
            sizes = (each * heads, each * shared, each * shared)
            return f"fused {'+'.join(map(str, sizes))} {axis}", {
                "split_sizes": sizes,
                "split_dim": axis,
            }
    return "matrices", {}


Spectral.for_model = classmethod(for_model)  # type: ignore[arg-type, assignment]
