"""``Spectral`` in axolotl: a plug-in that replaces the trainer's optimizer.

In the configuration::

    plugins: [eigenstep.integrations.axolotl.SpectralPlugin]
    spectral: {recipe: spectralfast, interval: 2}
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from . import recipe


class SpectralArgs(BaseModel):  # type: ignore[misc]
    """What the plug-in adds to axolotl's configuration."""

    spectral: dict[str, Any] | None = None


class SpectralPlugin(BasePlugin):  # type: ignore[misc]
    """Trains with ``Spectral``, at the learning rate and weight decay of the configuration."""

    def get_input_args(self) -> str:
        """Return where the additions to the configuration are."""
        return f"{__name__}.{SpectralArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Give the trainer its optimizer; axolotl makes the parameter groups, with a rate and a
        weight decay each.
        """
        options = dict(cfg.spectral or {})
        kind = recipe(options.pop("recipe", "spectral"))
        trainer.optimizer_cls_and_kwargs = (kind, {"lr": trainer.args.learning_rate, **options})
