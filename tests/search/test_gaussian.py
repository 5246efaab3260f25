"""The update against CMA-ES's formulas in dense form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eigenstep.search import gaussian
from eigenstep.search.gaussian import SpectralGaussian, mirrored_orthogonal, orthonormal_rows
from eigenstep.search.sampling import rates

from .problems import Array, ellipsoid, rotation


def random_state(d: int, seed: int = 0) -> SpectralGaussian:
    rng = np.random.default_rng(seed)
    log_eigs = rng.standard_normal(d)
    return SpectralGaussian(
        mean=rng.standard_normal(d),
        sigma=np.asarray(0.7),
        log_eigs=log_eigs - log_eigs.mean(),
        basis=rotation(d, seed),
        path=rng.standard_normal(d),
        step_path=0.5 * rng.standard_normal(d),
        generation=20,
    )


def dense_cma(
    state: SpectralGaussian, x: Array, values: Array
) -> tuple[Array, float, Array, Array, Array]:
    """CMA-ES's equations (Hansen, 2016) in the coordinates of the space, with an explicit
    covariance and its root.
    """
    assert state.basis is not None
    population, d = x.shape
    c = rates(d, population)
    B, sigma = state.basis, float(state.sigma)
    C = B @ np.diag(np.exp(state.log_eigs)) @ B.T
    whiten = B @ np.diag(np.exp(-state.log_eigs / 2)) @ B.T
    p_c, p_s = B @ state.path, B @ state.step_path
    y = (x[np.argsort(values)] - state.mean) / sigma
    step = sum(w * row for w, row in zip(c.mean_weights, y, strict=True))
    mean = state.mean + sigma * step
    p_s = (1 - c.step_path) * p_s + np.sqrt(
        c.step_path * (2 - c.step_path) * c.mean_selected
    ) * whiten @ step
    moving = np.linalg.norm(p_s) / np.sqrt(
        1 - (1 - c.step_path) ** (2 * (state.generation + 1))
    ) < np.sqrt((2 + 4 / (d + 1)) * d)
    p_c = (1 - c.path) * p_c + moving * np.sqrt(c.path * (2 - c.path) * c.mean_selected) * step
    decay = (
        1
        - c.rank_one
        - c.rank_many * c.weights.sum()
        + (not moving) * c.rank_one * c.path * (2 - c.path)
    )
    new = decay * C + c.rank_one * np.outer(p_c, p_c)
    for w, row in zip(c.weights, y, strict=True):
        scale = 1.0 if w >= 0 else d / np.linalg.norm(whiten @ row) ** 2
        new += c.rank_many * w * scale * np.outer(row, row)
    sigma *= np.exp(c.step_path / c.step_damping * (np.linalg.norm(p_s) / c.expected_norm - 1))
    return mean, sigma, p_s, p_c, new


@pytest.mark.parametrize(("seed", "path"), [(0, 0.5), (1, 0.5), (2, 4.0)])
def test_update_is_cma_es_up_to_the_spectral_factor(seed: int, path: float) -> None:
    d = 6
    state = random_state(d, seed)
    state = replace(state, step_path=path * state.step_path)  # a long path makes the other one wait
    z = state.draw(np.random.default_rng(seed), 10)
    x = state.sample(z)
    values = ellipsoid(x)
    mean, sigma, p_s, p_c, C = dense_cma(state, x, values)
    new = state.update(z, values)
    assert new.basis is not None
    assert state.basis is not None
    np.testing.assert_allclose(new.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(new.basis @ new.step_path, p_s, rtol=1e-10, atol=1e-12)
    moved = float(new.sigma) / sigma  # the part of sigma that comes from the eigenvalues
    np.testing.assert_allclose(new.basis @ new.path * moved, p_c, rtol=1e-10, atol=1e-12)
    # The new eigenvalues are the Rayleigh quotients of the dense covariance along the new axes, ...
    rayleigh = np.diag(new.basis.T @ C @ new.basis)
    np.testing.assert_allclose(np.exp(new.log_eigs) * moved**2, rayleigh, rtol=1e-10)
    # ... which are closer to its eigenvectors than the old ones.
    off = [
        np.linalg.norm(m - np.diag(np.diag(m)))
        for m in (b.T @ C @ b for b in (state.basis, new.basis))
    ]
    assert off[1] < 0.7 * off[0]


def test_turns_that_wait_collect_the_same_covariance(monkeypatch: pytest.MonkeyPatch) -> None:
    d = 5
    state = random_state(d)
    monkeypatch.setattr(gaussian, "rates", lambda *a: replace(rates(*a), interval=3))
    rng = np.random.default_rng(3)
    assert state.basis is not None
    for generation in range(2):
        z = state.draw(rng, 8)
        x = state.sample(z)
        before = state
        state = state.update(z, ellipsoid(x))
        if generation == 0:
            C = dense_cma(before, x, ellipsoid(x))[-1]
            assert state.average is not None
            np.testing.assert_allclose(
                before.basis @ state.average @ before.basis.T, C, rtol=1e-10, atol=1e-12
            )
        np.testing.assert_array_equal(state.basis, before.basis)
        np.testing.assert_array_equal(state.log_eigs, before.log_eigs)
    z = state.draw(rng, 8)
    turned = state.update(z, ellipsoid(state.sample(z)))
    assert turned.average is None
    assert turned.turns == 1
    assert turned.basis is not None
    assert not np.allclose(turned.basis, state.basis)


def test_separable_is_the_diagonal_of_the_full_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same rates and an identity basis, the diagonal of the new covariance is that of the
    full one.
    """
    d = 5
    monkeypatch.setattr(
        gaussian,
        "rates",
        lambda d, population, separable: replace(rates(d, population), interval=2),
    )
    full = replace(random_state(d), basis=np.eye(d))
    diagonal = replace(full, basis=None)
    z = full.draw(np.random.default_rng(1), 8)
    values = ellipsoid(full.sample(z))
    np.testing.assert_array_equal(full.sample(z), diagonal.sample(z))
    a, b = full.update(z, values), diagonal.update(z, values)
    assert a.average is not None
    moved = float(b.sigma / a.sigma) ** 2
    np.testing.assert_allclose(np.exp(b.log_eigs) * moved, np.diag(a.average), rtol=1e-12)
    np.testing.assert_allclose(a.mean, b.mean, rtol=1e-13)


