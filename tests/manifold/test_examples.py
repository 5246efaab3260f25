"""The examples on real data run, and say what their pages say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.testing import assert_close

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    return __import__(name)


def test_covariance(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("spd_covariance", monkeypatch)
    clean = example.wines()
    spoiled = example.with_outliers(clean)
    truth = torch.cov(clean.T, correction=0)
    gaussian = example.fit_gaussian(spoiled)
    assert_close(gaussian.S.dense(), torch.cov(spoiled.T, correction=0), rtol=1e-4, atol=1e-4)
    assert_close(gaussian.x[0], spoiled.mean(0), rtol=1e-4, atol=1e-4)
    student = example.fit_student(spoiled)
    assert student.success, student.message
    assert example.distance(truth, student.S.dense()) < 0.3 * example.distance(
        truth, gaussian.S.dense()
    )


def test_tyler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pymanopt")
    example = load("spd_tyler", monkeypatch)
    data = example.tumors()
    ours, theirs = (method(data)[0] for method in (example.fit, example.fixed_point))
    assert_close(ours / ours.trace(), theirs / theirs.trace(), rtol=1e-4, atol=1e-6)


def test_graphical_lasso(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.covariance import graphical_lasso

    example = load("spd_graphical_lasso", monkeypatch)
    C = example.covariances()[0][:8, :8]
    ours, _ = example.fit(C, 0.1)
    theirs = torch.tensor(graphical_lasso(C.numpy(), 0.1, tol=1e-8)[1])
    values = [example.objective(P, C, 0.1).item() for P in (ours, theirs)]
    assert values[0] == pytest.approx(values[1], abs=0.01)
    assert values[0] >= values[1] - 1e-6  # theirs is exact


def test_metric_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("spd_metric_learning", monkeypatch)
    errors = {name: example.error(learner) for name, learner in list(example.LEARNERS.items())[:3]}
    assert errors["ours, minimize_spd"] <= errors["no learning"]
    assert errors["ours, minimize_spd"] < 0.06
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 4, generator=generator)
    labels = torch.arange(30) % 3
    looped = example.learn_in_a_loop(x, labels, steps=3)
    assert (torch.linalg.eigvalsh(looped) > 0).all()
