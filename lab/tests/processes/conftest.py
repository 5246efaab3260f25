"""Starts the ranks once, for all tests and all processes that run tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from many_processes.ranks import Results, results, shared_folder


@pytest.fixture(scope="session")
def ranks_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Where the ranks put their files."""
    return shared_folder(tmp_path_factory, worker_id, "ranks-of-the-laboratory")


@pytest.fixture(scope="session")
def found(ranks_folder: Path) -> Results:
    """What every check gave, rank by rank."""
    return results(ranks_folder, "processes.checks")
