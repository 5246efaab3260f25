"""Choices that the paper leaves open, as the figures make them."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from eigenstep.core.curvature import Dense
from eigenstep.core.matrices import Full
from eigenstep.core.step import Turning, bounded, cayley, moore_penrose
from eigenstep.core.update import update
from eigenstep_lab.baselines import van_loan
from eigenstep_lab.baselines.nes import (
    CholeskyNES,
    ExponentialNES,
    PlainNES,
    Population,
    log_density,
)
from eigenstep_lab.console import UserError
from eigenstep_lab.figures import (
    exact_vs_truncated,
    full_matrix,
    gradient_free,
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
    strategies = gradient_free.strategies(torch.zeros(1, 2, dtype=torch.float64))
    assert [strategies[name].mended for name in ("paper", "ours")] == [False, True]


def test_full_matrix_shows_what_the_gap_does():
    start = random_covariances(4, 2, 3.0, GENERATOR().manual_seed(0))
    found = full_matrix.schemes(start, 0.01, full_matrix.QUICK.gap)
    gaps = {
        name: keywords(scheme.step)["turning"].rotation.keywords["gap"]
        for name, scheme in found.items()
        if "paper" in name
    }
    assert gaps == {
        "paper, exact maps": 0.01,
        "paper, truncated maps": 0.01,
        "paper, exact maps, gap 1e-06": 1e-6,
        "paper, truncated maps, gap 1e-06": 1e-6,
    }


def test_each_problem_has_its_own_gap_and_learning_rate():
    """Truncated maps keep up on the full matrix with a gap of 1 % and rates up to 0.002; long runs
    take the same.
    """
    for settings in (full_matrix.QUICK, full_matrix.FULL):
        assert (settings.gap, settings.lr) == (0.01, 0.001)
    for settings in (kronecker.QUICK, kronecker.FULL):
        assert settings.gap == 1e-6


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
    for family in ("paper", "ours"):
        exact, truncated = (
            exact_vs_truncated.SCHEMES[f"{family}, {kind}"] for kind in ("exact", "truncated")
        )
        assert exact.options == {"maps": cayley}
        assert truncated.options == {"maps": "truncated"}
    table = exact_vs_truncated.operations((10, 100))
    exact, truncated = (
        table.columns.index(f"steps in sequence, {kind}") for kind in ("exact", "truncated")
    )
    assert [row[exact] for row in table.rows] == ["30", "300"]
    assert [row[truncated] for row in table.rows] == ["4", "4"]


def test_quick_and_full_minimize_with_the_same_steps():
    """With larger ones no scheme is near another, and quick runs would contradict the full ones."""
    for name in ("steps", "lr_nearness", "lr_log_det"):
        assert getattr(spd.QUICK, name) == getattr(spd.FULL, name)


def test_the_paper_clips_where_others_graft():
    options = {
        name: scheme.options
        for name, scheme in (low_precision.SCHEMES | low_precision.BESIDE).items()
    }
    for root in (1, 4):
        assert "grafting" not in options[f"paper, p = {root}"]  # the recipe clips at 1
        assert options[f"paper, p = {root}, grafted"]["grafting"] == "adam"
        assert options[f"ours, p = {root}"]["grafting"] == "adam"
    assert options["paper, p = 2, all every 2"]["eigenvalues_wait"]
    assert {options[f"paper, p = {root}"]["basis_lr"] for root in (1, 2, 4)} == {1.9}
    assert low_precision.REFERENCES["paper"].options["basis_lr"] == 1.9
    assert options["paper, p = 1, β̄ = 0.5"]["basis_lr"] == 0.5
    for settings in (low_precision.QUICK, low_precision.FULL):
        assert len(settings.lrs) >= 4
    # Shorter ones choose rates that diverge later
    assert low_precision.QUICK.tuning_steps == low_precision.QUICK.steps
    assert low_precision.FULL.steps == 1000
    assert low_precision.FULL.seeds_beside > 1


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


def gaussians(kind, mean, covariance):
    root = torch.linalg.cholesky(covariance)
    if kind is gradient_free.SpectralNES:
        return kind(mean, Full.from_dense(torch.linalg.inv(covariance)), moore_penrose)
    if kind is CholeskyNES:
        return kind(mean, torch.linalg.cholesky(torch.linalg.inv(covariance)))
    return kind(mean, covariance if kind is PlainNES else root)


@pytest.mark.parametrize("kind", [PlainNES, ExponentialNES, CholeskyNES, gradient_free.SpectralNES])
def test_densities_are_those_of_a_gaussian(kind):
    generator = GENERATOR().manual_seed(0)
    covariance = random_covariances(3, 2, 5.0, generator)
    mean = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    strategy, z = (
        gaussians(kind, mean, covariance),
        torch.randn(7, 2, 3, generator=generator, dtype=torch.float64),
    )
    points = strategy.sample(z)
    torch.testing.assert_close(strategy.whiten(points), z)
    wanted = torch.distributions.MultivariateNormal(mean, covariance).log_prob(points)
    found = log_density(strategy, points)
    torch.testing.assert_close(found - found[0], wanted - wanted[0])
    shift = math.log(2 * math.pi) * 3 / 2
    torch.testing.assert_close(found - shift, wanted)


def test_mixed_populations_are_distributed_as_the_new_gaussian():
    """Mean and covariance of many, though most samples are those of before."""
    searches, generator = 4000, GENERATOR().manual_seed(1)
    eye = torch.eye(2, dtype=torch.float64).expand(searches, 2, 2)
    before = ExponentialNES(torch.zeros(searches, 2, dtype=torch.float64), eye)
    after = ExponentialNES(
        before.mean + torch.tensor([0.4, 0.0]), eye * torch.tensor([1.2, 0.8])[:, None]
    )

    def normal():
        return torch.randn(10, searches, 2, generator=generator, dtype=torch.float64)

    first = Population.first(before, normal)
    mixed = first.mixed(after, 0.1, normal, generator)
    assert 0.1 <= float(mixed.new.double().mean()) < 0.5
    assert torch.equal(mixed.points[~mixed.new], first.points[~mixed.new])
    flat = mixed.points.reshape(-1, 2)
    torch.testing.assert_close(
        flat.mean(0), torch.tensor([0.4, 0.0], dtype=torch.float64), atol=0.02, rtol=0
    )
    torch.testing.assert_close(
        flat.T.cov(), torch.diag(torch.tensor([1.44, 0.64])).double(), atol=0.03, rtol=0
    )
    assert first.mixed(after, 1.0, normal, generator).new.all()


def test_plain_nes_follows_the_natural_gradient_and_stays_positive_definite():
    generator = GENERATOR().manual_seed(2)
    covariance = random_covariances(3, 2, 5.0, generator)
    strategy = PlainNES(torch.zeros(2, 3, dtype=torch.float64), covariance)
    z = torch.randn(6, 2, 3, generator=generator, dtype=torch.float64)
    utilities = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    deviations = strategy.sample(z)
    wanted = covariance + 1e-3 * torch.einsum(
        "kb,kbij->bij", utilities, deviations[..., :, None] * deviations[..., None, :] - covariance
    )
    torch.testing.assert_close(strategy.update(z, utilities, lr=1e-3).covariance, wanted)
    far = strategy.update(z, utilities, lr=1e3).covariance
    assert (torch.linalg.eigvalsh(far) > 0).all()


def test_the_techniques_that_spare_evaluations_have_rows_of_their_own():
    """No verdict is about them: the paper does not say which it uses."""
    settings = gradient_free.Settings(dimension=2, seeds=2, generations=2)
    found = gradient_free.run(settings, seed=0, device=torch.device("cpu"))
    rows = {
        "paper",
        "ours",
        "NES",
        "xNES",
        "Cholesky NES",
        "paper, mixed",
        "xNES, mixed",
        "paper, DX",
        "xNES, DX",
    }
    for panel in found.panels:
        assert panel.curves.keys() == rows
    assert rows < set(found.tables[0].columns)
    assert {verdict.scheme for verdict in found.verdicts} == {"paper", "ours"}


def test_interrupted_training_goes_on_with_the_runs_that_are_missing(tmp_path, monkeypatch):
    task = training.load_task("digits", torch.device("cpu"))
    schemes = {
        "ours": training.Scheme("spectral", {}),
        "b": training.Scheme("adamw", {"eps": 1e-3}),
    }
    monkeypatch.setattr(training, "TEST_BATCHES", 1)
    train, calls, path = training._train, [], tmp_path / "trainings" / "some.jsonl"

    def counted(*args):
        calls.append(args[1].optimizer)
        return train(*args)

    monkeypatch.setattr(training, "_train", counted)

    def run(names, steps=2, seeds=2, lrs=(1e-3,)):
        chosen, rates = {name: schemes[name] for name in names}, dict.fromkeys(names, lrs)
        return training.train_all(
            task, chosen, rates, steps=steps, seeds=range(seeds), trainings=path
        )

    first = run(["ours"])
    assert len(calls) == 2
    both = run(["ours", "b"])
    assert len(calls) == 4  # those of the first were kept
    assert both[1]["ours"] == first[1]["ours"]
    run(["ours"], seeds=3)
    assert len(calls) == 5  # one seed more
    run(["ours"], steps=3)
    assert len(calls) == 7  # made with other settings
    run(["ours"], lrs=(1e-4, 1e-3, 1e-2))
    searched = calls[7:]
    assert run(["ours"], lrs=(1e-4, 1e-3, 1e-2))[0]
    assert calls[7:] == searched  # those that choose learning rates are kept as well
    whole = path.read_text()
    # Killed while a run was written
    path.write_text(whole[: whole.index("losses", len(whole) // 2) + 20])
    run(["ours"], lrs=(1e-4, 1e-3, 1e-2))
    assert 0 < len(calls) - 7 - len(searched) < 7 + len(searched)
    calls.clear()
    monkeypatch.setattr(
        training, "behavior_of", lambda name, changed: "other" if name == "spectral" else ""
    )
    run(["ours", "b"])
    assert calls == ["spectral", "spectral"]  # others do not depend on our code
    path.write_text(path.read_text().replace('"losses": [', '"losses": ["junk", '))
    with pytest.raises(UserError, match=r"some\.jsonl holds something that is no training run"):
        run(["b"])
