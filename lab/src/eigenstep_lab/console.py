"""Tables, progress bars and result files for the command line."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from eigenstep.core.progress import require

T = TypeVar("T")

MOST_THREADS = 1024
"""Many more of them make torch crash."""
LARGEST_SEED = 2**32 - 1
"""What every generator of random numbers takes."""


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
    """Return rich's display of several progress bars, to be used in a `with` statement; it may be
    kept invisible.
    """
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
    except (OSError, RuntimeError) as error:
        raise _failure(error, path) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _failure(error: BaseException, path: Path) -> BaseException:
    """Return the error of the operating system that is behind another one, such as torch's, with
    the file's name.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return error if cause is None else OSError(cause.errno, cause.strerror, str(path))


def check_place(path: Path, *, folder: bool = False) -> None:
    """Raise unless a file, or a folder with files, can be written at `path`; nothing is
    left there.
    """
    if path.exists() and path.is_dir() is not folder:
        raise UserError(f"cannot write to {path}: it is {'no folder' if folder else 'a folder'}")
    place = path if folder else path.parent
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise UserError(f"cannot write to {path}: {place}: {error.strerror}") from error


def explain(error: OSError) -> str:
    """Say in one sentence what the operating system did not do, and what can be done about it."""
    what = (
        f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    )
    advice = {
        errno.ENOSPC: "make room",
        errno.EDQUOT: "make room",
        errno.EFBIG: "allow larger files",
    }
    return what + (
        f"; {advice[error.errno]} and repeat the command" if error.errno in advice else ""
    )


def between(least: int, most: int) -> Callable[[str], int]:
    """Return a type of arguments of the command line: whole numbers within limits."""

    def whole_number(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be between {least} and {most}")
        return number

    return whole_number


def write_json(path: Path, result: Any) -> None:
    """Write a result so that a reader never sees half of it; NaN and infinity, unknown to JSON,
    become null.
    """
    with atomic_write(path) as file:
        file.write(json.dumps(_finite(result), indent=1, allow_nan=False).encode() + b"\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
