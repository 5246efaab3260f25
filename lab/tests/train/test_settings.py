import argparse
import dataclasses
import re
import shlex
from functools import partial
from pathlib import Path

import pytest

from eigenstep_lab.console import UserError
from eigenstep_lab.train import command as train
from eigenstep_lab.train import settings as module
from eigenstep_lab.train import tune
from eigenstep_lab.train.building import NETWORKS
from eigenstep_lab.train.settings import CONFIGS, MODELS, Settings, count_steps


def parse(*words):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.from_arguments(parser.parse_args(words))


def test_nothing_given_means_defaults():
    assert parse() == Settings()


def test_every_setting_can_be_given_on_the_command_line():
    other = Settings(
        data="x", size=3, length=5, crop=0.5, flip=True, mixup=0.1, cutmix=0.2, label_smoothing=0.3,
        model="gpt",
        model_option={"depths": [1, 2], "positions": "sincos"}, precision="bf16",
        optimizer="muon", lr=0.5,
        weight_decay=0.25, interval=3, option={"nesterov": False, "eps": 1e-3, "clip": None},
        train_for="1 epoch",
        warmup="7", floor=0.1, batch=4, accumulate=2, seed=5, evaluate_every="2 epochs",
        test_batches=9, log_every="3",
        checkpoint_every="4 steps", directory="d", device="cpu", parallel="fsdp2",
        threads=1, workers=2,
    )  # fmt: skip
    words = []
    for setting in dataclasses.fields(Settings):
        value, flag = getattr(other, setting.name), "--" + setting.name.replace("_", "-")
        assert value != getattr(Settings(), setting.name), f"{setting.name} is not tried"
        if isinstance(value, dict):
            words += [word for key, item in value.items() for word in (flag, f"{key}={item}")]
        else:
            words += [flag] if value is True else [flag, str(value)]
    assert parse(*words) == other
    assert parse("--no-flip").flip is False


def test_the_command_line_wins_over_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'lr = 1\nbatch = 8\noptimizer = "soap"\n[option]\neps = 1e-4\nshampoo_beta = 0.5\n'
    )
    read = partial(parse, "--config", str(path))
    assert read().lr == 1
    joined = read("--lr", "2", "--option", "eps=1e-3")
    assert (joined.lr, joined.batch, joined.option) == (2.0, 8, {"eps": 1e-3, "shampoo_beta": 0.5})
    # Options of one optimizer mean nothing to another.
    assert read("--optimizer", "adamw", "--option", "eps=1e-3").option == {"eps": 1e-3}
    assert read("--optimizer", "soap").option == {"eps": 1e-4, "shampoo_beta": 0.5}


def test_another_optimizer_keeps_the_precision_of_the_configuration():
    halves = {"basis_dtype": "bfloat16", "state_dtype": "bfloat16"}
    read = partial(parse, "--config", "plainvit-imagewoof", "--optimizer")
    assert read("spectral_fast").option == halves
    assert read("spectral", "--option", "root=4").option == {**halves, "root": 4}
    assert read("muon").option == {}


@pytest.mark.parametrize(
    "name", sorted(p.stem for p in CONFIGS.glob("*.toml") if not p.stem.endswith("-mixed"))
)
def test_both_readings_of_the_papers_precision(name):
    pure, mixed = parse("--config", name), parse("--config", f"{name}-mixed")
    assert (pure.precision, mixed.precision) == ("bf16", "mixed")
    assert dataclasses.replace(mixed, precision="bf16") == pure


