"""Inverse problems and filters refuse what does not fit with a sentence, and never broadcast it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eigenstep import Diagonal, Full
from eigenstep_lab.extras import State, ensemble_inversion, kalman_filter

DOUBLE = torch.float64


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
@pytest.mark.parametrize(
    "forward", [lambda w: w.sum(), lambda w: w[:1], lambda w: w[None], lambda w: w.repeat(2)]
)
def test_forward_models_must_return_the_shape_of_the_data(
    forward: Callable[[Tensor], Tensor], vectorize: bool
) -> None:
    with pytest.raises(
        ValueError, match=r"forward must return outputs of shape \(2,\), like data, got shape"
    ):
        invert(forward, vectorize=vectorize)


@pytest.mark.parametrize(
    ("forward", "changes", "error", "message"),
    [
        (
            lambda w: w.to(torch.complex128),
            {},
            TypeError,
            "what forward returns must be a real floating-point tensor",
        ),
        (
            lambda w: (w > 0).long(),
            {},
            TypeError,
            "what forward returns must be a real floating-point tensor",
        ),
        (lambda w: w * torch.nan, {}, ValueError, "forward model returned NaN"),
        (lambda w: w, {"data": torch.tensor([0.0, torch.inf])}, ValueError, "data must be finite"),
        (
            lambda w: w,
            {"data": torch.zeros(2, 1, dtype=DOUBLE)},
            ValueError,
            r"data must have shape \(2,\)",
        ),
        (
            lambda w: w,
            {"data": torch.zeros(2, dtype=torch.float32)},
            TypeError,
            "data must be torch.float64",
        ),
        (
            lambda w: w,
            {"noise": torch.eye(2, dtype=torch.float32)},
            TypeError,
            "noise must be torch.float64",
        ),
        (lambda w: w, {"noise": torch.eye(3, dtype=DOUBLE)}, ValueError, "to fit noise"),
        (lambda w: w, {"noise": torch.ones(2, dtype=DOUBLE)}, ValueError, "noise must be square"),
        (lambda w: w, {"prior_mean": torch.zeros(2, 2)}, ValueError, "prior_mean must be a vector"),
        (
            lambda w: w,
            {"prior_mean": [0.0, 0.0]},
            TypeError,
            "prior_mean must be a real floating-point tensor",
        ),
        (lambda w: w, {"prior_precision": 0.0}, ValueError, "prior_precision must be"),
        (lambda w: w, {"prior_precision": float("nan")}, ValueError, "prior_precision must be"),
        (lambda w: w, {"members": 7}, ValueError, "even number"),
        (lambda w: w, {"lr": 2.0}, ValueError, "lr must be"),
    ],
)
def test_inverse_problems(
    forward: Callable[[Tensor], Tensor],
    changes: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        invert(forward, **changes)


def walk(measurements: Tensor) -> object:
    start = State.from_covariance(torch.zeros(2), torch.eye(2))
    noises = {"transition_noise": torch.eye(2), "observation_noise": torch.eye(1)}
    return kalman_filter(
        start, measurements, transition=torch.eye(2), observation=torch.ones(1, 2), **noises
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: walk(torch.zeros(3)), ValueError, r"shape \(T, k\)"),
        (
            lambda: walk(torch.zeros(3, 1, dtype=torch.int64)),
            TypeError,
            "measurements must be a real",
        ),
        (
            lambda: walk(torch.tensor([[0.0], [torch.inf]])),
            ValueError,
            "every measurement must be finite",
        ),
        (
            lambda: walk(torch.zeros(3, 1, dtype=torch.float32)),
            TypeError,
            "measurement must be torch.float64",
        ),
        (lambda: walk(torch.zeros(3, 2)), ValueError, "observation must have shape"),
        (
            lambda: State(torch.zeros(2), Full.identity(3, dtype=DOUBLE)),
            ValueError,
            "mean must have shape",
        ),
        (
            lambda: State(torch.zeros(1), Full.identity(3, dtype=DOUBLE)),
            ValueError,
            "mean must have shape",
        ),
        (lambda: State(torch.zeros(2), Diagonal.identity(2)), TypeError, "precision must be Full"),
        (
            lambda: State.from_covariance(torch.zeros(1), torch.eye(2)),
            ValueError,
            "mean must have shape",
        ),
        (
            lambda: State.from_covariance(torch.zeros(2), torch.ones(2, 3)),
            ValueError,
            "covariance must be square",
        ),
    ],
)
def test_filters(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
