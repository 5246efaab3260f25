"""Gaussians in spectral form against torch's own distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from eigenstep import Diagonal, Full
from eigenstep.inference import Gaussian
from eigenstep_lab.baselines.van_loan import nearest_kronecker

from .problems import random_spd


def test_density_entropy_and_covariance_of_one_block() -> None:
    mean = torch.randn(2, 3)
    precision = random_spd(6)
    q = Gaussian.start(mean, Full.from_dense(precision))
    want = MultivariateNormal(mean.flatten(), precision_matrix=precision)
    points = torch.randn(4, 2, 3)
    assert_close(q.log_prob(points), want.log_prob(points.flatten(1)))
    assert_close(q.covariance(), want.covariance_matrix)
    assert_close(q.std(), want.stddev.reshape(2, 3))


def test_blocks_are_independent() -> None:
    matrices = {"a": random_spd(6), "b": random_spd(2)}
    kron = nearest_kronecker(torch.kron(random_spd(2), random_spd(3)), (2, 3))
    q = Gaussian.start(
        {"a": torch.randn(2, 3), "b": torch.randn(2)},
        {"a": kron, "b": Full.from_dense(matrices["b"])},
    )
    points = {"a": torch.randn(5, 2, 3), "b": torch.randn(5, 2)}
    parts = [
        MultivariateNormal(q.means[n].flatten(), precision_matrix=S.dense()).log_prob(
            points[n].flatten(1)
        )
        for n, S in q.precisions.items()
    ]
    assert_close(q.log_prob(points), parts[0] + parts[1])
    assert q.size == 8


def test_samples_have_the_moments() -> None:
    q = Gaussian.start(
        torch.tensor([1.0, -2.0]), Full.from_dense(torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
    )
    draws = q.sample(40000, torch.Generator().manual_seed(1))
    assert_close(draws.mean(0), q.mean, atol=0.02, rtol=0)
    assert_close(draws.T.cov(), q.covariance(), atol=0.02, rtol=0)


@pytest.mark.parametrize("kind", ["full", "diagonal", "kronecker"])
def test_structures_start_at_the_identity(kind: str) -> None:
    q = Gaussian.start(torch.zeros(2, 3), kind)
    assert_close(q.covariance(), torch.eye(6))
    assert_close(Gaussian.start(torch.zeros(2), 4.0).covariance(), torch.eye(2) / 4)


@pytest.mark.parametrize(
    ("mean", "precision", "text"),
    [
        (torch.tensor([math.nan]), "full", "mean must be finite"),
        (torch.zeros(0), "full", "at least one entry"),
        (torch.zeros(2), "banded", "must be one of full, diagonal, kronecker"),
        (torch.zeros(2), -1.0, "must be positive and finite"),
        (torch.zeros(2), torch.eye(2), "wrap it in Full.from_dense"),
        (torch.zeros(2), {"a": "full"}, "must be given for each of"),
        (torch.zeros(3), Full.identity(2, dtype=torch.float64), r"must act on shape \(3,\)"),
        (
            torch.zeros(2),
            Diagonal(torch.tensor([1.0, -1.0], dtype=torch.float64)),
            "positive definite",
        ),
        (torch.zeros(2), Diagonal(torch.ones(2, dtype=torch.float32)), "must be torch.float64"),
        (torch.zeros(()), "kronecker", "at least one axis"),
    ],
)
def test_infeasible_starts(mean: object, precision: object, text: str) -> None:
    if isinstance(mean, torch.Tensor):
        mean = mean.double()
    with pytest.raises((ValueError, TypeError), match=text):
        Gaussian.start(mean, precision)
