"""The Kalman filter against the textbook's recursion."""

from __future__ import annotations

import pytest
import torch

from eigenstep_lab.extras import State, kalman_filter
from eigenstep_lab.extras.kalman import correct, predict
from inference.problems import random_spd


def textbook(mean, P, measurements, F, Q, C, R):
    states = []
    for y in measurements:
        mean, P = F @ mean, F @ P @ F.T + Q
        gain = P @ C.T @ torch.linalg.inv(C @ P @ C.T + R)
        mean, P = mean + gain @ (y - C @ mean), P - gain @ C @ P
        states.append(torch.cat([mean[:, None], P], 1))
    return states


def system(interval=1.0):
    """A car that is pushed at random and whose place is measured, at short intervals if wanted."""
    F = torch.eye(4) + interval * torch.diag(torch.ones(2), 2)
    return {
        "transition": F,
        "transition_noise": interval * 0.1 * random_spd(4),
        "observation": torch.eye(4)[:2],
        "observation_noise": random_spd(2) / interval,
    }


def as_matrices(states):
    return [torch.cat([state.mean[:, None], state.covariance()], 1) for state in states]


def test_the_exact_filter_is_the_textbook_filter():
    parts = system()
    start = State.from_covariance(torch.randn(4), random_spd(4))
    measurements = torch.randn(20, 2)
    found = kalman_filter(start, measurements, **parts)
    want = textbook(start.mean, start.covariance(), measurements, *parts.values())
    torch.testing.assert_close(as_matrices(found), want, atol=1e-9, rtol=1e-9)


def error_of_first_order(start, measurements, interval):
    """How far the first-order filter ends from the textbook's."""
    torch.manual_seed(1)
    parts = system(interval)
    states = kalman_filter(start, measurements, exact=False, **parts)
    want = textbook(start.mean, start.covariance(), measurements, *parts.values())
    return torch.dist(as_matrices(states)[-1], want[-1]).item()


def test_one_first_order_step_is_off_by_the_square_of_the_interval():
    start, measurement = State.from_covariance(torch.randn(4), random_spd(4)), torch.randn(1, 2)
    errors = [error_of_first_order(start, measurement, interval) for interval in (1e-3, 1e-4)]
    assert errors[0] / errors[1] == pytest.approx(100, rel=0.2)


def test_over_a_fixed_time_the_first_order_filter_is_off_by_the_interval():
    start = State.from_covariance(torch.randn(4), random_spd(4))
    errors = [error_of_first_order(start, torch.ones(n, 2), 1 / n) for n in (20, 80)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.3)


def test_substeps_make_the_first_order_correction_exact():
    state, parts = State.from_covariance(torch.randn(4), random_spd(4) / 30), system()
    arguments = torch.randn(2), parts["observation"], parts["observation_noise"]
    want = as_matrices([correct(state, *arguments)])[0]
    errors = [
        torch.dist(as_matrices([correct(state, *arguments, exact=False, substeps=k)])[0], want)
        for k in (20, 80)
    ]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.3)
    torch.testing.assert_close(
        as_matrices([correct(state, *arguments, substeps=3)])[0][:, 1:], want[:, 1:]
    )


def test_missing_measurements_are_predicted():
    parts, start = system(), State.from_covariance(torch.randn(4), random_spd(4))
    (found,) = kalman_filter(start, torch.full((1, 2), torch.nan), **parts)
    want = predict(start, parts["transition"], parts["transition_noise"])
    torch.testing.assert_close(as_matrices([found]), as_matrices([want]))


def test_a_precise_measurement_keeps_the_matrix_positive_definite():
    state = State.from_covariance(torch.zeros(4), 1e4 * torch.eye(4))
    for exact in (True, False):
        new = correct(state, torch.ones(2), torch.eye(4)[:2], 1e-8 * torch.eye(2), exact=exact)
        assert (new.precision.eigs > 0).all()
        if exact:
            torch.testing.assert_close(new.mean[:2], torch.ones(2))
