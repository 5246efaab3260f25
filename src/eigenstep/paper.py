"""The paper's own step, its boxes and nothing of ours.

For a matrix of weights ``W`` with gradient ``G`` and ``S = alpha (B_C Diag(d_C) B_C^T) x (B_K
Diag(d_K) B_K^T)``, a step of Lin et al. (2025) for neural networks is (Figure "SF-Shampoo")::

    1. M <- beta_1 M + (1 - beta_1) G                    momentum, in eigen-coordinates
    2. G~ = B_C^T G B_K
       Q_C = G~ Diag(1/d_K) G~^T / (alpha m) + damping,   W_K likewise
    3. n = (1 - gamma beta_2) d + beta_2 diag(W)          for both sides
       d <- exp(log n - mean(log n)),  alpha <- alpha exp(mean over sides of mean(log n))
    4. N_ij = -W_ij / (d_i - d_j),  B <- B Cayley(bar-beta_2 / 2 N / ||N||_F), truncated
    5. W <- W - beta_1 S^(-1/p) M

Rates are constant, the bases turn before they precondition, and nothing mends them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from .core.checks import check_number
from .core.step import (
    Learned,
    Orthogonal,
    Turning,
    cayley,
    exp,
    learn,
    normalized,
    rotate,
    truncated_cayley,
    truncated_exp,
)
from .optim.matrix import AbsolutelyDamped, GivenCurvature, Matrices, Weights, cut
from .optim.options import Interval, Options
from .optim.spectral import Params, Spectral

GAP = 0.1
"""Eigenvalues closer than this fraction of the larger one count as equal.

The paper leaves that open; less is worse, for a few nearly equal pairs then take all of the
rotation.
"""


@dataclass(frozen=True)
class PaperOptions(Options):
    """Options of a parameter group, with the paper's own."""

    gamma: float
    exact: bool
    gap: float

    def __post_init__(self) -> None:
        """Raise unless all options are possible."""
        super().__post_init__()
        check_number(self.gamma, "gamma", 0.0, 1.0)
        check_number(self.gap, "gap", 0.0, 1.0)
        if self.eigenvalues != "kronecker":
            raise ValueError(
                f'the paper\'s step has eigenvalues="kronecker", got {self.eigenvalues!r}'
            )
        if self.damping == 0:
            raise ValueError(
                "damping must be greater than 0: without any, directions that have hardly seen a "
                "gradient get steps of any length"
            )

    def _check_turning(self) -> None:
        rate = self.turning.rate
        if isinstance(rate, Tensor) or rate is None or not 0 < rate < 2:
            raise ValueError(f"basis_lr must be greater than 0 and less than 2, got {rate!r}")


class PaperMatrices(AbsolutelyDamped):
    """A batch of matrices that learn as the paper has it."""

    options: PaperOptions
    start: ClassVar[float] = 0.0

    def step(
        self, gradient: Tensor, curvature: GivenCurvature | None, *, turn: bool, mend: bool
    ) -> Tensor:
        """Learn from gradients and return the directions ``S^(-1/p) M`` to go against."""
        state = self.state
        state.step.add_(1)
        weights = self.weights_(turn)
        bases = [side.basis for side in state.sides]
        G = rotate(self.within_range(gradient), bases)
        self.average_(G, weights.momentum, None)
        samples = G[..., None]
        if curvature is not None:
            samples = rotate(self.within_range(curvature.vectors), bases)
        rotations = self.learn_(samples, weights, turn)
        self.turn_(rotations, mend=mend, mask=None)
        if rotations:
            G = rotate(G, rotations)
        direction = self.precondition_(G, None)
        if self.options.root != 2:
            direction = cut(direction, gradient.dtype)
        direction = rotate(direction, [None if basis is None else basis.mT for basis in bases])
        return self.limited_(direction)

    def learning(self, weights: Weights) -> Callable[..., Learned]:
        """Return ``learn`` with the paper's rates, maps and rotation of norm ``bar-beta_2 / 2``."""
        turning = self.options.turning
        if weights.basis is not None and self.state.sides[0].basis is not None:
            turning = replace(
                turning,
                rotation=partial(normalized, rate=self.rates.basis, gap=self.options.gap),
                rate=None,
                dtype=self.state.sides[0].basis.dtype,
            )
        return partial(
            learn,
            rate=weights.curvature[:, None, None],
            decay=self.options.gamma,
            positive=exp if self.options.exact else truncated_exp,
            turning=turning,
        )


