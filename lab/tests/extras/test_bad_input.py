"""Inverse problems and filters refuse what does not fit with a sentence, and never broadcast it."""

import pytest
import torch

from eigenstep import Diagonal, Full
from eigenstep_lab.extras import State, ensemble_inversion, kalman_filter

SINGLE = torch.float32


def invert(**changes):
    options = {
        "forward": lambda w: w,
        "data": torch.zeros(2),
        "noise": torch.eye(2),
        "prior_mean": torch.zeros(2),
        "prior_precision": 1.0,
        **changes,
    }
    return ensemble_inversion(**options)


def walk(**changes):
    options = {
        "state": State.from_covariance(torch.zeros(2), torch.eye(2)),
        "measurements": torch.zeros(3, 1),
        "transition": torch.eye(2),
        "transition_noise": torch.eye(2),
        "observation": torch.ones(1, 2),
        "observation_noise": torch.eye(1),
        **changes,
    }
    return kalman_filter(**options)


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("forward", [torch.sum, lambda w: w[:1], lambda w: w.repeat(2)])
def test_forward_models_must_return_the_shape_of_the_data(forward, vectorize):
    message = r"forward must return outputs of shape \(2,\), like data, got shape"
    with pytest.raises(ValueError, match=message):
        invert(forward=forward, vectorize=vectorize)


@pytest.mark.parametrize(
    ("run", "change", "message"),
    [
        (invert, {"forward": lambda w: w.to(torch.complex128)}, "what forward returns must be a"),
        (invert, {"forward": lambda w: w * torch.nan}, "forward model returned NaN"),
        (invert, {"data": torch.tensor([0.0, torch.inf])}, "data must be finite"),
        (invert, {"data": torch.zeros(3).double()}, r"data must have shape \(2,\)"),
        (invert, {"data": torch.zeros(2, dtype=SINGLE)}, "data must be torch.float64"),
        (invert, {"noise": torch.eye(2, dtype=SINGLE)}, "noise must be torch.float64"),
        (invert, {"noise": torch.ones(2)}, "noise must be square"),
        (invert, {"noise": -torch.eye(2).double()}, "positive definite"),
        (invert, {"prior_mean": torch.zeros(2, 2)}, "prior_mean must be a vector"),
        (invert, {"prior_mean": [0.0, 0.0]}, "prior_mean must be a real floating-point tensor"),
        (invert, {"prior_precision": 0.0}, "prior_precision must be"),
        (invert, {"members": 4}, "even number of at least 6"),
        (invert, {"lr": 2.0}, "lr must be"),
        (walk, {"measurements": torch.zeros(3)}, r"shape \(T, k\)"),
        (walk, {"measurements": torch.zeros(3, 1, dtype=torch.int64)}, "measurements must be a re"),
        (
            walk,
            {"measurements": torch.tensor([[0.0], [torch.inf]]).double()},
            "every measurement mu",
        ),
        (walk, {"measurements": torch.zeros(3, 2).double()}, "observation must have shape"),
        (walk, {"transition": torch.eye(3).double()}, r"transition must have shape \(2, 2\)"),
        (walk, {"transition_noise": torch.ones(2, 2).double().triu()}, "noise must be symmetric"),
        (walk, {"observation_noise": -torch.eye(1).double()}, "positive definite"),
        (walk, {"observation_noise": torch.full((1, 1), torch.nan)}, "noise must be finite"),
        (walk, {"substeps": 0}, "substeps must be"),
    ],
)
def test_what_does_not_fit_is_refused(run, change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        run(**change)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: State(torch.zeros(1), Full.identity(3)), "mean must have shape"),
        (lambda: State(torch.zeros(2), Diagonal.identity(2)), "precision must be Full"),
        (lambda: State.from_covariance(torch.zeros(1), torch.eye(2)), "mean must have shape"),
        (lambda: State.from_covariance(torch.zeros(2), torch.ones(2, 3)), "covariance must be squ"),
    ],
)
def test_states_that_do_not_fit(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()
