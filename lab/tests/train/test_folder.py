"""What goes wrong with a run's folder or settings ends in one sentence, and leaves nothing."""

import os
import subprocess
import sys

import pytest

from eigenstep_lab import cli
from eigenstep_lab.console import UserError
from eigenstep_lab.train import checkpoint, folder
from eigenstep_lab.train.trainer import train

QUICK = (
    "--train-for=12 --warmup=2 --batch=8 --test-batches=1 --checkpoint-every=5 --threads=1 "
    "--model-option=width=16 --model-option=depth=1 --model-option=heads=2"
)


def words(command, directory, *more):
    return [command, *QUICK.split(), f"--directory={directory}", *more]


@pytest.fixture
def refused(capsys):
    """Run a command that must be refused, and return its one sentence."""

    def run(*arguments):
        assert cli.main(list(arguments)) == 2
        said = capsys.readouterr().err
        assert said.startswith("eigenstep: error: ")
        assert said.count("\n") == 1
        return said

    return run


HOLD = """
import sys, pathlib
from eigenstep_lab.train.folder import occupied
with occupied(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def neighbor(tmp_path):
    """Another process at work in a folder in which this one has worked before."""
    with folder.occupied(tmp_path / "run"):
        pass
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_until_the_first_has_died(tmp_path, tiny, neighbor, refused):
    run = tmp_path / "run"
    partial = run / ".step-000000005.pt.1"
    partial.write_bytes(b"being written")
    kept = checkpoint.save(run, 3, {"step": 3})
    message = r"another process is at work in .*run: wait until it has ended, or choose"
    with pytest.raises(UserError, match=message):
        train(tiny(), run, fresh=True)
    for command in ("train", "tune"):
        assert "another process" in refused(*words(command, run))
    assert partial.exists()
    assert kept.exists()
    neighbor.kill()  # the operating system lets go of the lock
    neighbor.wait()
    assert train(tiny(), run, fresh=True).step == 12
    assert not partial.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        "--data=nothing",
        "--batch=100000",
        "--warmup=12",
        "--option=unknown=1",
        "--device=nonsense",
        "--threads=100000000",
        f"--train-for={'9' * 400} epochs",
    ],
)
@pytest.mark.parametrize("command", ["train", "tune"])
def test_a_refused_run_leaves_no_folder(tmp_path, refused, command, wrong):
    refused(*words(command, tmp_path / "a" / "run", wrong))
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_deletes_nothing(tmp_path, tiny, refused):
    train(tiny(train_for="3 steps"), tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    refused(*words("train", tmp_path / "run", "--fresh", "--option=unknown=1"))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[option]\nbetas = [0.9, 1979-05-27T07:32:00Z]", "option betas must be a number, a text"),
        ("[model_option]\ndepth = {a = 1}", "model_option depth must be a number, a text"),
        ("[option]\nroot = nan", "option root must be finite"),
        (f"lr = 0x{'f' * 6000}", "lr must have at most 64 bits, got a number of 24000"),
        (f"seed = {2**40}", "seed must be between 0 and 4294967295"),
        ("a = " + "[" * 100_000, "cannot be read as TOML"),
    ],
)
def test_strange_settings_files(tmp_path, refused, text, message):
    path, run = tmp_path / "settings.toml", tmp_path / "run"
    path.write_text(text)
    assert message in refused("train", f"--config={path}", f"--directory={run}")
    assert not run.exists()


def test_a_file_in_the_way_of_the_folder(tmp_path, refused):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        for command in ("train", "tune"):
            assert "cannot write to" in refused(*words(command, place))


LIMITED = """
import resource, sys
from eigenstep_lab import cli, cpu
cpu._try_bf16 = lambda _: ""
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(cli.main(sys.argv[1:]))
"""
"""The command line, whose files cannot grow beyond some bytes."""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_no_room_for_a_checkpoint(tmp_path):
    command = [sys.executable, "-c", LIMITED, *words("train", tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith(
        "step-000000005.pt: File too large; allow larger files and repeat the command"
    )
    assert not list(tmp_path.glob("*step-*"))


def test_a_full_disk(tmp_path, monkeypatch, refused):
    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert refused(*words("train", tmp_path)).endswith(
        "log.csv: No space left on device; make room and repeat the command\n"
    )


def test_a_checkpoint_of_something_else(tmp_path, capsys, refused):
    assert cli.main(words("train", tmp_path)) == 0
    saved = checkpoint.load(checkpoint.list_checkpoints(tmp_path)[-1])
    capsys.readouterr()
    for change in ({"settings": "[1"}, {"model": {}}, {"optimizer": []}, {"step": "x"}):
        checkpoint.save(tmp_path, 12, {**saved, **change})
        assert "step-000000012.pt is damaged" in refused(*words("train", tmp_path))


def test_a_damaged_log_is_begun_anew(tmp_path, tiny):
    (tmp_path / "log.csv").write_bytes(b"\xff\xfe\nx,1,1\n\0")
    assert train(tiny(train_for="3 steps"), tmp_path).step == 3