@pytest.mark.parametrize(("rows", "d"), [(3, 6), (4, 6), (6, 6), (1, 1)])
def test_both_ways_to_make_rows_orthonormal_are_gram_and_schmidt(rows: int, d: int) -> None:
    z = np.random.default_rng(0).standard_normal((2, rows, d))
    found = orthonormal_rows(z)
    for given, made in zip(z, found, strict=True):
        want: list[Array] = []
        for row in given:
            rest = row - sum((row @ w) * w for w in want)
            want.append(rest / np.linalg.norm(rest))
        np.testing.assert_allclose(made, want, atol=1e-10)


def test_deviations_and_axes_are_those_of_many_samples() -> None:
    state = random_state(4)
    z = np.random.default_rng(0).standard_normal((200_000, 4))
    x = state.sample(z)
    np.testing.assert_allclose(x.std(0), state.deviations(), rtol=0.01)
    np.testing.assert_allclose(
        np.sort(np.linalg.eigvalsh(np.cov(x.T))) ** 0.5, np.sort(state.axes()), rtol=0.01
    )


@pytest.mark.parametrize(("population", "d"), [(6, 10), (10, 3), (7, 4), (4, 1)])
def test_samples_are_mirrored_and_orthogonal_and_normal(population: int, d: int) -> None:
    rng = np.random.default_rng(0)
    z = mirrored_orthogonal(rng, (3,), population, d)
    assert z.shape == (3, population, d)
    half = (population + 1) // 2
    np.testing.assert_array_equal(z[:, half:], -z[:, : population - half])
    block = z[:, : min(half, d)]
    gram = block @ block.swapaxes(-2, -1)
    np.testing.assert_allclose(gram - np.stack([np.diag(np.diag(g)) for g in gram]), 0, atol=1e-13)
    many = mirrored_orthogonal(rng, (20_000,), population, d)
    np.testing.assert_allclose(np.cov(many[:, 0].T).reshape(d, d), np.eye(d), atol=0.05)
    assert (many[:, 0] ** 4).mean() == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize(("d", "population"), [(3, 6), (10, 12), (40, 16), (5, 200)])
def test_with_our_changes_undone_the_constants_are_those_of_cma_es(
    monkeypatch: pytest.MonkeyPatch, d: int, population: int
) -> None:
    cmaes = pytest.importorskip("cmaes")
    from eigenstep.search import sampling as module

    for name, value in (("COVARIANCE_SPEED", 1.0), ("DAMPING", 1.0), ("REPULSION", 0.0)):
        monkeypatch.setattr(module, name, value)
    rates.cache_clear()
    try:
        c = rates(d, population)
    finally:
        rates.cache_clear()
    theirs = cmaes.CMA(mean=np.zeros(d), sigma=1.0, population_size=population)
    half = population // 2
    np.testing.assert_allclose(c.weights[:half], theirs._weights[:half], rtol=1e-12)
    np.testing.assert_allclose(
        c.weights[half:] / c.weights[-1], theirs._weights[half:] / theirs._weights[-1], rtol=1e-9
    )
    assert c.path == pytest.approx(theirs._cc)
    assert c.rank_one == pytest.approx(theirs._c1)
    # The tutorial of 2016 has 1/4 more than the package
    more = 0.5 / ((d + 2) ** 2 + theirs._mu_eff)
    assert c.rank_many == pytest.approx(min(0.9, theirs._cmu + more))
    assert c.step_path == pytest.approx(theirs._c_sigma)
    assert c.step_damping == pytest.approx(theirs._d_sigma)
    assert c.expected_norm == pytest.approx(theirs._chi_n)


def test_under_random_order_the_step_path_stays_standard_normal() -> None:
    """`mean_selected` takes the mirrored samples into account: without selection, paths keep their
    expected length.
    """
    d, runs = 8, 400
    state = SpectralGaussian.start(np.zeros((runs, d)), 1.0)
    rng = np.random.default_rng(0)
    for _ in range(40):
        z = state.draw(rng, 10)
        state = state.update(z, rng.uniform(size=(runs, 10)))
    assert (state.step_path**2).sum(-1).mean() == pytest.approx(d, rel=0.05)
