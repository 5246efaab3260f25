"""From settings to a network, an optimizer and a device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..console import UserError
from ..models.hiera import HIERA_VIT, Hiera
from ..models.transformers import GPT, PLAIN_VIT, ViT
from ..rivals import build
from .feeds import Feed
from .settings import Settings

NETWORKS: Mapping[str, tuple[Callable[..., nn.Module], Mapping[str, object]]] = {
    "vit": (ViT, {}),
    "hiera": (Hiera, {}),
    "gpt": (GPT, {}),
    "plainvit": (ViT, PLAIN_VIT),
    "hieravit": (Hiera, HIERA_VIT),
}
"""Networks by name, with their options: small ones, and the paper's at full size."""


def build_model(settings: Settings, feed: Feed) -> nn.Module:
    """Build the network for the data, with its first weights."""
    name = settings.model if settings.model != "auto" else "vit" if feed.pictures else "gpt"
    if (name != "gpt") != feed.pictures:
        kind = "pictures" if feed.pictures else "a text"
        raise UserError(f"model {name} does not fit the data: {settings.data} is {kind}")
    network, options = NETWORKS[name]
    known = inspect.signature(network).parameters.values()
    allowed = [
        p.name for p in known if p.kind is p.KEYWORD_ONLY and p.name not in ("seed", "length")
    ]
    unknown = sorted(set(settings.model_option) - set(allowed))
    if unknown:
        raise UserError(
            f"model {name} has no option {', '.join(unknown)}: expected {', '.join(allowed)}"
        )
    return feed.build(network, {**options, **settings.model_option, "seed": settings.seed})


def build_optimizer(settings: Settings, model: nn.Module) -> Optimizer:
    """Build the optimizer for the network."""
    options = {name: _translate(name, value) for name, value in settings.option.items()}
    lr, decay, interval = settings.lr, settings.weight_decay, settings.interval
    try:
        return build(settings.optimizer, model, lr, decay, interval=interval, **options)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(
            f"optimizer {settings.optimizer} with options {settings.option}: {error}"
        ) from error


def _translate(name: str, value: Any) -> Any:
    """Translate what TOML cannot say: no value, tuples, number formats."""
    if value == "none":
        return None
    if name.endswith("betas"):
        return tuple(value)
    if name in ("basis_dtype", "state_dtype"):
        return {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}.get(
            value, value
        )
    return value


def choose_device(name: str) -> torch.device:
    """Return the device of that name; "auto" takes a GPU if there is one."""
    if name == "auto":
        name = (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device {name!r} cannot be used here: {str(error).splitlines()[0]}"
        ) from error
    return device
