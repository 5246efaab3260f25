"""The command as people use it: started, killed, interrupted and started again."""

import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from eigenstep_lab import cli
from eigenstep_lab.train import command
from eigenstep_lab.train.runlog import read
from many_processes.cases import equal

from .runs import log, weights

TINY = "train --batch 8 --test-batches 2 --model-option width=16 --model-option heads=2"


def run(words, directory):
    return cli.main([*words.split(), "--directory", str(directory)])


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "took too long"
        time.sleep(0.005)


def start(words, directory):
    """Start the command in a process of its own, without the trial of bf16, which takes seconds."""
    code = "from eigenstep_lab import cli, cpu; cpu.prepare = lambda: None; exit(cli.main())"
    line = [sys.executable, "-c", code, *words.split(), "--directory", str(directory)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_killed_and_started_again_it_ends_with_the_same_weights(tmp_path):
    """SIGKILL cannot be prepared for. All kinds of chance are on."""
    words = (
        f"{TINY} --train-for 45 --warmup 5 --evaluate-every 20 --log-every 4 --precision bf16 "
        "--option stochastic_rounding=true --mixup 0.3 --cutmix 1 --crop 0.5 --flip "
        "--checkpoint-every 6 --threads 1 --model-option depth=1"
    )
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    process = start(words, broken)
    wait_for(lambda: len(read(broken / "log.csv")) > 2 and any(broken.glob("step-*.pt")), process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert not (broken / "model.pt").exists()
    for directory in (broken, whole):
        assert run(words, directory) == 0
    assert equal(weights(broken), weights(whole))
    assert log(broken) == log(whole)


def test_interrupted_it_keeps_everything_and_says_how_to_go_on(tmp_path, capsys):
    def interrupt():
        while len(read(tmp_path / "log.csv")) < 4:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    words = f"{TINY} --train-for 100000 --warmup 5 --log-every 1 --checkpoint-every 99999"
    assert run(words, tmp_path) == 130
    watcher.join()
    (kept,) = tmp_path.glob("step-*.pt")
    assert int(kept.stem.split("-")[1]) == int(read(tmp_path / "log.csv")[-1]["step"])
    said = capsys.readouterr().out
    assert f"Kept: {kept}. The same command goes on from there: eigenstep train --batch 8" in said


def test_a_second_interruption_ends_at_once():
    before = signal.getsignal(signal.SIGINT)
    with command.asked_to_stop() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


SMALLER = {
    "plainvit": ["width=16", "depth=1", "heads=2", "patch=8"],
    "hieravit": ["width=8", "depths=(1,1,2,1)", "heads=1"],
}


@pytest.mark.parametrize(
    ("config", "optimizer"), [("plainvit-imagewoof", "spectral"), ("hieravit-imagenet25", "muon")]
)
def test_the_papers_protocols_run_in_small(config, optimizer, pictures, tmp_path, capsys):
    """The shipped configuration as it is, but for sizes and durations."""
    words = f"train --config {config} --data {pictures} --optimizer {optimizer} --size 32 --batch 8"
    words += " --train-for 64 --warmup 16 --workers 1"
    for option in SMALLER[config.split("-")[0]]:
        words += f" --model-option {option}"
    assert run(words, tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "Starting the run" in said
    assert "held-out error" in said
    state = weights(tmp_path / "run")
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in state.values())


def test_fresh_begins_anew_and_touches_only_the_run(tmp_path, capsys):
    words = f"{TINY} --train-for 4 --warmup 1"
    assert run(words, tmp_path) == 0
    (tmp_path / "notes.txt").write_text("mine")
    assert run(f"{words} --lr 0.1", tmp_path) == 2
    assert "other settings: lr" in capsys.readouterr().err
    assert run(f"{words} --lr 0.1 --fresh", tmp_path) == 0
    assert "Starting the run" in capsys.readouterr().out
    assert (tmp_path / "notes.txt").exists()
    assert run(f"{words} --lr 0.1", tmp_path) == 0
    assert "Going on with the run" in capsys.readouterr().out


def test_a_damaged_checkpoint_says_what_to_do_and_that_helps(tmp_path, capsys):
    words = f"{TINY} --train-for 6 --warmup 1 --checkpoint-every 4"
    assert run(words, tmp_path) == 0
    before = weights(tmp_path)
    newest = sorted(tmp_path.glob("step-*.pt"))[-1]
    newest.write_bytes(newest.read_bytes()[:5000])
    (tmp_path / "model.pt").unlink()
    assert run(words, tmp_path) == 2
    error = capsys.readouterr().err
    assert f"the checkpoint {newest} is damaged" in error
    assert "delete it and repeat the command to go on from step-000000004.pt" in error
    newest.unlink()
    assert run(words, tmp_path) == 0
    assert equal(weights(tmp_path), before)
