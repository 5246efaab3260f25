"""SHA-256 checksums of files, in the format of `sha256sum`.

A checksum tells damage from what was saved: a failing disk, a copy that stopped halfway. It is no
signature, because whoever can replace a file can replace a checksum beside it as well; reading the
file must be safe all the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from .console import atomic_write

LINE = re.compile(r"([0-9a-f]{64}) [ *]([A-Za-z0-9_.-]+)")
CHUNK = 1 << 20


def digest(path: Path) -> str:
    """Return the checksum of a file."""
    computed = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            computed.update(chunk)
    return computed.hexdigest()


def write(listing: Path, digests: Mapping[str, str]) -> None:
    """Write checksums of files, by their names, in the format of `sha256sum`."""
    with atomic_write(listing) as file:
        file.write(
            "".join(f"{value}  {name}\n" for name, value in sorted(digests.items())).encode()
        )


def read(listing: Path) -> dict[str, str]:
    """Read checksums of files; a `ValueError` says what is wrong with the list."""
    try:
        *lines, rest = listing.read_bytes().decode(errors="replace").split("\n")
    except FileNotFoundError as error:
        raise ValueError(f"{listing.name}, which holds the checksums, is missing") from error
    matches = [LINE.fullmatch(line) for line in lines]
    digests = {match[2]: match[1] for match in matches if match is not None}
    if not digests or len(digests) != len(lines) or rest:
        raise ValueError(f"{listing.name} is not a list of checksums")
    return digests


def compare(expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raise a `ValueError` that names the first file whose checksum is not what it should be."""
    for name, value in expected.items():
        if found.get(name) != value:
            raise ValueError(f"the checksum of {name} is wrong")
