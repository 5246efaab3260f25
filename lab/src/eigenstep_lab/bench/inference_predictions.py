"""Predictions from many draws of the parameters, and how good they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.func import vmap

from eigenstep.core.checks import check_nonempty, check_size
from eigenstep.inference import Supervised
from eigenstep.inference.gaussian import Parameters


def predictive(model: Supervised, parameters: Parameters, inputs: Tensor) -> Tensor:
    """Return the outputs of a model for many parameters and inputs, shape ``(K, n, C)``.

    Args:
        model: the model.
        parameters: stacked along the first axis, as ``Gaussian.sample`` returns them.
        inputs: examples along the first axis.
    """
    with torch.no_grad():
        return vmap(vmap(model.predict, (None, 0)), (0, None))(parameters, inputs)


def log_predictive(
    model: Supervised, parameters: Parameters, inputs: Tensor, targets: Tensor
) -> Tensor:
    """Return the log predictive density of every target, ``log mean_k p(y | x, w_k)``, shape
    ``(n,)``.

    Args:
        model: the model.
        parameters: stacked along the first axis.
        inputs: examples along the first axis.
        targets: what was observed.
    """
    outputs = predictive(model, parameters, inputs)
    losses = vmap(vmap(model.loss), (0, None))(outputs, targets)
    return torch.logsumexp(-losses, 0) - math.log(len(losses))


def class_probabilities(outputs: Tensor) -> Tensor:
    """Return the mean class probabilities over parameters, shape ``(n, classes)``, given logits
    ``(K, n, C)``.

    One logit stands for two classes, the second of which has its probability.
    """
    if outputs.shape[-1] > 1:
        return outputs.softmax(-1).mean(0)
    second = outputs[..., 0].sigmoid().mean(0)
    return torch.stack([1 - second, second], -1)


def calibration_error(probabilities: Tensor, targets: Tensor, bins: int = 10) -> float:
    """Return the expected calibration error: mean distance of confidence and accuracy, in bins of
    confidence.

    Args:
        probabilities: of each class, shape ``(n, classes)``.
        targets: the true classes, shape ``(n,)``.
        bins: number of bins of equal width.
    """
    check_nonempty(probabilities, "probabilities")
    check_size(bins, "bins")
    confidence, guess = probabilities.max(-1)
    which = (confidence * bins).long().clamp(0, bins - 1)
    surplus = confidence - (guess == targets).to(confidence)
    per_bin = torch.zeros(bins).to(confidence).index_add(0, which, surplus)
    return (per_bin.abs().sum() / len(confidence)).item()
