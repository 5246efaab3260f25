"""Choices that the paper leaves open, as the figures make them."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from eigenstep.core.curvature import Dense
from eigenstep.core.step import Turning, bounded, moore_penrose
from eigenstep.core.update import update
from eigenstep_lab.baselines import van_loan
from eigenstep_lab.console import UserError
from eigenstep_lab.figures import (
    exact_vs_truncated,
    full_matrix,
    kronecker,
    low_precision,
    spd,
    training,
)
from eigenstep_lab.figures.matching import random_covariances
from eigenstep_lab.models.hiera import Hiera

GENERATOR = torch.Generator


def keywords(step):
    """All keywords that a chain of partial functions ends with."""
    return {} if not isinstance(step, partial) else {**keywords(step.func), **step.keywords}


def test_the_papers_schemes_do_not_mend_their_bases():
    start = random_covariances(4, 2, 3.0, GENERATOR().manual_seed(0))
    found = full_matrix.schemes(start, 0.01, 0.1) | {
        f"kronecker: {name}": scheme
        for name, scheme in kronecker.schemes([start, start], 0.01, 0.1).items()
    }
    found |= {f"spd: {name}": scheme for name, scheme in spd.schemes(start).items()}
    for name, scheme in found.items():
        if "paper" in name:
            assert keywords(scheme.step)["turning"].mend is False, name
        elif "ours" in name:
            assert keywords(scheme.step)["turning"].mend is True, name


def leading_share(matrix):
    """Share of a matrix, in squares, that is its nearest product of a 3 × 3 and a 4 × 4 matrix."""
    blocks = matrix.reshape(3, 4, 3, 4).transpose(1, 2).reshape(9, 16)
    values = torch.linalg.svdvals(blocks).square()
    return float(values[0] / values.sum())


def test_kronecker_shows_both_families_of_covariances(monkeypatch):
    """One without structure, as the paper's words suggest, and one of which 70 % are a Kronecker
    product.
    """
    seen, match = [], kronecker.match

    def noted(schemes, start, covariance, settings, generator):
        seen.append(covariance)
        return match(schemes, start, covariance, settings, generator)

    monkeypatch.setattr(kronecker, "match", noted)
    settings = replace(kronecker.QUICK, sizes=(3, 4), seeds=2, steps=3, points=2)
    found = kronecker.run(settings, seed=0, device=torch.device("cpu"))
    plain, mixed = seen
    structured = (mixed - 0.3 * plain) / 0.7
    for seed in range(settings.seeds):
        assert leading_share(structured[seed]) == pytest.approx(1)
        assert leading_share(plain[seed]) < leading_share(mixed[seed]) < 1
    families = {"no structure", "70 % structure"}
    assert {panel.title.split(", ")[1] for panel in found.panels} == families
    for family in families:
        assert sum(family in verdict.quantity for verdict in found.verdicts) == 12
        assert any(family in table.title for table in found.tables)


def test_projection_seeks_another_matrix_than_schemes_that_learn_factors():
    """Without noise each scheme stays where the table says that it comes to rest, and moves away
    from the other's.
    """
    generator, sizes = GENERATOR().manual_seed(3), (3, 4)
    covariance = random_covariances(12, 2, 100.0, generator)
    likeliest, nearest = (
        kronecker.likeliest(covariance, sizes),
        van_loan.nearest_kronecker(covariance, sizes),
    )
    whole = Dense(covariance, semidefinite=True)

    def moved(before, after):
        return float((after.dense() - before.dense()).norm() / before.dense().norm())

    for rotation in (partial(moore_penrose, gap=1e-6), bounded):
        step = partial(update, curvature=whole, lr=0.01, turning=Turning(rotation=rotation))
        assert moved(likeliest, step(likeliest)) < 1e-9 < 1e-4 < moved(nearest, step(nearest))

    def project(S):
        return van_loan.nearest_kronecker(0.99 * S.dense() + 0.01 * covariance, sizes)

    assert moved(nearest, project(nearest)) < 1e-9 < 1e-4 < moved(likeliest, project(likeliest))
    (row,) = kronecker.sought({0.5: covariance}, sizes).rows
    assert row[0] == "50%"
    assert float(row[1]) >= 1 >= float(row[3])


def test_the_divergence_is_torchs():
    generator = GENERATOR().manual_seed(4)
    estimate, truth = (random_covariances(3, 2, 10.0, generator) for _ in range(2))
    zero = torch.zeros(2, 3, dtype=torch.float64)
    normal = torch.distributions.MultivariateNormal
    wanted = torch.distributions.kl_divergence(normal(zero, truth), normal(zero, estimate))
    torch.testing.assert_close(kronecker.divergence(estimate, truth), wanted)


def test_nothing_but_the_cayley_map_is_switched():
    schemes = exact_vs_truncated.SCHEMES
    for family in ("paper", "ours"):
        assert schemes[f"{family}, exact"].options == {"map": "cayley"}
    assert schemes["paper, truncated"].options == {}  # the recipe's own
    assert schemes["ours, truncated"].options == {"map": "truncated_cayley"}
    table = exact_vs_truncated.operations((10, 100))
    exact, truncated = (
        table.columns.index(f"steps in sequence, {kind}") for kind in ("exact", "truncated")
    )
    assert [row[exact] for row in table.rows] == ["30", "300"]
    assert [row[truncated] for row in table.rows] == ["4", "4"]


def test_roots_other_than_two_are_clipped():
    schemes = low_precision.SCHEMES | low_precision.BESIDE
    for root in (1, 4):
        assert "clip" not in schemes[f"paper, p = {root}"].options  # the recipe clips at 1
        assert schemes[f"ours, p = {root}"].options["clip"] == 1.0
    for settings in (low_precision.QUICK, low_precision.FULL):
        assert len(settings.lrs) >= 4
    # Shorter ones choose rates that diverge later
    assert low_precision.QUICK.tuning_steps == low_precision.QUICK.steps


@pytest.mark.parametrize(("best", "tried"), [(3e-3, 4), (1e-1, 6), (1e-4, 7), (0.02, 5)])
def test_learning_rates_are_sought_until_the_best_is_inside(best, tried):
    losses = {}

    def loss(lr):
        losses[lr] = abs(math.log(lr / best))
        return losses[lr]

    chosen = training.choose_lr((1e-3, 3e-3, 1e-2, 3e-2), loss)
    assert chosen == min(losses, key=losses.__getitem__)
    assert min(losses) < chosen < max(losses)
    assert len(losses) == tried


def test_a_grid_that_never_ends_is_given_up():
    assert training.choose_lr((1.0, 2.0), lambda lr: -lr) == 2.0 ** (1 + training.MOST_EXTENSIONS)


def test_without_its_pictures_a_hiera_stays_a_hiera(monkeypatch):
    monkeypatch.setattr(training, "find", lambda name: None)
    task = training.load_task("cifar-10-hiera", torch.device("cpu"))
    assert task.name == "digits-hiera"
    assert isinstance(task.model(0).model, Hiera)
    assert training.load_task("fashion-mnist", torch.device("cpu")).name == "digits"


SCHEMES = {
    "ours": training.Scheme("spectral", {}),
    "theirs": training.Scheme("adamw", {"eps": 1e-3}),
}


@pytest.fixture
def trainings(tmp_path, monkeypatch):
    """Train some schemes, keeping runs in `path`; `calls` lists what was trained."""
    task = training.load_task("digits", torch.device("cpu"))
    train = training._train

    def counted(*args):
        run.calls.append(args[1].optimizer)
        return train(*args)

    def run(*names, steps=2, seeds=2, lrs=(1e-3,)):
        run.calls = []
        schemes = {name: SCHEMES[name] for name in names}
        rates = dict.fromkeys(names, lrs)
        kept = {"seeds": range(seeds), "trainings": run.path}
        return training.train_all(task, schemes, rates, steps=steps, **kept)[1]

    run.path = tmp_path / "trainings" / "some.jsonl"
    monkeypatch.setattr(training, "TEST_BATCHES", 1)
    monkeypatch.setattr(training, "_train", counted)
    return run


def test_trainings_are_kept(trainings):
    first = trainings("ours")
    assert trainings.calls == ["spectral"] * 2
    assert trainings("ours", "theirs")["ours"] == first["ours"]
    assert trainings.calls == ["adamw"] * 2
    trainings("ours", seeds=3)
    assert len(trainings.calls) == 1  # one seed more
    trainings("ours", steps=3)
    assert len(trainings.calls) == 2  # with other settings
    for searched in (True, False):
        trainings("ours", lrs=(1e-4, 1e-3, 1e-2))
        assert bool(trainings.calls) is searched  # those that choose learning rates


def test_trainings_after_a_kill_another_behavior_and_damage(trainings, monkeypatch):
    trainings("ours", "theirs")
    whole = trainings.path.read_text()
    # Killed while the last run was written
    trainings.path.write_text(whole[: whole.rindex("losses") + 20])
    trainings("ours", "theirs")
    assert trainings.calls == ["adamw"]
    changed = {"spectral": "other", "adamw": ""}
    monkeypatch.setattr(training, "behavior_of", lambda name, _: changed[name])
    trainings("ours", "theirs")
    assert trainings.calls == ["spectral"] * 2  # rivals do not depend on our code
    junk = trainings.path.read_text().replace('"losses": [', '"losses": ["junk", ')
    trainings.path.write_text(junk)
    with pytest.raises(UserError, match=r"some\.jsonl holds something that is no training run"):
        trainings("theirs")
