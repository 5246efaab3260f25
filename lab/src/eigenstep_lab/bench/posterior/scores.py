"""How good predictions with uncertainty are: proper scores, calibration, and a picture of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ... import plotting
from ...lines import look
from ..inference_predictions import calibration_error

BINS = 15
FEWEST = 20
"""Bins of fewer examples are left out of the picture: their accuracy is chance."""
LEVELS = torch.arange(0.05, 1.0, 0.05)
"""At these levels the coverage of regressions is looked at."""


def brier_score(probabilities: Tensor, targets: Tensor) -> float:
    """Return the mean squared distance of class probabilities ``(n, classes)`` from
    what happened.
    """
    happened = one_hot(targets, probabilities.shape[-1]).to(probabilities)
    return (probabilities - happened).square().sum(-1).mean().item()


def log_loss(probabilities: Tensor, targets: Tensor) -> float:
    """Return the mean negative log probability of what happened."""
    chosen = probabilities.gather(-1, targets[:, None]).clamp_min(
        torch.finfo(probabilities.dtype).tiny
    )
    return -chosen.log().mean().item()


def scaled(probabilities: Tensor, temperature: float) -> Tensor:
    """Return probabilities to the power of the inverse temperature, normalized."""
    return (probabilities.clamp_min(1e-30).log() / temperature).softmax(-1)


def best_temperature(probabilities: Tensor, targets: Tensor) -> float:
    """Return the temperature with the smallest log loss, of a grid with steps of five percent."""
    grid = [1.05**k for k in range(-30, 46)]
    return min(grid, key=lambda t: log_loss(scaled(probabilities, t), targets))


def class_scores(probabilities: Tensor, targets: Tensor) -> dict[str, float]:
    """Return all scores of class probabilities."""
    return {
        "nll": log_loss(probabilities, targets),
        "ece": calibration_error(probabilities, targets, BINS),
        "brier": brier_score(probabilities, targets),
        "accuracy": (probabilities.argmax(-1) == targets).double().mean().item(),
    }


def mixture_log_density(means: Tensor, variance: float, targets: Tensor) -> Tensor:
    """Return the log density of targets ``(n, 1)`` under equal mixtures of Gaussians with means
    ``(S, n, 1)``.
    """
    square = (targets - means)[..., 0].square() / variance
    each = -0.5 * (square + math.log(2 * math.pi * variance))
    return each.logsumexp(0) - math.log(len(means))


def best_variance(means: Tensor, targets: Tensor) -> float:
    """Return the variance of the noise with the smallest log loss, of a grid."""
    grid = [1e-3 * 1.1**k for k in range(80)]
    return max(grid, key=lambda v: mixture_log_density(means, v, targets).mean().item())


def value_scores(means: Tensor, variance: float, targets: Tensor) -> dict[str, float]:
    """Return all scores of a regression; its calibration error is that of the coverage of intervals
    from below.
    """
    below = (0.5 * (1 + torch.erf((targets - means)[..., 0] / (2 * variance) ** 0.5))).mean(0)
    coverage = (below[:, None] <= LEVELS).double().mean(0)
    return {
        "nll": -mixture_log_density(means, variance, targets).mean().item(),
        "ece": (coverage - LEVELS).abs().mean().item(),
        "rmse": (means.mean(0) - targets).square().mean().sqrt().item(),
    }


def detection(inside: Tensor, outside: Tensor) -> float:
    """Return how often foreign inputs have less confidence than familiar ones: the area under the
    ROC curve.
    """
    a, b = inside.max(-1).values, outside.max(-1).values
    ranks = torch.cat([a, b]).argsort().argsort().double()[: len(a)]
    return ((ranks.sum() - len(a) * (len(a) - 1) / 2) / (len(a) * len(b))).item()


def reliability(probabilities: Tensor, targets: Tensor) -> list[tuple[float, float, int]]:
    """Return mean confidence, accuracy and number of examples of each bin of confidence that has
    any.
    """
    confidence, guess = probabilities.max(-1)
    which = (confidence * BINS).long().clamp(0, BINS - 1)
    rows = []
    for index in range(BINS):
        chosen = which == index
        if chosen.any():
            right = (guess == targets)[chosen].double().mean().item()
            rows.append((confidence[chosen].mean().item(), right, int(chosen.sum())))
    return rows


def plot_reliability(
    rows: Mapping[str, Sequence[tuple[float, float, int]]], title: str, path: Path
) -> Path:
    """Draw accuracy over confidence, one line for each method; on the diagonal they agree."""
    drawn, axes = plotting.figure(width=5.0, height=4.4)
    ax = axes[0, 0]
    ax.plot([0, 1], [0, 1], color="gray", linestyle=":")
    for index, (name, bins) in enumerate(rows.items()):
        drawable = [b for b in bins if b[2] >= FEWEST]
        ax.plot(
            [b[0] for b in drawable],
            [b[1] for b in drawable],
            marker="o",
            label=name,
            **look(name, index),
        )
    ax.set(xlabel="confidence", ylabel="accuracy", title=title)
    ax.legend(fontsize=7)
    return plotting.save(drawn, path)
