"""The paper's strategy against a literal transcription of its equations."""

from __future__ import annotations

import numpy as np
import pytest

from eigenstep.search import Search
from eigenstep_lab.baselines.paper_nes import GAP, PaperNES, default_lr, usual_population
from search.problems import ellipsoid, rosenbrock


def transcription(mu, d, B, w, values, beta):
    """One step of the paper: REINFORCE gradient in the space itself, then the update of its Section
    3.

    ``2 dL/dS^-1 = E[l (S delta delta^T S - S)]``, gamma = 0, p = 1, exact exponential and Cayley
    maps, and the Moore-Penrose inverse of the differences of eigenvalues. The losses are minus the
    rank-based utilities.
    """
    K, n = w.shape
    raw = [max(0.0, np.log(K / 2 + 1) - np.log(1 + sum(values < value))) for value in values]
    u = np.array(raw) / sum(raw) - 1 / K
    S = B @ np.diag(d) @ B.T
    H = np.zeros((n, n))
    for k in range(K):
        delta = w[k] - mu
        H += -u[k] * (S @ np.outer(delta, delta) @ S - S)
    g = S @ sum(-u[k] * (w[k] - mu) for k in range(K))
    W = B.T @ H @ B
    N = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if abs(d[i] - d[j]) > GAP * max(d[i], d[j]):
                N[i, j] = -W[i, j] / (d[i] - d[j])
    M = beta / 2 * N
    new_B = B @ (np.eye(n) + M) @ np.linalg.inv(np.eye(n) - M)
    new_d = d * np.exp(beta * np.diag(W) / d)
    return mu - np.linalg.inv(S) @ g, new_d, new_B


@pytest.mark.parametrize(("n", "function"), [(2, ellipsoid), (5, rosenbrock), (4, ellipsoid)])
def test_matches_the_transcription_for_100_iterations(n, function):
    rng = np.random.default_rng(n)
    start = rng.standard_normal(n)
    ours = PaperNES.start(start, 0.8)
    mu, d, B = start, np.full(n, 0.8**-2), np.eye(n)
    beta = default_lr(n)
    turned = False
    for _ in range(100):
        z = ours.draw(rng, usual_population(n))
        w = mu + (z / np.sqrt(d)) @ B.T
        np.testing.assert_allclose(ours.sample(z), w, rtol=1e-10, atol=1e-10)
        values = function(w)
        mu, d, B = transcription(mu, d, B, w, values, beta)
        ours = ours.update(z, values)
        np.testing.assert_allclose(ours.mean, mu, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(np.exp(ours.log_eigs), d, rtol=1e-10)
        np.testing.assert_allclose(ours.basis, B, rtol=1e-10, atol=1e-10)
        turned = turned or np.abs(B - np.eye(n)).max() > 0.1
    assert turned, "a run that never turns would prove little"


def test_first_step_leaves_equal_eigenvalues_unturned_and_separates_them():
    ours = PaperNES.start(np.zeros(3), 1.0)
    z = ours.draw(np.random.default_rng(0), 12)
    new = ours.update(z, ellipsoid(ours.sample(z)))
    np.testing.assert_array_equal(new.basis, np.eye(3))
    assert len(set(new.log_eigs)) == 3


def test_search_runs_it():
    search = Search(np.array([1.0, -2.0, 0.5]), 0.6, method=PaperNES, population=14, seed=1)
    oracle = PaperNES.start(np.array([1.0, -2.0, 0.5]), 0.6)
    rng = np.random.default_rng(1)
    for _ in range(5):
        x = search.ask()
        z = oracle.draw(rng, usual_population(3))
        np.testing.assert_array_equal(x, oracle.sample(z))
        search.tell(x, ellipsoid(x))
        oracle = oracle.update(z, ellipsoid(x))
    np.testing.assert_array_equal(search.distribution.mean, oracle.mean)
