"""Shapes, number formats and values that do not fit are refused with a sentence, never broadcast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eigenstep import Diagonal, Full
from eigenstep.inference import (
    Gaussian,
    State,
    Supervised,
    elbo,
    ensemble_inversion,
    fit_gaussian,
    kalman_filter,
)
from eigenstep_lab.problems.regressions import classifier, linear_regression, logistic_regression

DOUBLE = torch.float64
X = torch.ones(4, 2, dtype=DOUBLE)


def invert(forward: object, **changes: object) -> object:
    given = {
        "data": torch.zeros(2),
        "noise": torch.eye(2),
        "prior_mean": torch.zeros(2),
        "prior_precision": 1.0,
        **changes,
    }
    return ensemble_inversion(forward, **given)


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("forward", [lambda w: w.sum(), lambda w: w[:1], lambda w: w[None], lambda w: w.repeat(2)])
def test_forward_models_must_return_the_shape_of_the_data(forward: Callable[[Tensor], Tensor], vectorize: bool) -> None:
    with pytest.raises(ValueError, match=r"forward must return outputs of shape \(2,\), like data, got shape"):
        invert(forward, vectorize=vectorize)


@pytest.mark.parametrize(
    ("forward", "changes", "error", "message"),
    [
        (lambda w: w.to(torch.complex128), {}, TypeError, "what forward returns must be a real floating-point tensor"),
        (lambda w: (w > 0).long(), {}, TypeError, "what forward returns must be a real floating-point tensor"),
        (lambda w: w * torch.nan, {}, ValueError, "forward model returned NaN"),
        (lambda w: w, {"data": torch.tensor([0.0, torch.inf])}, ValueError, "data must be finite"),
        (lambda w: w, {"data": torch.zeros(2, 1, dtype=DOUBLE)}, ValueError, r"data must have shape \(2,\)"),
        (lambda w: w, {"data": torch.zeros(2, dtype=torch.float32)}, TypeError, "data must be torch.float64"),
        (lambda w: w, {"noise": torch.eye(2, dtype=torch.float32)}, TypeError, "noise must be torch.float64"),
        (lambda w: w, {"noise": torch.eye(3, dtype=DOUBLE)}, ValueError, "to fit noise"),
        (lambda w: w, {"noise": torch.ones(2, dtype=DOUBLE)}, ValueError, "noise must be square"),
        (lambda w: w, {"prior_mean": torch.zeros(2, 2)}, ValueError, "prior_mean must be a vector"),
        (lambda w: w, {"prior_mean": [0.0, 0.0]}, TypeError, "prior_mean must be a real floating-point tensor"),
        (lambda w: w, {"prior_precision": 0.0}, ValueError, "prior_precision must be"),
        (lambda w: w, {"prior_precision": float("nan")}, ValueError, "prior_precision must be"),
        (lambda w: w, {"members": 7}, ValueError, "even number"),
        (lambda w: w, {"lr": 2.0}, ValueError, "lr must be"),
    ],
)
def test_inverse_problems(
    forward: Callable[[Tensor], Tensor], changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        invert(forward, **changes)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: linear_regression(X, torch.ones(4, 1), noise=1.0), ValueError, r"targets must be .* shape \(n,\)"),
        (lambda: linear_regression(X, torch.ones(4, 3), noise=1.0), ValueError, r"targets must be .* shape \(n,\)"),
        (lambda: linear_regression(X, 1.0, noise=1.0), ValueError, r"targets must be .* got float"),
        (lambda: linear_regression(X, torch.ones(3), noise=1.0), ValueError, "one entry for each of 4"),
        (lambda: linear_regression(X, torch.full((4,), torch.nan), noise=1.0), ValueError, "targets must be finite"),
        (lambda: logistic_regression(X, torch.ones(4, 1)), ValueError, r"targets must be .* shape \(n,\)"),
        (lambda: logistic_regression(X, torch.full((4,), 0.5)), ValueError, "0 or 1"),
        (lambda: logistic_regression(X[0], torch.ones(2)), ValueError, r"inputs must have shape \(n, d\)"),
        (
            lambda: classifier(torch.nn.Linear(2, 3), X, torch.ones(4, 1, dtype=torch.int64)),
            ValueError,
            r"targets must be .* shape \(n,\)",
        ),
        (
            lambda: Supervised(lambda w, x: x @ w, lambda f, y: (f - y) ** 2, X, torch.ones(4, 3), 1.0)(torch.ones(2)),
            ValueError,
            r"loss must return one number for each example, got shape \(3,\)",
        ),
        (
            lambda: Supervised(lambda w, x: x @ w, 3, X, torch.ones(4), 1.0),
            TypeError,
            "loss must be a function",
        ),
    ],
)
def test_models(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_densities_take_stacks_of_parameters() -> None:
    q = Gaussian.start(torch.zeros(3))
    for shape in [(3,), (2, 1), (2, 3, 1), ()]:
        with pytest.raises(ValueError, match=r"parameters must have shape \(K, 3\)"):
            q.log_prob(torch.zeros(shape))
    with pytest.raises(TypeError, match=r"parameters must be torch\.float64"):
        q.log_prob(torch.zeros(2, 3, dtype=torch.float32))
    blocks = Gaussian.start({"a": torch.zeros(2), "b": torch.zeros(1)})
    with pytest.raises(ValueError, match="as many entries along the first axis"):
        blocks.log_prob({"a": torch.zeros(4, 2), "b": torch.zeros(1, 1)})


def walk(measurements: Tensor) -> object:
    start = State.from_covariance(torch.zeros(2), torch.eye(2))
    noises = {"transition_noise": torch.eye(2), "observation_noise": torch.eye(1)}
    return kalman_filter(start, measurements, transition=torch.eye(2), observation=torch.ones(1, 2), **noises)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: walk(torch.zeros(3)), ValueError, r"shape \(T, k\)"),
        (lambda: walk(torch.zeros(3, 1, dtype=torch.int64)), TypeError, "measurements must be a real"),
        (lambda: walk(torch.tensor([[0.0], [torch.inf]])), ValueError, "every measurement must be finite"),
        (lambda: walk(torch.zeros(3, 1, dtype=torch.float32)), TypeError, "measurement must be torch.float64"),
        (lambda: walk(torch.zeros(3, 2)), ValueError, "observation must have shape"),
        (lambda: State(torch.zeros(2), Full.identity(3, dtype=DOUBLE)), ValueError, "mean must have shape"),
        (lambda: State(torch.zeros(1), Full.identity(3, dtype=DOUBLE)), ValueError, "mean must have shape"),
        (lambda: State(torch.zeros(2), Diagonal.identity(2)), TypeError, "precision must be Full"),
        (lambda: State.from_covariance(torch.zeros(1), torch.eye(2)), ValueError, "mean must have shape"),
        (lambda: State.from_covariance(torch.zeros(2), torch.ones(2, 3)), ValueError, "covariance must be square"),
    ],
)
def test_filters(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def density(w: Tensor) -> Tensor:
    return -0.5 * w.square().sum()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fit_gaussian(lambda w: -w, torch.zeros(2)), ValueError, "log_joint must return one number"),
        (lambda: fit_gaussian(density, torch.full((2,), torch.nan)), ValueError, "mean must be finite"),
        (lambda: fit_gaussian(density, torch.zeros(2, dtype=torch.int64)), TypeError, "mean must be a real"),
        (lambda: fit_gaussian(density, torch.zeros(2), Full.identity(3)), ValueError, "precision must act on"),
        (
            lambda: fit_gaussian(density, torch.zeros(2), curvature="fisher"),
            ValueError,
            "curvature must be one of hessian, .* or a function, got 'fisher'",
        ),
        (lambda: fit_gaussian(density, torch.zeros(2), curvature=3), TypeError, "curvature must be .* got int"),
        (lambda: fit_gaussian(density, torch.zeros(2), lr=lambda t: "x", samples=4), TypeError, r"lr\(0\) must be"),
        (lambda: elbo(density, torch.zeros(2)), TypeError, "q must be a Gaussian"),
        (lambda: elbo(3, Gaussian.start(torch.zeros(2))), TypeError, "log_joint must be a function"),
    ],
)
def test_fits(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
