import json
import math

import pytest

from eigenstep_lab import cli
from eigenstep_lab.models.transformers import ViT
from eigenstep_lab.rivals import TRAINERS
from eigenstep_lab.train import tune
from eigenstep_lab.train.building import build_optimizer
from eigenstep_lab.train.settings import Settings
from eigenstep_lab.train.spaces import SPACES, Range, apply, space_of

WORDS = (
    "tune --batch 8 --test-batches 2 --train-for 6 --warmup 1 --optimizer adamw "
    "--objective test_loss --model-option width=16 --model-option depth=1"
)


@pytest.fixture
def search(tmp_path):
    """Run a search with more words, in a folder of its own."""

    def run(more, name="search"):
        return cli.main([*WORDS.split(), *more.split(), f"--directory={tmp_path / name}"])

    return run


def outcomes(directory):
    """Held-out loss of each run, by its number."""
    paths = sorted(directory.glob("run-*/result.json"))
    return {path.parent.name: json.loads(path.read_text())["test_loss"] for path in paths}


@pytest.mark.parametrize("optimizer", TRAINERS)
def test_every_optimizer_takes_what_its_space_holds(optimizer):
    model = ViT((1, 8, 8), 4, patch=4, width=8, depth=1, heads=2)
    settings = Settings(optimizer=optimizer)
    for values in tune.draw(space_of(settings), 3, seed=0):
        assert {"lr", "weight_decay"} <= set(values)
        chosen = apply(settings, values)
        built = build_optimizer(chosen, model)
        # Not the positions
        group = next(group for group in built.param_groups if group["lr"] == chosen.lr)
        last = built.param_groups[-1]
        reached = {f"adamw_{name}": value for name, value in last.items()}
        reached |= {"adamw_ratio": last["lr"] / chosen.lr, **group}
        if "turning" in group:
            reached["basis_lr"] = group["turning"].rate
        for name, value in chosen.option.items():
            value = tuple(value) if isinstance(value, list) else value
            # Some packages keep options as attributes
            known = reached[name] if name in reached else getattr(built, name)
            assert known == pytest.approx(value), name


def test_draws_stay_in_their_ranges_and_fill_them_evenly_in_the_logarithm():
    space = SPACES["spectral"]
    drawn = tune.draw(space, 300, seed=1)
    for name, values in space.items():
        assert isinstance(values, Range)
        width = math.log(values.high / values.low)
        places = [math.log(point[name] / values.low) / width for point in drawn]
        assert 0 <= min(places) < 0.05
        assert 0.95 < max(places) <= 1
        assert sum(places) / len(places) == pytest.approx(0.5, abs=0.07)
    muon = tune.draw(SPACES["muon"], 20, seed=1)
    assert {point["nesterov"] for point in muon} == {True, False}


def test_run_k_depends_on_the_seed_alone():
    space = SPACES["adamw"]
    assert tune.draw(space, 9, seed=0)[:4] == tune.draw(space, 4, seed=0)
    assert tune.draw(space, 4, seed=0) != tune.draw(space, 4, seed=1)


def test_hyperparameters_become_settings():
    values = {"lr": 0.1, "weight_decay": 0.2, "1-beta1": 0.25, "1-beta2": 0.125, "eps": 1e-3}
    chosen = apply(Settings(optimizer="adamw", option={"amsgrad": True}), values)
    assert (chosen.lr, chosen.weight_decay) == (0.1, 0.2)
    assert chosen.option == {"amsgrad": True, "eps": 1e-3, "betas": [0.75, 0.875]}
    chosen = apply(Settings(optimizer="muon"), {"lr": 1, "weight_decay": 0, "1-momentum": 0.5})
    assert chosen.option == {"momentum": 0.5}


def test_options_that_are_given_are_not_searched():
    fixed = Settings(optimizer="adamw", option={"betas": [0.9, 0.99]})
    assert set(space_of(fixed)) == {"lr", "weight_decay", "eps"}


def test_a_search_finds_writes_and_extends(search, tmp_path, capsys):
    assert search("--runs 2") == 0
    first = outcomes(tmp_path / "search")
    assert search("--runs 4") == 0  # two more
    losses = outcomes(tmp_path / "search")
    assert list(losses) == ["run-0000", "run-0001", "run-0002", "run-0003"]
    assert first.items() < losses.items()
    best = json.loads((tmp_path / "search" / "best.json").read_text())
    assert best["outcome"]["test_loss"] == min(losses.values()) == losses[f"run-{best['run']:04d}"]
    assert best["finished"] == 4
    assert "the best of 4 runs" in capsys.readouterr().out
    assert not list((tmp_path / "search").glob("run-*/*.pt"))  # weights would fill a disk
    # What was found trains to the very same loss.
    config = tmp_path / "search" / "best.toml"
    assert cli.main(["train", f"--config={config}", f"--directory={tmp_path / 'again'}"]) == 0
    again = json.loads((tmp_path / "again" / "result.json").read_text())
    assert again["test_loss"] == best["outcome"]["test_loss"]
    # Elsewhere, in two processes: the same numbers.
    assert search("--runs 2 --jobs 2 --threads 1", "two") == 0
    assert outcomes(tmp_path / "two") == pytest.approx(first, rel=1e-6)


def test_an_interrupted_search_goes_on(search, tmp_path, monkeypatch, capsys):
    real, begun = tune.train, []

    def begin(settings, directory):
        begun.append(directory.name)
        if begun == ["run-0000", "run-0001"]:
            raise KeyboardInterrupt
        return real(settings, directory)

    monkeypatch.setattr(tune, "train", begin)
    assert search("--runs 3") == 130
    assert "The same command goes on" in capsys.readouterr().out
    for expected in (["run-0001", "run-0002"], []):
        begun.clear()
        assert search("--runs 3") == 0
        assert sorted(begun) == expected
        assert len(outcomes(tmp_path / "search")) == 3


def test_runs_that_diverge_are_counted_and_not_repeated(search, monkeypatch, capsys):
    begun = []

    def diverge(settings, directory):
        begun.append(directory)
        raise tune.Diverged("to infinity")

    monkeypatch.setattr(tune, "train", diverge)
    for _ in range(2):
        assert search("--runs 2") == 2
        assert "all 2 runs diverged" in capsys.readouterr().err
    assert len(begun) == 2


def test_another_search_or_a_damaged_journal_is_refused(search, tmp_path, capsys, monkeypatch):
    assert search("--runs 1") == 0
    assert search("--runs 1 --batch 4") == 2
    assert "holds a search with other batch: choose another --directory" in capsys.readouterr().err
    journal = tmp_path / "search" / "journal.log"
    journal.write_text('{"op_code": 0, "worker\n{}\n')
    assert search("--runs 1") == 2
    error = capsys.readouterr().err
    assert "journal.log is damaged" in error
    assert "delete it" in error
    journal.unlink()
    monkeypatch.setattr(tune, "train", lambda *_: pytest.fail("a complete run was trained again"))
    assert search("--runs 1") == 0


def test_every_optimizer_can_be_searched(search):
    assert set(SPACES) == set(TRAINERS)
    with pytest.raises(SystemExit):
        search("--runs many")
    assert search("--runs 0") == 2


def test_help_names_its_own_folder(search, capsys):
    with pytest.raises(SystemExit):
        search("--help")
    told = " ".join(capsys.readouterr().out.split())
    assert "runs/tune/..." in told
    assert "runs/train/" not in told
