"""Tables, progress bars and result files for the command line."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from eigenstep.core.extras import require

T = TypeVar("T")


class UserError(ValueError):
    """A mistake that the user can repair; the message alone must be enough to do so."""


def require_peer(module: str) -> Any:
    """Import a package that eigenstep is compared with, or say how to install them all."""
    return require(module, "./lab[peers]")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; numbers should come formatted."""
    from rich.console import Console  # slow to import: not before it is needed
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table, markup=False)


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    """Pass `items` on, with a progress bar."""
    from rich import progress

    return progress.track(items, description, total=total)


def progress(shown: bool = True) -> Any:
    """Return rich's display of several progress bars, to be used in a `with` statement; it may be kept invisible."""
    from rich.progress import Progress

    return Progress(*Progress.get_default_columns(), disable=not shown)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that appears under its name only once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # so that a power cut cannot leave the name without the content
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, result: Any) -> None:
    """Write a result so that a reader never sees half of it; NaN and infinity, unknown to JSON, become null."""
    with atomic_write(path) as file:
        file.write(json.dumps(_finite(result), indent=1, allow_nan=False).encode() + b"\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
