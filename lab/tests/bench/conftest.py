from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eigenstep_lab import cli


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs a benchmark from the command line, and gives its figures."""

    def run(*words: str) -> dict[str, Any]:
        file = tmp_path / "figures.json"
        assert cli.main(["bench", *words, "--json", str(file)]) == 0
        result: dict[str, Any] = json.loads(file.read_text())["result"]
        return result

    return run
