"""Download an archive with the package manager that publishes it, and unpack the files wanted from it."""

from __future__ import annotations

import fnmatch
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..console import UserError


def download(command: Sequence[str], members: str, folder: Path) -> None:
    """Run a command that leaves one archive behind, and make `folder` hold the files wanted from it.

    The folder is replaced in one go once everything has arrived, so that it never holds half a dataset.

    Args:
        command: Downloads one .tar.gz, .tgz or .deb archive into the directory it is run in.
        members: Pattern of the wanted files' paths inside the archive.
        folder: Where the files go, without their directories.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
            arrived, unpacked = Path(scratch, "arrived"), Path(scratch, "unpacked")
            arrived.mkdir()
            unpacked.mkdir()
            _run(command, arrived)
            _unpack(_only_file(arrived, command), members, unpacked)
            if folder.exists():
                shutil.rmtree(folder)
            unpacked.rename(folder)
    except (OSError, EOFError, tarfile.TarError) as error:
        raise UserError(f"could not download into {folder}: {error}") from error


def _run(command: Sequence[str], directory: Path) -> None:
    if shutil.which(command[0]) is None:
        raise UserError(
            f"this download needs the program {command[0]!r}, which is not installed: {shlex.join(command)}"
        )
    done = subprocess.run(command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise UserError(f"`{shlex.join(command)}` failed with status {done.returncode}:\n{said}")


def _only_file(directory: Path, command: Sequence[str]) -> Path:
    found = list(directory.iterdir())
    if len(found) != 1:
        raise UserError(f"`{shlex.join(command)}` should leave one archive behind, but left {len(found)} files")
    return found[0]


def _unpack(archive: Path, members: str, folder: Path) -> None:
    if archive.suffix == ".deb":
        tar = archive.with_suffix(".tar")
        _run(("sh", "-c", 'dpkg-deb --fsys-tarfile "$0" > "$1"', str(archive), str(tar)), archive.parent)
        archive = tar
    with tarfile.open(archive) as entries:
        for entry in entries:
            content = entries.extractfile(entry) if fnmatch.fnmatch(entry.name, members) else None
            if content is not None:
                # Only the last part of the path counts: an archive cannot write outside the folder.
                (folder / Path(entry.name).name).write_bytes(content.read())
    if not any(folder.iterdir()):
        raise UserError(f"{archive.name} has no files {members!r}")
