"""Fits against exact posteriors, converged references and Newton's method; and what happens to bad
problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.testing import assert_close

from eigenstep import Full, Kronecker
from eigenstep.inference import FitResult, fit_gaussian, laplace
from eigenstep_lab.extras import Minibatches
from eigenstep_lab.problems.regressions import linear_regression, logistic_regression

from .problems import Quadrature, quadratic, random_spd, small_logistic

SOURCES = ["hessian", "gauss-newton", "reparametrization", "reinforce", "gradient-outer-product"]


@pytest.fixture(scope="module")
def diabetes() -> tuple[Tensor, Tensor]:
    inputs, targets = (
        torch.tensor(part, dtype=torch.float64) for part in load_diabetes(return_X_y=True)
    )
    inputs = inputs[:100, :5]
    return (inputs - inputs.mean(0)) / inputs.std(0), (
        targets[:100] - targets.mean()
    ) / targets.std()


class TestLinearGaussian:
    """The posterior is known: all sources reach it, and each structure its best approximation."""

    @pytest.mark.parametrize("source", SOURCES)
    def test_exact_posterior(self, source: str, diabetes: tuple[Tensor, Tensor]) -> None:
        inputs, targets = diabetes
        model = linear_regression(inputs, targets, noise=0.8, prior_precision=2.0)
        precision = inputs.T @ inputs / 0.64 + 2 * torch.eye(5)
        mean = torch.linalg.solve(precision, inputs.T @ targets / 0.64)
        found = fit_gaussian(model, torch.zeros(5), 2.0, curvature=source, tol=1e-13, max_iter=2000)
        assert found.success
        assert_close(found.mean, mean, atol=1e-6, rtol=0)
        assert_close(found.posterior.covariance(), torch.linalg.inv(precision), atol=1e-6, rtol=0)
        total = 0.64 * torch.eye(len(inputs)) + inputs @ inputs.T / 2
        evidence = torch.distributions.MultivariateNormal(torch.zeros(len(inputs)), total).log_prob(
            targets
        )
        assert found.elbo == pytest.approx(evidence.item(), abs=1e-6)

    @pytest.mark.parametrize("source", ["hessian", "reinforce"])
    def test_kronecker(self, source: str) -> None:
        H = torch.kron(random_spd(2, 5.0), random_spd(3, 5.0))
        center = torch.randn(2, 3)
        found = fit_gaussian(
            quadratic(H, center), torch.zeros(2, 3), "kronecker", curvature=source, tol=1e-13
        )
        assert found.success
        assert isinstance(found.precision, Kronecker)
        assert_close(found.mean, center, atol=1e-6, rtol=0)
        assert_close(found.precision.dense(), H, atol=1e-5, rtol=0)

    def test_blocks(self) -> None:
        H = random_spd(5, 3.0)

        def log_joint(w: dict[str, Tensor]) -> Tensor:
            x = torch.cat([w["a"].flatten(), w["b"]]) - 1
            return -0.5 * x @ H @ x

        start = {"a": torch.zeros(3, 1), "b": torch.zeros(2)}
        found = fit_gaussian(log_joint, start, {"a": "full", "b": "diagonal"}, tol=1e-14)
        assert isinstance(found.precision, dict)
        assert_close(found.mean["b"], torch.ones(2), atol=1e-6, rtol=0)
        assert_close(found.precision["a"].dense(), H[:3, :3], atol=1e-6, rtol=0)

    def test_first_order_steps_end_at_the_same_posterior(self) -> None:
        H = random_spd(4, 10.0)
        center = torch.randn(4)
        found = fit_gaussian(quadratic(H, center), torch.zeros(4), tol=1e-14, exact=False)
        assert found.success
        assert_close(found.posterior.covariance(), torch.linalg.inv(H), atol=1e-6, rtol=0)


class TestNewton:
    def test_laplace_is_the_mode_that_scikit_learn_finds(self) -> None:
        inputs, targets = small_logistic()
        found = laplace(logistic_regression(inputs, targets, prior_precision=0.5), torch.zeros(3))
        mode = (
            LogisticRegression(C=2.0, fit_intercept=False, tol=1e-10)
            .fit(inputs.numpy(), targets.numpy())
            .coef_[0]
        )
        assert_close(found.mean, torch.tensor(mode), atol=1e-6, rtol=0)
        p = (inputs @ found.mean).sigmoid()
        hessian = inputs.T @ ((p * (1 - p))[:, None] * inputs) + 0.5 * torch.eye(3)
        assert_close(found.precision.dense(), hessian, atol=1e-8, rtol=1e-8)  # type: ignore[union-attr]
        assert found.nit < 10

    def test_from_a_saddle_it_finds_a_minimum(self) -> None:
        """The Hessian is indefinite at the start: the step is shortened, and the matrix stays
        positive definite.
        """

        def log_joint(w: Tensor) -> Tensor:
            return -((w[0] ** 2 - 1) ** 2) - w[1] ** 2

        found = laplace(log_joint, torch.tensor([0.1, 0.5]))
        assert found.success
        assert found.history[0].lr < 1
        assert_close(found.mean, torch.tensor([1.0, 0.0]), atol=1e-6, rtol=0)
        assert_close(found.posterior.covariance(), torch.diag(torch.tensor([1 / 8, 1 / 2])))


class TestLogisticRegression:
    @pytest.mark.parametrize("source", SOURCES[:4])
    def test_within_a_thousandth_of_the_best_gaussian(self, source: str) -> None:
        inputs, targets = small_logistic()
        exact = Quadrature(inputs, targets, 0.5)
        best = exact.elbo(*exact.solve())
        model = logistic_regression(inputs, targets, prior_precision=0.5)
        found = fit_gaussian(model, torch.zeros(3), 1.0, curvature=source)
        assert found.success
        gap = best - exact.elbo(found.mean, found.posterior.covariance())  # type: ignore[arg-type]
        assert 0 <= gap < 1e-3
        assert found.elbo == pytest.approx(best, abs=1e-3 + 4 * found.elbo_error)
        assert (found.ngrad == 0) == (source == "reinforce")

    def test_the_bias_of_gradient_outer_products_is_what_theory_says(self) -> None:
        """For ``l = w^2 / 2 + w^4 / 4`` all moments are known, and so are both variances at which
        ``S`` rests.
        """

        def root(function: Callable[[float], float]) -> float:
            low = 0.0
            high = 1.0
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if function(middle) < 1 else (low, middle)
            return low

        best = root(lambda v: v * (1 + 3 * v))  # S = E[1 + 3 w^2]
        rest = root(lambda v: v * (v + 6 * v**2 + 15 * v**3))  # S = E[(w + w^3)^2]
        assert rest < 0.95 * best

        def log_joint(w: Tensor) -> Tensor:
            return -(w**2 / 2 + w**4 / 4).sum()

        for source, variance in (("gradient-outer-product", rest), ("reparametrization", best)):
            found = fit_gaussian(
                log_joint,
                torch.zeros(1),
                curvature=source,
                samples=4096,
                tol=1e-3,
                max_samples=10**6,
            )
            assert found.success
            assert found.posterior.std().item() ** 2 == pytest.approx(variance, rel=0.02)  # type: ignore[union-attr]

    def test_noise_takes_more_points_and_lr_does_not(self) -> None:
        inputs, targets = small_logistic()
        model = logistic_regression(inputs, targets, prior_precision=0.5)
        fit = partial(fit_gaussian, model, torch.zeros(3), curvature="reparametrization", samples=8)
        found = fit()
        points = [each.points for each in found.history]
        assert points[0] == 16
        assert points[-1] >= 64
        assert all(after in (before, 2 * before) for before, after in pairwise(points))
        few = fit(max_samples=40)
        assert not few.success
        assert "mostly noise, and more than 40 points are not allowed" in few.message
        fixed = fit(lr=0.1, max_iter=30)
        assert {each.points for each in fixed.history} == {8}

    def test_minibatches_with_a_schedule(self) -> None:
        inputs, targets = small_logistic()
        exact = Quadrature(inputs, targets, 0.5)
        model = Minibatches(logistic_regression(inputs, targets, prior_precision=0.5), 20)
        found = fit_gaussian(
            model,
            torch.zeros(3),
            curvature="gauss-newton",
            samples=8,
            lr=lambda t: 2 / (t + 4),
            max_iter=300,
            tol=0.0,
        )
        assert (
            exact.elbo(*exact.solve()) - exact.elbo(found.mean, found.posterior.covariance()) < 0.03
        )  # type: ignore[arg-type]


class TestHostileProblems:
    """Positive definite to the end, or a clear error."""

    @pytest.mark.parametrize("exact", [True, False])
    def test_negative_curvature_between_two_modes(self, exact: bool) -> None:
        """The Hessian is negative at the start; the best Gaussian has a positive mean Hessian."""

        def log_joint(w: Tensor) -> Tensor:
            return -2 * (w.square() - 1).square().sum()

        start = Full(torch.eye(2), torch.full((2,), 8.0))
        found = fit_gaussian(
            log_joint, torch.tensor([0.01, -0.01]), start, samples=1024, tol=1e-2, exact=exact
        )
        assert found.success
        if exact:
            assert found.history[0].lr < 0.5
        assert (found.precision.spectrum > 0).all()  # type: ignore[union-attr]

        def objective(m: Tensor, v: Tensor) -> Tensor:
            """The exact objective of one coordinate with mean m and variance v."""
            return 2 * (m**4 + 6 * m**2 * v + 3 * v**2 - 2 * (m**2 + v) + 1) - 0.5 * v.log()

        m = found.mean[:, None, None]
        v = found.posterior.std().square()[:, None, None]
        around = objective(
            m + torch.linspace(-0.2, 0.2, 41)[:, None], v * torch.logspace(-0.3, 0.3, 41)
        )
        assert (objective(m, v)[:, 0, 0] - around.flatten(1).amin(1)).sum() < 0.03

    def test_an_improper_posterior_is_never_called_a_success(self) -> None:
        found = fit_gaussian(lambda w: -0.5 * w[0] ** 2, torch.zeros(2), max_iter=50)
        assert not found.success
        assert "max_iter=50" in found.message
        assert (found.precision.spectrum > 0).all()  # type: ignore[union-attr]

    def test_not_finite_at_the_start(self) -> None:
        with pytest.raises(ValueError, match="must be finite around the start"):
            fit_gaussian(lambda w: w.sum() * math.nan, torch.zeros(2))

    def test_not_finite_on_the_way(self) -> None:
        """Beyond 3 there is nothing, and the gradient pulls there: the search ends where it is, and
        says so.
        """

        def log_joint(w: Tensor) -> Tensor:
            return torch.where(w[0] < 3, 10 * w[0] - 0.5 * w[0] ** 2, math.nan)

        start = Full(torch.eye(1), torch.full((1,), 1e4))
        for lr in (None, 0.5):
            found = fit_gaussian(
                log_joint, torch.zeros(1), start, samples=8, lr=lr, elbo_samples=4, max_iter=200
            )
            assert not found.success
            assert "NaN or infinite" in found.message
            assert found.mean.item() < 3  # type: ignore[union-attr]
            assert (found.precision.spectrum > 0).all()  # type: ignore[union-attr]


class TestInterface:
    def test_the_same_seed_gives_the_same_fit(self) -> None:
        inputs, targets = small_logistic()
        model = logistic_regression(inputs, targets)
        runs = [fit_gaussian(model, torch.zeros(3), max_iter=5, seed=seed) for seed in (1, 1, 2)]
        assert torch.equal(runs[0].mean, runs[1].mean)  # type: ignore[arg-type]
        assert not torch.equal(runs[0].mean, runs[2].mean)  # type: ignore[arg-type]

    def test_callback_history_and_progress(self, capsys: pytest.CaptureFixture[str]) -> None:
        seen: list[FitResult] = []

        def callback(result: FitResult) -> bool:
            seen.append(result)
            return len(seen) == 3

        found = fit_gaussian(
            quadratic(random_spd(2), torch.ones(2)),
            torch.zeros(2),
            callback=callback,
            progress=True,
        )
        assert found.message == "the callback asked to stop"
        assert [result.nit for result in seen] == [0, 1, 2]
        assert len(found.history) == 3
        assert found.history[-1].ngrad == found.ngrad
        assert "ELBO" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"curvature": "magic"}, "curvature must be one of hessian"),
            ({"curvature": "gauss-newton"}, "needs a log_joint that knows its model"),
            ({"samples": 2, "curvature": "reinforce"}, "even number of at least 4"),
            ({"lr": lambda t: -1.0}, "lr must be above 0"),
            ({"tol": -1.0}, "tol must be"),
            ({"max_samples": 0}, "max_samples must be"),
            ({"callback": 3}, "callback must be a function"),
        ],
    )
    def test_bad_options(self, options: dict[str, object], text: str) -> None:
        with pytest.raises((ValueError, TypeError), match=text):
            fit_gaussian(quadratic(torch.eye(2), torch.ones(2)), torch.zeros(2), **options)  # type: ignore[arg-type]
