"""Starts the ranks once, for all tests and all processes that run tests."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from .ranks import results

Results = dict[tuple[str, int], list[Any]]


@pytest.fixture(scope="session")
def ranks_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Where the ranks put their files, the same for all processes that run tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "ranks"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def found(ranks_folder: Path) -> Results:
    """What every check gave, rank by rank."""
    with (ranks_folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return results(ranks_folder)
