"""Ensemble Kalman inversion against exact posteriors."""

from __future__ import annotations

import pytest
import torch

from eigenstep.inference import fit_gaussian
from eigenstep_lab.extras import ensemble_inversion
from inference.problems import random_spd


def test_linear_models_exactly():
    A, R, data, start = torch.randn(6, 4), random_spd(6), torch.randn(6), torch.randn(4)
    found = ensemble_inversion(lambda w: A @ w, data, R, start, 2.0, tol=1e-13)
    precision = A.T @ torch.linalg.inv(R) @ A + 2 * torch.eye(4)
    mean = torch.linalg.solve(precision, A.T @ torch.linalg.solve(R, data) + 2 * start)
    assert found.success
    torch.testing.assert_close(found.mean, mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        found.posterior.covariance(), torch.linalg.inv(precision), atol=1e-6, rtol=0
    )
    evidence = torch.distributions.MultivariateNormal(A @ start, R + A @ A.T / 2).log_prob(data)
    assert found.elbo == pytest.approx(evidence.item(), abs=1e-6)
    assert found.ngrad == 0
    assert {each.points for each in found.history} == {32}  # two ensembles, which agree
    assert found.nfev >= 1000 + 32 * (found.nit + 1)
    assert (found.nfev - 1000) % 32 == 0


def test_a_nonlinear_model_comes_close_to_the_best_gaussian():
    times = torch.linspace(0, 2, 12)

    def decay(w):
        return w[0] * torch.exp(-w[1].exp() * times)

    truth, noise = torch.tensor([2.0, 0.3]), 0.01 * torch.eye(12)
    data = decay(truth) + 0.1 * torch.randn(12)

    def log_joint(w):
        misfit = (decay(w) - data).square().sum() / 0.01
        constant = 12 * torch.log(torch.tensor(2 * torch.pi * 0.01)) + 2 * torch.log(
            torch.tensor(2 * torch.pi)
        )
        return -0.5 * (misfit + w.square().sum() + constant)

    found = ensemble_inversion(decay, data, noise, torch.zeros(2), 1.0, members=40)
    best = fit_gaussian(log_joint, found.mean, found.precision, samples=32)
    assert found.success
    assert best.elbo - found.elbo < 0.05 + 4 * (best.elbo_error + found.elbo_error)
    torch.testing.assert_close(found.mean, best.mean, atol=0.02, rtol=0)
