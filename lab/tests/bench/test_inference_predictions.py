"""Predictions of many draws against their formulas."""

from __future__ import annotations

import pytest
import torch

from eigenstep_lab.bench.inference_predictions import (
    calibration_error,
    class_probabilities,
    log_predictive,
    predictive,
)
from eigenstep_lab.problems.regressions import logistic_regression
from inference.problems import small_logistic

pytestmark = pytest.mark.usefixtures("float64")


def test_predictive() -> None:
    inputs, targets = small_logistic()
    model = logistic_regression(inputs, targets)
    points = torch.randn(7, 3)
    chance = (inputs @ points.T).sigmoid().mean(1)
    torch.testing.assert_close(class_probabilities(predictive(model, points, inputs))[:, 1], chance)
    want = torch.where(targets == 1, chance, 1 - chance).log()
    torch.testing.assert_close(log_predictive(model, points, inputs, targets), want)


def test_calibration_error() -> None:
    """Always 80 % sure of the first class, and right half of the time; then right four times of
    five.
    """
    probabilities = torch.tensor([[0.8, 0.2]]).repeat(10, 1)
    assert calibration_error(probabilities, torch.arange(10) % 2) == pytest.approx(0.3)
    assert calibration_error(probabilities, (torch.arange(10) % 5 == 0).long()) == pytest.approx(
        0.0
    )
