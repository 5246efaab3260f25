"""Problems whose posteriors are known by other means: dense linear algebra and quadrature."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus


def random_spd(n: int, condition: float = 30.0) -> Tensor:
    basis = torch.linalg.qr(torch.randn(n, n))[0]
    matrix = (basis * torch.logspace(0, math.log10(condition), n)) @ basis.T
    return (matrix + matrix.T) / 2


def quadratic(hessian: Tensor, center: Tensor):  # type: ignore[no-untyped-def]
    def log_joint(w: Tensor) -> Tensor:
        x = w.flatten() - center.flatten()
        return -0.5 * x @ hessian @ x

    return log_joint


class Quadrature:
    """Logistic regression with exact expectations: ``x w`` is Gaussian in one dimension for every
    example.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, prior_precision: float) -> None:
        self.inputs = inputs
        self.targets = targets
        self.prior = prior_precision
        nodes, weights = np.polynomial.hermite_e.hermegauss(60)
        self.nodes = torch.tensor(nodes)
        self.weights = torch.tensor(weights / weights.sum())

    def _at(self, mean: Tensor, covariance: Tensor) -> Tensor:
        spread = ((self.inputs @ covariance) * self.inputs).sum(1).sqrt()
        return (self.inputs @ mean)[:, None] + spread[:, None] * self.nodes

    def elbo(self, mean: Tensor, covariance: Tensor) -> float:
        size = len(mean)
        nll = (
            softplus(self._at(mean, covariance)) @ self.weights
            - self.targets * (self.inputs @ mean)
        ).sum()
        prior = 0.5 * size * math.log(self.prior / (2 * math.pi)) - 0.5 * self.prior * (
            mean @ mean + covariance.trace()
        )
        entropy = 0.5 * size * math.log(2 * math.pi * math.e) + 0.5 * torch.logdet(covariance)
        return (prior + entropy - nll).item()

    def moments(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the exact expectations of gradient and Hessian of the negative log joint."""
        p = self._at(mean, covariance).sigmoid()
        gradient = self.inputs.T @ (p @ self.weights - self.targets) + self.prior * mean
        curvature = ((p * (1 - p)) @ self.weights)[:, None] * self.inputs
        return gradient, self.inputs.T @ curvature + self.prior * torch.eye(len(mean))

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return mean and covariance of the best Gaussian."""
        mean = torch.zeros(self.inputs.shape[1])
        precision = torch.eye(self.inputs.shape[1])
        for _ in range(300):
            gradient, hessian = self.moments(mean, torch.linalg.inv(precision))
            precision = (precision + hessian) / 2
            mean = mean - 0.5 * torch.linalg.solve(precision, gradient)
        assert gradient.norm() < 1e-9
        return mean, torch.linalg.inv(precision)


def small_logistic(examples: int = 40, size: int = 3) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(examples, size)
    chance = (inputs @ torch.linspace(1.5, -1.0, size)).sigmoid()
    return inputs, (torch.rand(examples) < chance).double()
