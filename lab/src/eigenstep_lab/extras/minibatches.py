"""Models that take other examples at every step of a fit."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eigenstep.core.checks import check_size
from eigenstep.core.curvature import OuterProducts
from eigenstep.inference import Supervised
from eigenstep.inference.gaussian import Parameters


class Minibatches:
    """A random, unbiased stand-in for a model: every call draws other examples.

    Examples:
        >>> batches = Minibatches(model, 100)
        >>> fit = fit_gaussian(batches, start, lr=lambda t: 2 / (t + 4), max_iter=20)
    """

    def __init__(self, whole: Supervised, size: int, seed: int = 0) -> None:
        """Start drawing.

        Args:
            whole: the model.
            size: number of examples, drawn without repetition.
            seed: of the random numbers.
        """
        check_size(size, "size")
        if size > len(whole.inputs):
            raise ValueError(f"size must be at most the {len(whole.inputs)} examples, got {size}")
        self._whole = whole
        self._size = size
        self._generator = torch.Generator(whole.inputs.device).manual_seed(seed)
        self.prior_precision, self.outputs = whole.prior_precision, whole.outputs

    def draw(self) -> Supervised:
        """Return the model of some of the examples, each of which stands for many."""
        whole = self._whole
        chosen = torch.randperm(
            len(whole.inputs), generator=self._generator, device=whole.inputs.device
        )[: self._size]
        weight = whole.weight * len(whole.inputs) / self._size
        return replace(
            whole, inputs=whole.inputs[chosen], targets=whole.targets[chosen], weight=weight
        )

    def __call__(self, parameters: Parameters) -> Tensor:
        """Return the log density of some targets, which stand for all, and parameters."""
        return self.draw()(parameters)

    def gauss_newton(self, points: Parameters) -> OuterProducts | dict[str, OuterProducts]:
        """Return the Gauss-Newton matrix of a draw."""
        return self.draw().gauss_newton(points)

    def empirical_fisher(self, points: Parameters) -> OuterProducts | dict[str, OuterProducts]:
        """Return the empirical Fisher matrix of a draw."""
        return self.draw().empirical_fisher(points)
