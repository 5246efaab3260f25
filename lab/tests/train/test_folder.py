"""What goes wrong with a run's folder and its settings ends in one sentence, and leaves nothing
behind.
"""

import os
import subprocess
import sys

import pytest

from eigenstep_lab import cli
from eigenstep_lab.console import UserError
from eigenstep_lab.train import checkpoint, folder
from eigenstep_lab.train.trainer import train

QUICK = (
    "--train-for=12 steps",
    "--warmup=2",
    "--batch=8",
    "--test-batches=1",
    "--checkpoint-every=5",
    "--threads=1",
)
QUICK += tuple(f"--model-option={option}" for option in ("width=16", "depth=1", "heads=2"))


def refused(capsys, *words):
    """Run a command that must be refused, and return its one sentence."""
    assert cli.main(list(words)) == 2
    said = capsys.readouterr().err
    assert said.startswith("eigenstep: error: ")
    assert said.count("\n") == 1
    return said


HOLD = """
import sys, pathlib
from eigenstep_lab.train.folder import occupied
with occupied(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def neighbor(tmp_path):
    """Another process that works in a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_until_the_first_has_died(tmp_path, tiny, neighbor, capsys):
    partial = tmp_path / "run" / ".step-000000005.pt.1"
    partial.write_bytes(b"being written")
    kept = checkpoint.save(tmp_path / "run", 3, {"step": 3})
    with pytest.raises(
        UserError, match=r"another process is at work in .*run: wait until it has ended, or choose"
    ):
        train(tiny(), tmp_path / "run", fresh=True)
    for command in ("train", "tune"):
        assert "another process" in refused(
            capsys, command, *QUICK, f"--directory={tmp_path / 'run'}"
        )
    assert partial.exists()
    assert kept.exists()
    neighbor.kill()  # the operating system lets go of the lock
    neighbor.wait()
    assert train(tiny(), tmp_path / "run", fresh=True).step == 12
    assert not partial.exists()


def test_a_folder_can_be_used_again(tmp_path):
    for _ in range(2):
        with folder.occupied(tmp_path / "run"):
            pass


@pytest.mark.parametrize(
    "wrong",
    [
        "--data=nothing",
        "--batch=100000",
        "--warmup=12",
        "--model=gpt",
        "--option=unknown=1",
        "--model-option=unknown=1",
        "--device=nonsense",
        "--threads=100000000",
        "--workers=100000000",
        f"--seed={2**64}",
        f"--seed={10**1000}",
        f"--train-for={'9' * 400} epochs",
    ],
)
@pytest.mark.parametrize("command", ["train", "tune"])
def test_a_refused_run_leaves_no_folder(tmp_path, capsys, command, wrong):
    refused(capsys, command, *QUICK, f"--directory={tmp_path / 'a' / 'run'}", wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_deletes_nothing(tmp_path, tiny, capsys):
    train(tiny(train_for="3 steps"), tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    refused(
        capsys, "train", *QUICK, f"--directory={tmp_path / 'run'}", "--fresh", "--option=unknown=1"
    )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[option]\nroot = 1979-05-27", "option root must be a number, a text"),
        ("[option]\nbetas = [0.9, 1979-05-27T07:32:00Z]", "option betas must be a number, a text"),
        ("[model_option]\ndepth = {a = 1}", "model_option depth must be a number, a text"),
        ("lr = 07:32:00", "lr must be of type float"),
        ("[option]\nroot = nan", "option root must be finite"),
        (f"seed = {2**70}", "seed must have at most 64 bits"),
        (f"lr = 0x{'f' * 6000}", "lr must have at most 64 bits, got a number of 24000"),
        (f"seed = {2**40}", "seed must be at most 4294967295"),
        ("a = " + "[" * 100_000, "cannot be read as TOML"),
    ],
)
def test_strange_settings_files(tmp_path, capsys, text, message):
    (tmp_path / "settings.toml").write_text(text)
    said = refused(
        capsys, "train", f"--config={tmp_path / 'settings.toml'}", f"--directory={tmp_path / 'run'}"
    )
    assert message in said
    assert not (tmp_path / "run").exists()


def test_a_file_in_the_way_of_the_folder(tmp_path, capsys):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        for command in ("train", "tune"):
            assert "cannot write to" in refused(capsys, command, *QUICK, f"--directory={place}")


def limited(most, words):
    """Run the command line in a process whose files cannot grow beyond `most` bytes."""
    code = (
        "import resource, sys; from eigenstep_lab import cli, cpu\n"
        "cpu._try_bf16 = lambda _: ''\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120
    )


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
@pytest.mark.parametrize("most", [500, 20_000])
def test_no_room_for_a_checkpoint(tmp_path, most):
    done = limited(most, ["train", *QUICK, f"--directory={tmp_path / 'run'}"])
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.endswith(
        "step-000000005.pt: File too large; allow larger files and repeat the command"
    )
    assert not list((tmp_path / "run").glob("*step-*"))


def test_a_full_disk(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.setattr(
        os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    said = refused(capsys, "train", *QUICK, f"--directory={tmp_path / 'run'}")
    assert said.endswith("log.csv: No space left on device; make room and repeat the command\n")


def test_a_checkpoint_of_something_else(tmp_path, capsys):
    words = ("train", *QUICK, f"--directory={tmp_path / 'run'}")
    assert cli.main(list(words)) == 0
    newest = checkpoint.list_checkpoints(tmp_path / "run")[-1]
    saved = checkpoint.load(newest)
    capsys.readouterr()
    for change in (
        {"settings": "[1"},
        {"settings": 3},
        {"model": {}},
        {"optimizer": []},
        {"step": "x"},
        {"losses": 1},
    ):
        checkpoint.save(tmp_path / "run", 12, {**saved, **change})
        assert "step-000000012.pt is damaged" in refused(capsys, *words)


@pytest.mark.parametrize(
    "raw", [b"\xff\xfe", b"step,epoch,lr,loss,test_loss,test_error,seconds\nx,1,1,1,1,1,1\n\0"]
)
def test_a_damaged_log_is_begun_anew(tmp_path, tiny, raw):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.csv").write_bytes(raw)
    assert train(tiny(train_for="3 steps"), tmp_path / "run").step == 3