def test_a_base_must_be_one_of_ours(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "../secret"\nlr = 1.0\n')
    with pytest.raises(UserError, match="base must name a configuration"):
        parse("--config", str(path))
    path.write_text('base = "plainvit-imagewoof"\nlr = 1.0\n')
    changed = parse("--config", str(path))
    assert (changed.lr, changed.model) == (1.0, "plainvit")


def test_settings_survive_a_file(tmp_path):
    options = {"option": {"betas": [0.9, 0.99], "root": 4}, "model_option": {"depth": 2}}
    changed = Settings(lr=1e-5, flip=True, data='a"b', **options)
    (tmp_path / "again.toml").write_text(changed.as_toml())
    assert parse("--config", str(tmp_path / "again.toml")) == changed


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_papers_protocols_are_as_the_paper_says(path):
    protocol = parse("--config", path.stem)
    lengths = (protocol.train_for, protocol.warmup, protocol.interval)
    assert lengths == ("210 epochs", "10 epochs", 2)
    model, data, *_ = path.stem.split("-")
    assert protocol.batch == {"imagewoof": 128, "imagenet25": 256}[data]
    assert protocol.model == model
    assert protocol.precision == ("mixed" if path.stem.endswith("-mixed") else "bf16")
    assert protocol.mixup > 0
    assert protocol.cutmix > 0


def test_the_papers_four_protocols_are_shipped_in_both_readings_of_its_precision():
    assert len(list(CONFIGS.glob("*.toml"))) == 2 * 4


def test_every_network_can_be_chosen():
    assert set(MODELS) == {"auto", *NETWORKS}


def test_runs_with_other_results_get_other_folders():
    assert Settings().place("runs") == Settings(
        device="cpu", workers=3, checkpoint_every="7"
    ).place("runs")
    assert Settings().place("runs") != Settings(lr=1e-2).place("runs")
    assert Settings(directory="here").place("runs").name == "here"


@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        ("20 epochs", 140),
        ("0.5epochs", 4),
        ("30 steps", 30),
        ("9", 9),
        ("0", 0),
    ],
)
def test_durations(duration, steps):
    assert count_steps(duration, 7, "warmup") == steps


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train-for", "ages"], "train_for must be a duration such as '20 epochs'.*'ages'"),
        (["--checkpoint-every", "0"], "checkpoint_every must be at least one step"),
        (["--batch", "9", "--accumulate", "2"], "accumulate must divide batch"),
        (["--lr", "nan"], "lr must be finite"),
        (["--lr=-1"], "lr must be at least 0"),
        (["--crop", "1.5"], "crop must be between 1e-06 and 1"),
        (["--optimizer", "sgdd"], "optimizer must be one of spectral, .*'sgdd'"),
        (["--precision", "fp8"], "precision must be one of fp32, bf16, mixed"),
        (["--config", "nowhere"], "no configuration 'nowhere': .*plainvit-imagewoof"),
    ],
)
def test_mistakes_on_the_command_line_are_explained(words, message):
    with pytest.raises(ValueError, match=message):
        parse(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = ", "cannot be read as TOML"),
        ("learning_rate = 1", "unknown settings learning_rate"),
        ('batch = "8"', "batch must be of type int, got '8'"),
        ("crop = 3", r"bad\.toml: crop must be between"),
        ("batch = true", "batch must be of type int, got True"),
        ("option = 3", "option must be of type dict"),
    ],
)
def test_mistakes_in_a_file_are_explained(text, message, tmp_path):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        parse("--config", str(tmp_path / "bad.toml"))


def documented():
    """Every command line for `train` and `tune` in the documentation, the help texts and the
    shipped configurations.
    """
    root = Path(__file__).parents[3]
    texts = [(root / "docs" / "training.md").read_text(), train.__doc__, tune.__doc__]
    texts += [path.read_text() for path in CONFIGS.glob("*.toml")]
    lines = [line.strip("# ") for text in texts for line in text.splitlines()]
    commands = [line for line in lines if re.match(r"eigenstep (train|tune)( --|$|\s{3})", line)]
    return [re.split(r"\s{3,}", command)[0] for command in commands]  # what follows is a comment


def test_documented_commands_are_understood():
    commands = documented()
    assert len(commands) > 15
    for command in commands:
        name, *words = shlex.split(command)[1:]
        parser = argparse.ArgumentParser()
        {"train": train, "tune": tune}[name].add_arguments(parser)
        module.from_arguments(parser.parse_args(words))
