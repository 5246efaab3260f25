"""Models to infer parameters of: regressions with a Gaussian prior, or any log density."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from ..core.checks import (
    check_finite,
    check_function,
    check_nonempty,
    check_number,
    check_size,
    describe,
)
from ..core.curvature import Dense, OuterProducts
from ..core.sources import gauss_newton, hessian
from .gaussian import Blocks, Parameters, as_blocks, unwrap


@dataclass(frozen=True)
class Supervised:
    """``log p(targets | inputs, w) + log p(w)`` as a function of ``w``.

    Call it, or pass it to ``fit_gaussian``.

    Attributes:
        predict: the model for one example, ``predict(w, input)`` of shape ``(C,)``.
        loss: negative log-likelihood of one example, ``loss(output, target)``, convex in the
            output.
        inputs: examples along the first axis.
        targets: what was observed, along the first axis.
        prior_precision: the prior of every parameter is ``N(0, 1 / prior_precision)``.
        outputs: the ``C`` of ``predict``.
        weight: how many examples each one stands for, more than one in minibatches.
    """

    predict: Callable[[Any, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor
    prior_precision: float
    outputs: int = 1
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Check the data."""
        check_nonempty(self.inputs, "inputs")
        check_finite(self.inputs, "inputs")
        check_function(self.predict, "predict")
        check_function(self.loss, "loss")
        if not isinstance(self.targets, Tensor) or self.targets.ndim == 0:
            raise TypeError(
                "targets must be a tensor with one entry for each input, got "
                f"{describe(self.targets)}"
            )
        if (count := len(self.inputs)) != len(self.targets):
            raise ValueError(
                f"targets must hold one entry for each of {count} inputs, got {len(self.targets)}"
            )
        if self.targets.is_floating_point():
            check_finite(self.targets, "targets")
        check_number(self.prior_precision, "prior_precision", 0.0)
        check_size(self.outputs, "outputs")

    def __call__(self, parameters: Parameters) -> Tensor:
        """Return the log density of targets and parameters."""
        return -self.weight * self.losses(parameters).sum() + self.log_prior(parameters)

    def losses(self, parameters: Parameters) -> Tensor:
        """Return the negative log-likelihood of every example."""
        losses = vmap(lambda x, y: self.loss(self.predict(parameters, x), y))(
            self.inputs, self.targets
        )
        if losses.ndim != 1:
            raise ValueError(
                f"loss must return one number for each example, got shape {tuple(losses.shape[1:])}"
            )
        return losses

    def log_prior(self, parameters: Parameters) -> Tensor:
        """Return the log density of the prior, an improper one if its precision is zero."""
        tensors = list(parameters.values()) if isinstance(parameters, dict) else [parameters]
        square = torch.stack([tensor.square().sum() for tensor in tensors]).sum()
        constant = math.log(self.prior_precision / (2 * math.pi)) if self.prior_precision else 0.0
        return 0.5 * (
            constant * sum(tensor.numel() for tensor in tensors) - self.prior_precision * square
        )

    def gauss_newton(self, points: Parameters) -> OuterProducts | dict[str, OuterProducts]:
        """Return the Gauss-Newton matrix of the likelihood, of each block, as a mean over points.

        Points are along the first axis.
        """
        blocks = as_blocks(points, "points")
        count = len(next(iter(blocks.values())))
        examples = len(self.inputs)
        pairs = torch.arange(count * examples, dtype=self.inputs.dtype, device=self.inputs.device)[
            :, None
        ]
        targets = self.targets.repeat(count, *[1] * (self.targets.ndim - 1))

        def curvature(name: str) -> OuterProducts:
            def predict(shift: Tensor, pair: Tensor) -> Tensor:
                which = pair.long() // examples
                example = pair.long() % examples
                at = {key: tensor[which][0] for key, tensor in blocks.items()}
                return self.predict(unwrap({**at, name: at[name] + shift}), self.inputs[example][0])

            # All pairs of parameters and examples count as examples here.
            mean = gauss_newton(
                predict, self.loss, torch.zeros_like(blocks[name][0]), pairs, targets
            )
            return OuterProducts(mean.vectors * (self.weight * examples) ** 0.5)

        return _like(points, {name: curvature(name) for name in blocks})

    def empirical_fisher(self, points: Parameters) -> OuterProducts | dict[str, OuterProducts]:
        """Return the sum over examples of ``g_i g_i^T``, of each block, as a mean over points.

        It is biased.
        """
        gradient = grad(lambda w, x, y: self.loss(self.predict(w, x), y))
        gradients = vmap(vmap(gradient, (None, 0, 0)), (0, None, None))(
            points, self.inputs, self.targets
        )
        scaled = {
            name: OuterProducts(g.flatten(0, 1) * (self.weight / len(g)) ** 0.5)
            for name, g in as_blocks(gradients, "gradients").items()
        }
        return _like(points, scaled)


def _like(
    points: Parameters, blocks: dict[str, OuterProducts]
) -> OuterProducts | dict[str, OuterProducts]:
    return blocks if isinstance(points, dict) else next(iter(blocks.values()))


class NotFinite(ArithmeticError):
    """The objective or a derivative is NaN or infinite."""


class Target:
    """``l = -log_joint`` with its derivatives at many points, and counts.

    A Hessian counts as one gradient per parameter.
    """

    def __init__(self, log_joint: Callable[[Any], Tensor], vectorize: bool = True) -> None:
        """Wrap a function; with ``vectorize``, ``torch.func.vmap`` maps it over points."""
        self.log_joint = log_joint
        self.model: Any = log_joint
        self.vectorize = vectorize
        self.nfev = self.ngrad = 0

    def refresh(self) -> None:
        """Draw a new minibatch, if ``log_joint`` has a method ``draw`` that returns it."""
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
            """The mean of ``l`` over points, moved so that this block has this mean."""
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
        results = [function(at) for at in singles(points)]
        if isinstance(results[0], Tensor):
            return torch.stack(results)
        gradients, values = zip(*results, strict=True)
        return {name: torch.stack([g[name] for g in gradients]) for name in points}, torch.stack(
            values
        )


def singles(points: Blocks) -> list[Blocks]:
    """Return points along the first axis one by one."""
    count = len(next(iter(points.values())))
    return [{name: tensor[at] for name, tensor in points.items()} for at in range(count)]


def _finite(tensor: Tensor, what: str) -> Tensor:
    if bad := int((~torch.isfinite(tensor)).sum()):
        raise NotFinite(f"{what} is NaN or infinite at {bad} of {tensor.numel()} entries")
    return tensor
