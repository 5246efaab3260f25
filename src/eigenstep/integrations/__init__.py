"""``Spectral`` inside other people's trainers. Nothing here is needed where a trainer takes an
optimizer or a class.

- Hugging Face Trainer: ``optimizer_cls_and_kwargs=hugging_face("spectralfast", lr=3e-3)``.
- timm: ``register_timm()``, then ``create_optimizer_v2(model, "spectralfast", lr=3e-3)`` or ``--opt
  spectralfast``.
- torchtitan: ``eigenstep.integrations.torchtitan``. axolotl: ``eigenstep.integrations.axolotl``.
- Lightning: ``--optimizer eigenstep.optim.SpectralFast`` on its command line.
- Accelerate: ``prepare`` takes ``Spectral`` as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..optim import Spectral, SpectralFast, SpectralPaper

__all__ = ["RECIPES", "SpectralFactory", "hugging_face", "recipe", "register_timm"]

RECIPES: Mapping[str, type[Spectral]] = {
    "spectral": Spectral,
    "spectralfast": SpectralFast,
    "spectralpaper": SpectralPaper,
}
"""The optimizers by the names that trainers know them by; case does not matter."""


def recipe(name: str) -> type[Spectral]:
    """Return an optimizer's class by its name."""
    if name.lower() not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {name!r}")
    return RECIPES[name.lower()]


class SpectralFactory:
    """Makes the optimizer of a whole model by ``for_model``.

    Trainers that take a factory in place of a class, as Hugging Face's does, make one without
    arguments and call it.
    """

    def __call__(
        self,
        model: nn.Module,
        args: Any = None,
        *,
        name: str = "spectral",
        weight_decay: float = 0.01,
        **options: Any,
    ) -> Spectral:
        """Return the optimizer of a model.

        Args: model: whose parameters to train; frozen ones are left out. args: arguments of the
            trainer, whose ``learning_rate`` counts unless ``lr`` is among the options. name: a key
            of ``RECIPES``. weight_decay: of all but vectors and scalars. **options: any other
            argument of ``for_model``.
        """
        if args is not None:
            options.setdefault("lr", args.learning_rate)
        return recipe(name).for_model(model, weight_decay=weight_decay, **options)


def hugging_face(
    name: str = "spectral", **options: Any
) -> tuple[type[SpectralFactory], dict[str, Any]]:
    """Return what ``transformers.Trainer`` takes as ``optimizer_cls_and_kwargs``.

    Args: name: a key of ``RECIPES``. **options: arguments of ``Spectral``, such as ``lr``; those of
        ``TrainingArguments`` do not count then.
    """
    recipe(name)
    return SpectralFactory, {"name": name, **options}


def register_timm() -> None:
    """Make timm know the optimizers; groups of its ``fallback_list`` get a diagonal, as
    in AdamW.
    """
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry

    for name, kind in RECIPES.items():
        text = (kind.__doc__ or "").splitlines()[0]
        default_registry.register(OptimInfo(name, kind, text, has_eps=False, has_betas=True))
