"""Logistic regression whose expectations under a Gaussian are exact: the reference for gaps of the
ELBO.

The product of an input and the weights is Gaussian in one dimension, where a rule of Gauss and
Hermite integrates.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from eigenstep.core.matrices import Full
from eigenstep.inference import Gaussian
from eigenstep.inference.gaussian import ONLY


class Quadrature:
    """Logistic regression with exact expectations under a Gaussian."""

    def __init__(self, inputs: Tensor, targets: Tensor, prior: float) -> None:
        """Prepare the nodes.

        Args:
            inputs: features, shape ``(n, d)``.
            targets: 0 or 1, shape ``(n,)``.
            prior: precision of the prior of every weight.
        """
        self.inputs, self.targets, self.prior = inputs, targets.to(inputs), prior
        nodes, weights = np.polynomial.hermite_e.hermegauss(64)
        self.nodes, self.weights = torch.tensor(nodes), torch.tensor(weights / weights.sum())

    def _products(self, mean: Tensor, covariance: Tensor) -> Tensor:
        spread = ((self.inputs @ covariance) * self.inputs).sum(1).sqrt()
        return (self.inputs @ mean)[:, None] + spread[:, None] * self.nodes

    def elbo(self, q: Gaussian) -> float:
        """Return the evidence lower bound of a Gaussian."""
        mean, covariance = q.means[ONLY], q.precisions[ONLY].dense(-1)
        fit = (
            softplus(self._products(mean, covariance)) @ self.weights
            - self.targets * (self.inputs @ mean)
        ).sum()
        square = mean @ mean + covariance.trace()
        log_prior = (
            0.5 * len(mean) * math.log(self.prior / (2 * math.pi)) - 0.5 * self.prior * square
        )
        entropy = 0.5 * (q.size * math.log(2 * math.pi * math.e) - q.logdet())
        return (log_prior - fit).item() + entropy

    def gap(self, best: Gaussian, q: Gaussian) -> float:
        """Return by how much the bound of a Gaussian falls short of the best one's."""
        return self.elbo(best) - self.elbo(q)

    def solve(self) -> Gaussian:
        """Return the best Gaussian, by dense linear algebra until the gradient vanishes."""
        size = self.inputs.shape[1]
        mean, precision = torch.zeros(size), torch.eye(size)
        for _ in range(1000):
            p = self._products(mean, torch.linalg.inv(precision)).sigmoid()
            gradient = self.inputs.T @ (p @ self.weights - self.targets) + self.prior * mean
            weights = (p * (1 - p)) @ self.weights
            hessian = self.inputs.T @ (weights[:, None] * self.inputs) + self.prior * torch.eye(
                size
            )
            precision = (precision + hessian) / 2
            mean = mean - 0.5 * torch.linalg.solve(precision, gradient)
            if gradient.norm() < 1e-10:
                return Gaussian.start(mean, Full.from_dense(precision))
        raise RuntimeError("the reference did not converge")
