"""Runs functions on several ranks: four processes are started once, work as four ranks, then two of
them as two.
"""

from __future__ import annotations

import datetime
import fcntl
import importlib
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 4
PRELOADED = [
    "eigenstep.optim",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
]
"""Imported once for all ranks; DistributedDataParallel needs the second."""

Check = Callable[[Path], Any]
CHECKS: dict[str, tuple[Check, tuple[int, ...]]] = {}
"""What ranks run, by name: a function of a folder that they share, and for which numbers of ranks.
"""
Results = dict[tuple[str, int], list[Any]]
"""For each name and number of ranks, what the ranks returned (or an error's text)."""


def on_ranks(*worlds: int) -> Callable[[Check], Check]:
    """Register a function to be run by so many ranks; what it returns on each rank is what the
    tests look at.
    """

    def register(check: Check) -> Check:
        CHECKS[check.__name__] = check, worlds
        return check

    return register


def fixtures(checks: str) -> tuple[Any, Any]:
    """Make two fixtures: the folder of the ranks that run a module's checks, and their results."""

    @pytest.fixture(scope="session")
    def ranks_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
        """Return a folder that is the same for all processes that run tests."""
        base = tmp_path_factory.getbasetemp()
        folder = (base if worker_id == "master" else base.parent) / checks
        folder.mkdir(exist_ok=True)
        return folder

    @pytest.fixture(scope="session")
    def ranks(ranks_folder: Path) -> Results:
        """Return what every check gave, rank by rank."""
        return run_checks(ranks_folder, checks)

    return ranks_folder, ranks


def run_checks(folder: Path, checks: str) -> Results:
    """Run all checks of a module once for all processes that run tests."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            multiprocessing.set_forkserver_preload(PRELOADED)
            context = mp.start_processes(
                _work, (folder, checks), RANKS, join=False, start_method="forkserver"
            )
            while not context.join(timeout=5):
                pass
            (folder / "done").touch()
    gathered: Results = {}
    for rank in range(RANKS):
        for key, value in torch.load(folder / f"{rank}.pt", weights_only=False).items():
            gathered.setdefault(key, []).append(value)
    return gathered


def _work(rank: int, folder: Path, checks: str) -> None:
    importlib.import_module(checks)  # registers them
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[tuple[str, int], Any] = {}
    for world in (4, 2):
        if rank >= world:
            break
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store-{world}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(minutes=10),
        )
        for name, (check, worlds) in CHECKS.items():
            if world not in worlds:
                continue
            place = folder / name / str(world)
            place.mkdir(parents=True, exist_ok=True)
            try:
                found[name, world] = check(place)
            except Exception:
                found[name, world] = traceback.format_exc()
                torch.save(found, folder / f"{rank}.pt")
                raise
        dist.barrier()
        dist.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")
    # Gloo's threads give back the last tensors by then, and cannot abort a process that is ending.
    time.sleep(0.5)
