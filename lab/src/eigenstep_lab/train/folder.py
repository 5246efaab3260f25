"""The folder of a run: one process at a time works in it."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ..console import UserError
from . import checkpoint

LOCK = ".lock"


@contextlib.contextmanager
def occupied(directory: Path) -> Iterator[None]:
    """Make a folder if it is not there, and keep other processes out of it.

    The operating system lets go of the lock when the process ends, in whichever way; the file of
    the lock stays.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("ab") as file:
        if not _lock(file):
            raise UserError(
                f"another process is at work in {directory}: wait until it has ended, or choose "
                "another --directory"
            )
        yield


def _lock(file: IO[bytes]) -> bool:
    """Lock a file for this process, and tell whether no other process has done so."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            # Processes that are forked from this one do not keep it
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Others: a file system without locks
        return error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
    return True


def delete_run(directory: Path) -> None:
    """Delete the files of a run, and nothing else that may be in its folder."""
    for pattern in (
        "step-*.pt",
        "step-*.dcp",
        "model.pt",
        "result.json",
        "log.csv",
        "events.out.tfevents.*",
    ):
        for path in directory.glob(pattern):
            checkpoint.delete(path)
