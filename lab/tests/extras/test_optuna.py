"""The sampler in optuna's studies."""

from __future__ import annotations

import math

import numpy as np
import pytest

optuna = pytest.importorskip("optuna")

from eigenstep_lab.extras.optuna_sampler import Axis, SpectralSampler  # noqa: E402


@pytest.fixture(autouse=True)
def _quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def objective(trial):
    x = trial.suggest_float("x", -5, 5)
    rate = trial.suggest_float("rate", 1e-5, 1.0, log=True)
    layers = trial.suggest_int("layers", 1, 9)
    width = trial.suggest_int("width", 8, 64, step=8)
    kind = trial.suggest_categorical("kind", ["a", "b"])
    loss = (
        (x - 1) ** 2
        + (math.log10(rate) + 2) ** 2
        + 0.2 * (layers - 4) ** 2
        + ((width - 40) / 16) ** 2
    )
    return loss + (0.1 if kind == "a" else 0.0)


def best(sampler, trials=150):
    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=trials)
    return float(study.best_value)


def test_it_beats_random_sampling():
    ours = np.median([best(SpectralSampler(seed=seed)) for seed in range(3)])
    chance = np.median([best(optuna.samplers.RandomSampler(seed=seed)) for seed in range(3)])
    assert ours < 0.5 * chance


def test_the_same_seed_gives_the_same_trials():
    assert best(SpectralSampler(seed=5), 40) == best(SpectralSampler(seed=5), 40)


@pytest.mark.parametrize("startup", [1, 4])
def test_it_starts_in_the_middle_or_at_the_best_of_several(startup):
    study = optuna.create_study(sampler=SpectralSampler(seed=1, startup=startup))
    study.optimize(objective, n_trials=startup + 1)
    search = study.sampler._search
    assert search is not None
    names, start = list(study.sampler._axes), np.asarray(search.mean)
    best = min(study.trials[:startup], key=lambda trial: trial.value).params
    # Logarithms of rates from 1e-5 to 1, nine numbers of layers, eight widths; the first mean of
    # categories is any.
    middle = {"x": 0.0, "rate": 0.5 * math.log(1e-5), "layers": 4.0, "width": 3.0}
    for name, axis in study.sampler._axes.items():
        if name != "kind":
            want = middle[name] if startup == 1 else axis.encode(best[name])
            assert start[names.index(name)] == pytest.approx(want)


def test_maximization_failures_pruning_and_threads():
    def fun(trial):
        x, y = trial.suggest_float("x", -5, 5), trial.suggest_float("y", -5, 5)
        if trial.number % 7 == 3:
            raise optuna.TrialPruned
        if trial.number % 11 == 5:
            raise RuntimeError("lost")
        return -((x - 2) ** 2) - (y + 1) ** 2

    study = optuna.create_study(sampler=SpectralSampler(seed=0), direction="maximize")
    study.optimize(fun, n_trials=150, n_jobs=3, catch=(RuntimeError,))
    assert study.best_value > -0.02


@pytest.mark.parametrize(
    "distribution",
    [
        optuna.distributions.FloatDistribution(-1, 3),
        optuna.distributions.FloatDistribution(0, 1, step=0.25),
        optuna.distributions.FloatDistribution(1e-4, 10, log=True),
        optuna.distributions.IntDistribution(3, 11, step=2),
        optuna.distributions.IntDistribution(1, 100, log=True),
    ],
)
def test_axes_stay_in_their_distribution(distribution):
    axis = Axis(distribution)
    coordinates = np.linspace(axis.lower, axis.upper, 41)
    values = [axis.decode(np.rint(u) if axis.whole else u) for u in coordinates]
    assert min(values) == pytest.approx(distribution.low)
    assert max(values) == pytest.approx(distribution.high)
    for value in values:
        assert distribution._contains(distribution.to_internal_repr(value))
        assert axis.decode(axis.encode(value)) == pytest.approx(value)


def test_categories_are_searched_together_with_numbers():
    def fun(trial):
        kinds = [trial.suggest_categorical(f"kind{i}", ["a", None, 3, "d", 0.5]) for i in range(4)]
        return (trial.suggest_float("x", -5, 5) - 1) ** 2 + sum(kind != 3 for kind in kinds)

    def found(sampler):
        study = optuna.create_study(sampler=sampler)
        study.optimize(fun, n_trials=200)
        return float(study.best_value)

    assert np.median([found(SpectralSampler(seed=seed)) for seed in range(3)]) < 0.1
    only = optuna.create_study(sampler=SpectralSampler(seed=0))
    only.optimize(
        lambda trial: float(trial.suggest_categorical("kind", ["a", "b"]) == "a"), n_trials=20
    )
    assert only.best_value == 0
