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

WORDS = [
    "tune",
    "--batch",
    "8",
    "--test-batches",
    "2",
    "--train-for",
    "6 steps",
    "--warmup",
    "1",
    "--optimizer",
    "adamw",
]
WORDS += [
    "--model-option",
    "width=16",
    "--model-option",
    "depth=1",
    "--objective",
    "test_loss",
    "--optimizer",
    "adamw",
]


def outcomes(directory):
    """Held-out loss of each run, by its number."""
    found = {
        path.parent.name: json.loads(path.read_text())
        for path in directory.glob("run-*/result.json")
    }
    return {name: result["test_loss"] for name, result in sorted(found.items())}


@pytest.mark.parametrize("optimizer", TRAINERS)
def test_every_optimizer_takes_what_its_space_holds(optimizer):
    model = ViT((1, 8, 8), 4, patch=4, width=8, depth=1, heads=2)
    settings = Settings(optimizer=optimizer)
    for values in tune.draw(space_of(settings), 3, seed=0):
        chosen = apply(settings, values)
        assert {"lr", "weight_decay"} <= set(values)
        optimizer_built = build_optimizer(chosen, model)
        # Not the positions
        group = next(group for group in optimizer_built.param_groups if group["lr"] == chosen.lr)
        last = optimizer_built.param_groups[-1]
        other = {f"adamw_{name}": own for name, own in last.items()} | {
            "adamw_ratio": last["lr"] / chosen.lr
        }
        for name, value in chosen.option.items():  # some packages keep options as attributes
            known = {**other, **group}
            reached = known[name] if name in known else getattr(optimizer_built, name)
            assert reached == pytest.approx(tuple(value) if isinstance(value, list) else value), (
                name
            )


def test_draws_stay_in_their_ranges_and_fill_them_evenly_in_the_logarithm():
    space = SPACES["spectral"]
    drawn = tune.draw(space, 300, seed=1)
    for name, values in space.items():
        column = [values_of_run[name] for values_of_run in drawn]
        if isinstance(values, Range):
            places = [math.log(x / values.low) / math.log(values.high / values.low) for x in column]
            assert 0 <= min(places) < 0.05
            assert 0.95 < max(places) <= 1
            assert sum(places) / len(places) == pytest.approx(0.5, abs=0.07)
        else:
            assert set(column) == set(values)


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


def test_a_search_finds_writes_and_extends(tmp_path, capsys):
    words = [*WORDS, "--directory", str(tmp_path / "search")]
    assert cli.main([*words, "--runs", "2"]) == 0
    first = outcomes(tmp_path / "search")
    assert cli.main([*words, "--runs", "4"]) == 0  # two more
    found = outcomes(tmp_path / "search")
    assert list(found) == ["run-0000", "run-0001", "run-0002", "run-0003"]
    assert {name: found[name] for name in first} == first
    best = json.loads((tmp_path / "search" / "best.json").read_text())
    assert best["outcome"]["test_loss"] == min(found.values())
    assert best["finished"] == 4
    assert found[f"run-{best['run']:04d}"] == min(found.values())
    assert "the best of 4 runs" in capsys.readouterr().out
    assert not list((tmp_path / "search").glob("run-*/*.pt"))  # weights would fill a disk
    # What was found trains to the very same loss.
    words = [
        "train",
        "--config",
        str(tmp_path / "search" / "best.toml"),
        "--directory",
        str(tmp_path / "again"),
    ]
    assert cli.main(words) == 0
    again = json.loads((tmp_path / "again" / "result.json").read_text())
    assert again["test_loss"] == best["outcome"]["test_loss"]
    # Elsewhere, in two processes: the same numbers.
    assert (
        cli.main(
            [
                *WORDS,
                "--runs",
                "2",
                "--jobs",
                "2",
                "--threads",
                "1",
                "--directory",
                str(tmp_path / "two"),
            ]
        )
        == 0
    )
    assert outcomes(tmp_path / "two") == pytest.approx(first, rel=1e-6)


def test_an_interrupted_search_goes_on(tmp_path, monkeypatch, capsys):
    words = [*WORDS, "--runs", "3", "--directory", str(tmp_path)]
    real, begun = tune.train, []

    def begin(settings, directory):
        begun.append(directory.name)
        if begun == ["run-0000", "run-0001"]:
            raise KeyboardInterrupt
        return real(settings, directory)

    monkeypatch.setattr(tune, "train", begin)
    assert cli.main(words) == 130
    assert "The same command goes on" in capsys.readouterr().out
    begun.clear()
    assert cli.main(words) == 0
    assert sorted(begun) == ["run-0001", "run-0002"]
    assert len(outcomes(tmp_path)) == 3
    begun.clear()
    assert cli.main(words) == 0
    assert not begun


def test_runs_that_diverge_are_counted_and_not_repeated(tmp_path, monkeypatch, capsys):
    words = [*WORDS, "--runs", "2", "--directory", str(tmp_path)]
    begun = []

    def diverge(settings, directory):
        begun.append(directory)
        raise tune.Diverged("to infinity")

    monkeypatch.setattr(tune, "train", diverge)
    for _ in range(2):
        assert cli.main(words) == 2
        assert "all 2 runs diverged" in capsys.readouterr().err
    assert len(begun) == 2


def test_a_search_with_other_settings_or_a_damaged_journal_is_refused(
    tmp_path, capsys, monkeypatch
):
    words = [*WORDS, "--runs", "1", "--directory", str(tmp_path)]
    assert cli.main(words) == 0
    assert cli.main([*words, "--batch", "4"]) == 2
    assert "holds a search with other batch: choose another --directory" in capsys.readouterr().err
    (tmp_path / "journal.log").write_text('{"op_code": 0, "worker\n{}\n')
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert "journal.log is damaged" in error
    assert "delete it" in error
    (tmp_path / "journal.log").unlink()
    monkeypatch.setattr(tune, "train", lambda *_: pytest.fail("a complete run was trained again"))
    assert cli.main(words) == 0


def test_every_optimizer_can_be_searched():
    assert set(SPACES) == set(TRAINERS)
    with pytest.raises(SystemExit):
        cli.main(["tune", "--runs", "many"])
    assert cli.main(["tune", "--runs", "0"]) == 2


def test_help_names_its_own_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["tune", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "runs/tune/..." in told
    assert "runs/train/" not in told
