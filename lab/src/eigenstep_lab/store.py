"""Files of results, one line of JSON for each run, so that none is ever repeated.

Several processes may add to one file; each line is written at once. A killed process may leave half
a line, which readers pass over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


def lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Give the numbers and contents of a file's lines; one that is not there has none."""
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), start=1):
        try:
            plain = json.loads(line)
        except (ValueError, RecursionError):
            continue  # half a line of a process that was killed
        yield number, plain


def add(path: Path, plain: Mapping[str, Any]) -> None:
    """Add one line to a file."""
    line = json.dumps(plain)
    path.parent.mkdir(parents=True, exist_ok=True)
    # What comes before may be half a line, so a line also begins with a line break.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"\n{line}\n".encode())
    finally:
        os.close(descriptor)


class Cells:
    """What was computed before, by the settings that decide it."""

    def __init__(self, path: Path | None) -> None:
        """Read a file of cells; without one nothing is kept."""
        self.path = path
        found = (
            [line for _, line in lines(path) if isinstance(line, dict)] if path is not None else []
        )
        self.known = {
            _key(line["cell"]): line["result"]
            for line in found
            if line.keys() == {"cell", "result"}
        }

    def get(self, cell: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
        """Return what a cell holds, computing and adding it if it is missing.

        Args:
            cell: Everything that decides the result, in plain types.
            compute: Returns the result, in plain types; numbers survive the file exactly.
        """
        key = _key(cell)
        if key not in self.known:
            self.known[key] = compute()
            if self.path is not None:
                add(self.path, {"cell": cell, "result": self.known[key]})
        return self.known[key]


def _key(cell: Any) -> str:
    return json.dumps(cell, sort_keys=True)
