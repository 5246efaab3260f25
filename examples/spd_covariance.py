"""Estimate a covariance, also when some of the data are wrong.

The chemical analyses of 178 wines, of which one in ten is replaced by nonsense. The covariance of a
Gaussian is ruined by that; the scatter matrix of Student's t distribution, fitted together with its
location, hardly notices. Both are one call of `minimize_spd` with the density that one wants.
scikit-learn has the Gaussian in closed form, which ours must agree with, and the minimum covariance
determinant for data with outliers.
"""

from __future__ import annotations

import time

import torch
from sklearn.covariance import EmpiricalCovariance, MinCovDet
from sklearn.datasets import load_wine
from torch import Tensor

from eigenstep.manifold import SPDResult, TangentView, minimize_spd


def wines() -> Tensor:
    """Return the analyses, 178 × 13, each column with mean 0 and variance 1."""
    data = torch.tensor(load_wine().data)
    return (data - data.mean(0)) / data.std(0)


def with_outliers(data: Tensor, part: float = 0.1, seed: int = 0) -> Tensor:
    """Replace a part of the rows by nonsense, ten times as large."""
    generator = torch.Generator().manual_seed(seed)
    spoiled = data.clone()
    rows = torch.randperm(len(data), generator=generator)[: round(part * len(data))]
    spoiled[rows] = 10 * torch.randn(
        len(rows), data.shape[1], generator=generator, dtype=data.dtype
    )
    return spoiled


def fit_gaussian(data: Tensor) -> SPDResult:
    """Return the covariance and, in `x`, the mean of the most likely Gaussian."""

    def loss(covariance: TangentView, mean: Tensor) -> Tensor:
        return -covariance.log_prob(data - mean, power=1).mean()

    return minimize_spd(
        loss,
        torch.eye(data.shape[1], dtype=data.dtype),
        data.new_zeros(data.shape[1]),
        factored=True,
    )


def fit_student(data: Tensor, freedom: float = 2.0) -> SPDResult:
    """Return the scatter matrix and, in `x`, the location of the most likely t distribution."""
    size = data.shape[1]

    def loss(scatter: TangentView, location: Tensor) -> Tensor:
        x = data - location
        distance = (x * scatter.solve(x)).sum(-1)
        return (
            0.5 * scatter.logdet() + 0.5 * (freedom + size) * (1 + distance / freedom).log().mean()
        )

    return minimize_spd(
        loss, torch.eye(size, dtype=data.dtype), data.new_zeros(size), factored=True
    )


def distance(one: Tensor, other: Tensor) -> float:
    """Return the affine-invariant distance of two matrices, apart from their scale."""
    logs = torch.linalg.eigvals(torch.linalg.solve(one, other)).real.log()
    return (logs - logs.mean()).norm().item()


def main() -> None:
    torch.set_num_threads(1)
    clean = wines()
    data, truth = with_outliers(clean), torch.cov(clean.T, correction=0)
    estimators = {
        "scikit-learn EmpiricalCovariance": lambda x: torch.tensor(
            EmpiricalCovariance().fit(x.numpy()).covariance_
        ),
        "ours, Gaussian": lambda x: fit_gaussian(x).S.dense(),
        "scikit-learn MinCovDet": lambda x: torch.tensor(
            MinCovDet(random_state=0).fit(x.numpy()).covariance_
        ),
        "ours, Student's t": lambda x: fit_student(x).S.dense(),
    }
    rows = []
    for name, estimate in estimators.items():
        begin = time.process_time()
        errors = [distance(truth, estimate(x)) for x in (clean, data)]
        rows.append(
            (
                name,
                *(f"{error:.2f}" for error in errors),
                f"{500 * (time.process_time() - begin):.0f}",
            )
        )
    print("Distance from the covariance of the clean data")
    for row in (("estimator", "clean", "outliers", "CPU ms"), *rows):
        print("{:<34}{:<7}{:<10}{}".format(*row))


if __name__ == "__main__":
    main()
