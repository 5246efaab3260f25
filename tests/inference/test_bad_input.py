"""Shapes, number formats and values that do not fit are refused with a sentence, never
broadcast.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eigenstep.inference import Gaussian, Supervised, elbo, fit_gaussian
from eigenstep_lab.problems.regressions import classifier, linear_regression, logistic_regression

X = torch.ones(4, 2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: linear_regression(X, torch.ones(4, 1), noise=1.0),
            ValueError,
            r"targets must be .* shape \(n,\)",
        ),
        (
            lambda: linear_regression(X, torch.ones(3), noise=1.0),
            ValueError,
            "one entry for each of 4",
        ),
        (
            lambda: linear_regression(X, torch.full((4,), torch.nan), noise=1.0),
            ValueError,
            "targets must be finite",
        ),
        (lambda: logistic_regression(X, torch.full((4,), 0.5)), ValueError, "0 or 1"),
        (
            lambda: logistic_regression(X[0], torch.ones(2)),
            ValueError,
            r"inputs must have shape \(n, d\)",
        ),
        (
            lambda: classifier(torch.nn.Linear(2, 3), X, torch.tensor([0, 1, 2, 3])),
            ValueError,
            "integers from 0 to 2",
        ),
        (
            lambda: Supervised(
                lambda w, x: x @ w, lambda f, y: (f - y) ** 2, X, torch.ones(4, 3), 1.0
            )(torch.ones(2)),
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


def density(w: Tensor) -> Tensor:
    return -0.5 * w.square().sum()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: fit_gaussian(lambda w: -w, torch.zeros(2)),
            ValueError,
            "log_joint must return one number",
        ),
        (
            lambda: fit_gaussian(density, torch.zeros(2), curvature="fisher"),
            ValueError,
            "curvature must be one of hessian, .* or a function, got 'fisher'",
        ),
        (
            lambda: fit_gaussian(density, torch.zeros(2), curvature=3),
            TypeError,
            "curvature must be .* got int",
        ),
        (
            lambda: fit_gaussian(density, torch.zeros(2), lr=lambda t: "x", samples=4),
            TypeError,
            r"lr\(0\) must be",
        ),
        (
            lambda: fit_gaussian(density, torch.zeros(2), curvature=lambda w: torch.eye(2)),
            TypeError,
            "must return Dense or OuterProducts",
        ),
        (lambda: elbo(density, torch.zeros(2)), TypeError, "q must be a Gaussian"),
        (
            lambda: elbo(3, Gaussian.start(torch.zeros(2))),
            TypeError,
            "log_joint must be a function",
        ),
    ],
)
def test_fits(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
