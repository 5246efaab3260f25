"""``l = -log_joint`` with its derivatives at many points, and a count of what was computed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ..core.curvature import Dense
from ..core.sources import hessian
from .gaussian import Blocks, unwrap


class NotFinite(ArithmeticError):
    """The objective or a derivative is NaN or infinite."""


class Target:
    """``l = -log_joint`` with its derivatives at many points, and a count of what was computed.

    A Hessian counts as one gradient for each parameter, a Gauss-Newton matrix as one for each output of the model.
    """

    def __init__(self, log_joint: Callable[[Any], Tensor], vectorize: bool = True) -> None:
        """Wrap a function of the parameters; with ``vectorize`` it is mapped over points by ``torch.func.vmap``."""
        self.log_joint = self.model = log_joint
        self.vectorize = vectorize
        self.nfev = self.ngrad = 0

    def refresh(self) -> None:
        """Draw a new minibatch, if ``log_joint`` has a method ``draw`` that returns a function for it."""
        draw = getattr(self.log_joint, "draw", None)
        self.model = draw() if draw else self.log_joint

    def loss(self, blocks: Blocks) -> Tensor:
        """Return ``l`` at one point."""
        value = self.model(unwrap(blocks))
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"log_joint must return one number as a tensor, got {shape}")
        return -value.reshape(())

    def values(self, points: Blocks) -> Tensor:
        """Return ``l`` at points along the first axis, shape ``(K,)``."""
        with torch.no_grad():
            values = self._map(self.loss, points)
        self.nfev += len(values)
        return _finite(values, "log_joint")

    def gradients(self, points: Blocks, check: bool = True) -> tuple[Tensor, Blocks]:
        """Return ``l`` and its gradients at points along the first axis."""
        gradients, values = self._map(grad_and_value(self.loss), points)
        self.ngrad += len(values)
        if check:
            _finite(values, "log_joint")
            for gradient in gradients.values():
                _finite(gradient, "the gradient of log_joint")
        return values.detach(), {name: g.detach() for name, g in gradients.items()}

    def mean_hessian(self, points: Blocks, name: str) -> Dense:
        """Return the mean Hessian of ``l`` with respect to one block."""
        mean = points[name].mean(0)

        def shifted(tensor: Tensor) -> Tensor:
            """The mean of ``l`` over all points, moved so that their mean is ``tensor`` in this block."""
            return self._map(self.loss, {**points, name: points[name] - mean + tensor}).mean()

        try:
            found = hessian(shifted, mean)
        except ValueError as error:
            raise NotFinite(f"the Hessian of log_joint cannot be used: {error}") from error
        self.ngrad += len(points[name]) * mean.numel()
        return found

    def _map(self, function: Callable[[Blocks], Any], points: Blocks) -> Any:
        if self.vectorize:
            return vmap(function, randomness="same")(points)
        results = [function(at) for at in each_of(points)]
        if isinstance(results[0], Tensor):
            return torch.stack(results)
        gradients, values = zip(*results, strict=True)
        return {name: torch.stack([g[name] for g in gradients]) for name in points}, torch.stack(values)


def each_of(points: Blocks) -> list[Blocks]:
    """Return points along the first axis one by one."""
    count = len(next(iter(points.values())))
    return [{name: tensor[at] for name, tensor in points.items()} for at in range(count)]


def _finite(tensor: Tensor, what: str) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise NotFinite(
            f"{what} is NaN or infinite at {int((~torch.isfinite(tensor)).sum())} of {tensor.numel()} entries"
        )
    return tensor
