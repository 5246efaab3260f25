"""Download an archive with the package manager that publishes it, and unpack it.

An archive is used only if its SHA-256 checksum is the one that is known beforehand. Nothing in it
is run.
"""

from __future__ import annotations

import fnmatch
import gzip
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from ..checksums import digest
from ..console import UserError

MOST_BYTES = 1 << 30
"""An archive that is larger than this when unpacked is none of ours."""
CHUNK = 1 << 20


def download(command: Sequence[str], sha256: str, members: str, folder: Path) -> None:
    """Run a command that leaves one archive, and make `folder` hold files from it.

    The folder is replaced in one go once everything has arrived, so that it never holds half a
    dataset.

    Args:
        command: Downloads one .tar.gz, .tgz or .deb archive into the directory it is run in.
        sha256: Checksum of the archive.
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
            archive = _only_file(arrived, command)
            checksum = digest(archive)
            if checksum != sha256:
                raise UserError(
                    f"{archive.name} is not what was expected: its SHA-256 checksum is {checksum}, "
                    f"not {sha256}. It was "
                    "damaged on its way, or somebody has changed it; nothing of it was used. Try "
                    "again"
                )
            tar = Path(scratch, "archive.tar")
            _decompress(archive, tar)
            _unpack(tar, members, unpacked)
            if folder.exists():
                shutil.rmtree(folder)
            unpacked.rename(folder)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UserError(f"could not download into {folder}: {error}") from error


def _run(command: Sequence[str], directory: Path) -> None:
    _require(command)
    done = subprocess.run(
        command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise UserError(f"`{shlex.join(command)}` failed with status {done.returncode}:\n{said}")


def _require(command: Sequence[str]) -> None:
    if shutil.which(command[0]) is None:
        raise UserError(
            f"this download needs the program {command[0]!r}, which is not installed: "
            f"{shlex.join(command)}"
        )


def _only_file(directory: Path, command: Sequence[str]) -> Path:
    files = list(directory.iterdir())
    if len(files) != 1 or files[0].is_symlink() or not files[0].is_file():
        raise UserError(
            f"`{shlex.join(command)}` should leave one archive behind, but left {len(files)} files"
        )
    return files[0]


def _decompress(archive: Path, tar: Path) -> None:
    """Write the tar file inside an archive, which is read to its very end."""
    if archive.suffix != ".deb":
        with gzip.open(archive) as content:
            _copy(content, tar)
        return
    command = ("dpkg-deb", "--fsys-tarfile", str(archive))
    _require(command)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            _copy(process.stdout, tar)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise UserError(f"{archive.name} is no package that dpkg-deb can read")


def _copy(content: IO[bytes] | gzip.GzipFile, target: Path) -> None:
    written = 0
    with target.open("wb") as file:
        while chunk := content.read(CHUNK):
            written += len(chunk)
            if written > MOST_BYTES:
                raise UserError(
                    f"the archive holds more than {MOST_BYTES:,} bytes: nothing of it was used"
                )
            file.write(chunk)


def _unpack(tar: Path, members: str, folder: Path) -> None:
    with tarfile.open(tar, "r:") as entries:
        for entry in entries:
            path = PurePosixPath(entry.name)
            if path.is_absolute() or ".." in path.parts:
                raise UserError(
                    f"the archive has a file outside of its own folder, {entry.name!r}: nothing "
                    "was used"
                )
            if not fnmatch.fnmatch(entry.name, members) or entry.isdir():
                continue
            content = entries.extractfile(entry) if entry.isreg() else None
            if content is None:
                raise UserError(
                    f"{entry.name!r} in the archive is a link, not a file: nothing was used"
                )
            with content, (folder / path.name).open("xb") as file:
                shutil.copyfileobj(content, file)
    if not any(folder.iterdir()):
        raise UserError(f"the archive has no files {members!r}")
