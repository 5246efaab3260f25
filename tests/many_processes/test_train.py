"""`eigenstep train` on several processes: they train as one, and survive the death of one of them."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eigenstep.experiments import checkpoint, trainer

from .checks import NETWORK, RUN, run_settings
from .conftest import Results
from .test_equality import distance


@pytest.fixture(scope="module")
def undisturbed(found: Results, ranks_folder: Path) -> Path:
    """The folder of runs of two processes, without any accident."""
    return ranks_folder / "runs" / "2"


def weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return found


def difference(mine: Path, theirs: Path) -> float:
    """Distance of weights that gradients decide: softmax does not depend on the biases of keys, which follow noise."""
    kept = [{name: w for name, w in weights(folder).items() if "key.bias" not in name} for folder in (mine, theirs)]
    return distance(*kept)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, undisturbed: Path) -> Path:
    """The same run by one process."""
    folder = tmp_path_factory.mktemp("alone")
    trainer.train(run_settings(undisturbed), folder)
    return folder


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(undisturbed: Path, alone: Path, way: str) -> None:
    assert difference(undisturbed / way, alone) <= 1e-5
    logs = [list(csv.DictReader((folder / "log.csv").open())) for folder in (undisturbed / way, alone)]
    assert len(logs[0]) == 2
    for ours, theirs in zip(*logs, strict=True):
        for name in ("step", "loss", "lr", "test_loss"):
            if theirs[name]:
                assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-6)
    names = sorted(path.name for path in (undisturbed / way).glob("*step-*"))
    assert names == ["step-000000006.dcp", "step-000000008.dcp"]


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_one_process_goes_on(undisturbed: Path, alone: Path, tmp_path: Path, way: str) -> None:
    shutil.copytree(undisturbed / way, tmp_path / "run")
    for name in ("model.pt", "result.json"):
        (tmp_path / "run" / name).unlink()
    checkpoint.delete(tmp_path / "run" / "step-000000008.dcp")
    trainer.train(run_settings(undisturbed), tmp_path / "run")
    assert difference(tmp_path / "run", alone) <= 1e-5


@pytest.mark.parametrize(("way", "place", "at"), [("ddp", "step", 5), ("fsdp2", "save", 2)])
def test_a_killed_process_changes_nothing(undisturbed: Path, tmp_path: Path, way: str, place: str, at: int) -> None:
    """Torchrun starts all processes anew, and they go on from step 3."""
    options = {**RUN, "data": undisturbed / "poem.txt", "parallel": way, "directory": tmp_path / "run"}
    chosen = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    chosen += [f"--model-option={name}={value}" for name, value in NETWORK.items()]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    kill = {"KILL_IN": place, "KILL_AT": str(at), "KILL_MARKER": str(tmp_path / "killed")}
    done = subprocess.run(
        [*launch, str(Path(__file__).with_name("killed.py")), "train", *chosen],
        env={**os.environ, **kill},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert (tmp_path / "killed").exists()
    assert "exitcode: -9" in printed
    assert "Going on with the run" in printed
    mine, theirs = weights(tmp_path / "run"), weights(undisturbed / way)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == 8
