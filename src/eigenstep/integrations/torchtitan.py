"""``Spectral`` in torchtitan: a container of optimizers that knows it, and its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from . import RECIPES


class SpectralContainer(OptimizersContainer):  # type: ignore[misc]
    """torchtitan's container, with ``Spectral``, ``SpectralFast`` and ``SpectralPaper`` beside its
    own optimizers.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """That of torchtitan's container; ``optimizer_name`` of a group may be one of ours."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        return RECIPES.get(name.lower()) or OptimizersContainer._resolve_optimizer_factory(name)


def spectral(lr: float = 1e-3, name: str = "Spectral", **options: Any) -> SpectralContainer.Config:
    """Return the configuration of one optimizer for all parameters, for the ``optimizer`` of a
    training configuration.

    Args:
        lr: learning rate.
        name: ``Spectral``, ``SpectralFast`` or ``SpectralPaper``.
        **options: any other argument of ``Spectral``.
    """
    group = ParamGroupConfig(
        pattern=".*", optimizer_name=name, optimizer_kwargs={"lr": lr, **options}
    )
    return SpectralContainer.Config(param_groups=[group])
