"""Recipes: ``Spectral`` with other defaults, as classes, for trainers that ask for a class."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .spectral import Params, Spectral


class SpectralFast(Spectral):
    """At most Muon's price: ``Spectral`` with long sides cut into square blocks.

    Also known as ``Spectral.fast``.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float | Tensor = 0.01,
        *,
        max_ratio: float | None = 1.0,
        **options: Any,
    ) -> None:
        """Set up the optimizer.

        Args:
            params: as for ``Spectral``.
            lr: as for ``Spectral``.
            betas: as for ``Spectral``.
            weight_decay: as for ``Spectral``.
            max_ratio: a side more than this many times longer than the other is cut into blocks.
            **options: any other argument of ``Spectral``.
        """
        super().__init__(params, lr, betas, weight_decay, max_ratio=max_ratio, **options)