class SpectralPaper(Spectral):
    """The paper's recipe for networks. Also known as ``Spectral.paper``.

    Kronecker eigenvalues, normalized rotation, truncated maps, every 2 steps. No side is cut,
    however long. The paper updates "preconditioners" every 2 steps: here that means the bases.
    """

    options_kind: ClassVar[type[Options]] = PaperOptions
    matrices_kind: ClassVar[type[Matrices]] = PaperMatrices

    def __init__(  # noqa: PLR0913
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float | Tensor = 0.01,
        *,
        root: float = 2.0,
        gamma: float = 1.0,
        basis_lr: float = 0.5,
        damping: float = 1e-12,
        interval: Interval = 2,
        clip: float | None = 1.0,
        exact: bool = False,
        map: str | Orthogonal | None = None,
        gap: float = GAP,
        mend: bool = False,
        basis_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        structure: str = "kronecker",
        nonfinite: str = "raise",
        compile: bool = False,
        distributed: bool = True,
        **options: object,
    ) -> None:
        """Set up the optimizer.

        Args:
            params: parameters, named parameters, or dictionaries that describe parameter groups.
            lr: the paper's beta-1.
            betas: decay of momentum, and one minus the paper's beta-2.
            weight_decay: decoupled, as in AdamW.
            root: the paper's ``p``.
            gamma: the paper's gamma between 1 (running average) and 0 (AdaGrad).
            basis_lr: the paper's beta-bar-2, the length of a rotation, below 2.
            damping: the paper's lambda, an absolute number.
            interval: turn the bases every so many steps, or a schedule such as
                ``[(0, 1), (1000, 4)]``; followed to the letter.
            clip: largest root mean square of a layer's step before the learning rate.
            exact: exact Cayley and exponential maps in place of truncated ones.
            map: map from generators to orthogonal matrices, in place of these Cayley maps.
            gap: eigenvalues closer than this fraction of the larger one count as equal.
            mend: mend bases by a Newton-Schulz step at every turn. The paper does not say.
            basis_dtype: number format of the bases; by default that of the state.
            state_dtype: as for ``Spectral``.
            structure: as for ``Spectral``.
            nonfinite: as for ``Spectral``.
            compile: as for ``Spectral``.
            distributed: as for ``Spectral``.
            **options: ``max_dim``, ``max_ratio``, ``fused``, ``eps``, ``cautious_weight_decay``,
                ``stochastic_rounding`` and torch's, as for ``Spectral``.
        """
        turning = Turning(
            rate=basis_lr,
            map=map or (cayley if exact else partial(truncated_cayley, cap=None)),
            mend=mend,
            dtype=basis_dtype,
        )
        self._more: Mapping[str, object] = {
            "gamma": gamma,
            "exact": exact,
            "gap": gap,
            "nesterov": 0.0,
            "grafting": False,
            "eigenvalues": "kronecker",
        }
        whole: dict[str, object] = {"max_dim": None, "max_ratio": None}
        super().__init__(
            params,
            lr,
            betas,
            weight_decay,
            root=root,
            damping=damping,
            interval=interval,
            clip=clip,
            turning=turning,
            state_dtype=state_dtype,
            structure=structure,
            nonfinite=nonfinite,
            compile=compile,
            distributed=distributed,
            **{**whole, **options},  # type: ignore[arg-type]
        )

    def _resolved(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options in their own types; intervals are followed to the letter."""
        resolved = super()._resolved(options)
        interval = resolved.get("interval")
        if isinstance(interval, int) and interval > 1:
            resolved["interval"] = [(0, interval)]
        return resolved
