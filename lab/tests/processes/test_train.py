"""`eigenstep train` on several processes: they train as one, and survive a death."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eigenstep_lab.console import UserError
from eigenstep_lab.train import checkpoint, trainer
from many_processes.cases import distance, equal

from .checks import NETWORK, RUN, run_settings

ROUNDING = 1e-4
"""Float32 sums in another order: one process that takes its batches in two parts is 7e-6 from one
that does not.
"""


@pytest.fixture(scope="module")
def undisturbed(ranks, ranks_folder):
    """The folder of runs of two processes, without any accident."""
    return ranks_folder / "runs" / "2"


def weights(folder):
    found: dict[str, Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return found


def difference(mine, theirs):
    """Distance of weights that gradients decide: softmax does not depend on the biases of keys,
    which follow noise.
    """
    kept = [
        {name: w for name, w in weights(folder).items() if "key.bias" not in name}
        for folder in (mine, theirs)
    ]
    return distance(*kept)


@pytest.fixture(scope="module", params=["spectral", "adamw"])
def alone(request, tmp_path_factory, undisturbed):
    """The same run by one process; the folder has the optimizer's name."""
    folder = tmp_path_factory.mktemp("alone") / request.param
    trainer.train(run_settings(undisturbed, optimizer=request.param), folder)
    return folder


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(undisturbed, alone, way):
    both = undisturbed / f"{alone.name}-{way}"
    assert difference(both, alone) <= ROUNDING
    logs = [list(csv.DictReader((folder / "log.csv").open())) for folder in (both, alone)]
    assert len(logs[0]) == 2
    for ours, theirs in zip(*logs, strict=True):
        for name in ("step", "loss", "lr", "test_loss"):
            if theirs[name]:
                assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-6)
    ending = "pt" if both.name == "adamw-ddp" else "dcp"  # there the first process has everything
    names = sorted(path.name for path in both.glob("*step-*") if path.suffix != ".sha256")
    assert names == [f"step-000000006.{ending}", f"step-000000008.{ending}"]


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_parts_of_a_batch_add_up(undisturbed, way):
    assert difference(undisturbed / f"parts-{way}", undisturbed / f"spectral-{way}") <= ROUNDING


def as_of_step_6(run, folder):
    """Copy a run, and take away what it did after step 6."""
    shutil.copytree(run, folder)
    for name in ("model.pt", "result.json"):
        (folder / name).unlink()
    checkpoint.delete(checkpoint.list_checkpoints(folder)[-1])
    return folder


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_one_process_goes_on(undisturbed, alone, tmp_path, way):
    run = as_of_step_6(undisturbed / f"{alone.name}-{way}", tmp_path / "run")
    trainer.train(run_settings(undisturbed, optimizer=alone.name), run)
    assert difference(run, alone) <= ROUNDING


@pytest.mark.parametrize("file", [".metadata", "__1_0.distcp"])
def test_damaged_checkpoints(undisturbed, tmp_path, file):
    run = as_of_step_6(undisturbed / "spectral-fsdp2", tmp_path / "run")
    damaged = run / "step-000000006.dcp" / file
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(
        UserError, match=r"step-000000006.dcp is damaged .*: delete it and repeat the command"
    ):
        trainer.train(run_settings(undisturbed), run)


def test_stopped_processes_go_on(undisturbed):
    assert equal(weights(undisturbed / "stopped"), weights(undisturbed / "spectral-fsdp2"))


def test_killed_processes_change_nothing(undisturbed, tmp_path):
    """Torchrun starts all processes anew, and they go on from step 3, twice."""
    options = {
        **RUN,
        "data": undisturbed / "poem.txt",
        "parallel": "fsdp2",
        "directory": tmp_path / "run",
    }
    chosen = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    chosen += [f"--model-option={name}={value}" for name, value in NETWORK.items()]
    launch = "-m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=2"
    killed = str(Path(__file__).with_name("killed.py"))
    done = subprocess.run(
        [sys.executable, *launch.split(), killed, "train", *chosen],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert printed.count("exitcode: -9") == 2, printed
    assert printed.count("Going on with the run") == 2
    assert equal(weights(tmp_path / "run"), weights(undisturbed / "spectral-fsdp2"))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == 8
