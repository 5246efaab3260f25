"""Regressions and classifiers whose parameters can be inferred."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from eigenstep.core.checks import check_nonempty, check_number, describe
from eigenstep.inference import Supervised
from eigenstep.inference.gaussian import Blocks


def linear_regression(
    inputs: Tensor, targets: Tensor, *, noise: float, prior_precision: float = 1.0
) -> Supervised:
    """Return Bayesian linear regression; add a column of ones for an intercept.

    Args:
        inputs: features, shape ``(n, d)``.
        targets: shape ``(n,)``.
        noise: standard deviation of the targets given the inputs.
        prior_precision: of every weight.
    """
    check_number(noise, "noise", 1e-300)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (
            0.5 * ((output[0] - target) / noise).square()
            + math.log(noise)
            + 0.5 * math.log(2 * math.pi)
        )

    _check_matrix(inputs)
    return Supervised(_linear, loss, inputs, _vector(targets).to(inputs), prior_precision)


def logistic_regression(
    inputs: Tensor, targets: Tensor, *, prior_precision: float = 1.0
) -> Supervised:
    """Return Bayesian logistic regression; add a column of ones for an intercept.

    Args:
        inputs: features, shape ``(n, d)``.
        targets: 0 or 1, shape ``(n,)``.
        prior_precision: of every weight.
    """
    _check_matrix(inputs)
    if not ((_vector(targets) == 0) | (targets == 1)).all():
        raise ValueError("targets must be 0 or 1")
    return Supervised(_linear, _logistic_loss, inputs, targets.to(inputs), prior_precision)


def classifier(
    network: torch.nn.Module, inputs: Tensor, targets: Tensor, *, prior_precision: float = 1.0
) -> tuple[Supervised, Blocks]:
    """Return a network with a softmax over classes, and its parameters as the mean to start from.

    Args: network: maps ``(C_in,)`` or ``(n, C_in)`` to logits; without dropout or batch
        normalization. inputs: examples along the first axis. targets: classes, shape ``(n,)``,
        integers. prior_precision: of every parameter.
    """
    check_nonempty(inputs, "inputs")
    start = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}

    def predict(parameters: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(network, parameters, (x,))

    with torch.no_grad():
        classes = predict(start, inputs[0]).shape[-1]
    if _vector(targets).is_floating_point() or not ((targets >= 0) & (targets < classes)).all():
        raise ValueError(
            f"targets must be integers from 0 to {classes - 1}, the outputs of the network"
        )
    return Supervised(predict, cross_entropy, inputs, targets, prior_precision, classes), start


def _linear(weights: Tensor, x: Tensor) -> Tensor:
    return (x @ weights)[None]


def _logistic_loss(output: Tensor, target: Tensor) -> Tensor:
    return softplus(output[0]) - target * output[0]


def _check_matrix(inputs: Tensor) -> None:
    check_nonempty(inputs, "inputs")
    if inputs.ndim != 2:
        raise ValueError(f"inputs must have shape (n, d), got {tuple(inputs.shape)}")


def _vector(targets: Tensor) -> Tensor:
    """Return targets that are one number for each example, and raise for others: they would be
    broadcast.
    """
    if not isinstance(targets, Tensor) or targets.ndim != 1:
        shape = (
            f"shape {tuple(targets.shape)}" if isinstance(targets, Tensor) else describe(targets)
        )
        raise ValueError(f"targets must be a tensor of shape (n,), got {shape}")
    return targets
