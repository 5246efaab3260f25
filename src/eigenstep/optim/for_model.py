"""``Spectral.for_model``: parameter groups that follow from a model's modules, and from names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .layout import MANY_ROWS, is_embedding
from .options import Fused
from .spectral import Spectral

FUSED = re.compile(r"(^|[._])(qkv|in_proj|c_attn|qkv_proj|wqkv)([._]|$)", re.IGNORECASE)
"""Names of modules whose weights are queries, keys and values in one matrix, one below another."""
POSITIONS = re.compile(
    r"^(?!.*(rel|bias)).*(^|_)(pos|positions?|positional|posemb|wpe)(_|$)", re.IGNORECASE
)
"""Names of tables with a row for each place of a sequence or picture, but not for distances between
places.
"""
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
FARTHER = 4
"""Tables of positions and small vocabularies step this many times as far: their rows enter a
network as they are, not multiplied.
"""


class Named(NamedTuple):
    """A parameter that is trained, and where it stands in the model."""

    name: str
    module: nn.Module
    param: Tensor

    @property
    def is_table(self) -> bool:
        """Whether its rows are looked up: few words, or positions."""
        if isinstance(self.module, EMBEDDINGS) and len(self.param) < MANY_ROWS:
            return True
        word = self.name.removesuffix(".weight").rpartition(".")[2]
        return self.param.ndim > 1 and POSITIONS.search(word) is not None


def for_model(
    cls: type[Spectral],
    model: nn.Module,
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] | None = None,
    weight_decay: float | Tensor | None = None,
    *,
    patterns: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Spectral:
    """Set up the optimizer for a model, with groups by the kind of its modules.

    ``summary()`` tells what was chosen. Embeddings of many rows step as in AdamW; positions, and
    embeddings of less than 1024 rows if tied to no layer, have four times the learning rate. Fused
    projections (``nn.MultiheadAttention``, ``qkv``, ...) are a matrix each for queries, keys and
    values (``model.config`` may tell the heads), and so are stacks named ``experts``; vectors do
    not decay.

    Args:
        cls: ``Spectral`` or a recipe.
        model: the model; parameters that do not require gradients are left out.
        lr: learning rate.
        betas: as in the constructor, whose default they have.
        weight_decay: as in the constructor, whose default it has.
        patterns: options by patterns of names, ``{"head.*": {"lr": 1e-2}, ...}``; of several all
            count, the last most.
        **options: any other argument of the constructor.
    """
    params = list(_trained(model))
    if not params:
        raise ValueError("the model has no parameters that require gradients")
    patterns = patterns or {}
    _check_patterns(patterns, params)
    layers = (module for module in model.modules() if isinstance(module, (nn.Linear, _ConvNd)))
    multiplied = {layer.weight for layer in layers}
    groups: dict[str, dict[str, Any]] = {}
    for named in params:
        kind, special = _kind(named, getattr(model, "config", None))
        if named.is_table and named.param not in multiplied:
            kind = f"tables, {kind}"
            special = {**special, "lr": FARTHER * lr}
        for pattern, more in patterns.items():
            if fnmatchcase(named.name, pattern):
                kind = f"{kind}, {pattern}"
                special = {**special, **more}
        group = groups.setdefault(kind, {"params": [], "name": kind, **special})
        group["params"].append((named.name, named.param))
    chosen = {"betas": betas, "weight_decay": weight_decay}
    options.update({name: value for name, value in chosen.items() if value is not None})
    return cls(groups.values(), lr=lr, **options)


def _trained(model: nn.Module) -> Iterator[Named]:
    """Give out the parameters that require gradients, tied ones by their first name."""
    seen = set()
    for place, module in model.named_modules():
        for last, param in module.named_parameters(recurse=False):
            if param.requires_grad and param not in seen:
                seen.add(param)
                yield Named(f"{place}.{last}".lstrip("."), module, param)


def _check_patterns(patterns: Mapping[str, object], params: list[Named]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(named.name, pattern) for named in params):
            raise ValueError(
                f"no parameter that is trained has a name like {pattern!r}; tied ones have their "
                "first"
            )


def _kind(named: Named, config: Any) -> tuple[str, dict[str, Any]]:
    """Return what a parameter is, and the options of its group."""
    name, module, param = named
    if isinstance(module, EMBEDDINGS) and is_embedding(*param.shape, looked_up=True):
        return "embeddings", {"structure": "diagonal"}
    if param.ndim < 2 or isinstance(module, nn.LayerNorm):
        return "vectors", {"weight_decay": 0.0}
    if "lora_" in name:  # adapters of high rank have the shape of embeddings
        return "adapters", {"structure": "kronecker"}
    if isinstance(module, _ConvNd):
        return "convolutions", {"fused": Fused(batch_dims=0)}
    if "expert" in name.lower() and param.ndim == 3 - name.endswith("bias"):
        return "experts", {"fused": Fused(batch_dims=1)}
    return _projections(named, config) or ("matrices", {})


def _projections(named: Named, config: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the options of queries, keys and values in one matrix, ``None`` for other matrices."""
    if named.param.ndim != 2 or not FUSED.search(named.name):
        return None
    # Conv1D of transformers multiplies from the right.
    axis = int(type(named.module).__name__ == "Conv1D")
    heads = getattr(config, "num_attention_heads", None) or 1
    shared = getattr(config, "num_key_value_heads", None) or heads
    size, rest = divmod(named.param.shape[axis], heads + 2 * shared)
    if rest or size * shared == 1:
        return None
    sizes = (size * heads, size * shared, size * shared)
    fused = Fused(sizes=sizes, axis=axis)
    return f"fused {'+'.join(map(str, sizes))} {axis}", {"fused": fused}
