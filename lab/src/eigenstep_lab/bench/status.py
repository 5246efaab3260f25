"""List every published figure and table with the command and the behavior of the code that it was
made with, and say which are stale.

Published is what stands between "<!-- tables of FILE -->" and "<!-- end of tables -->" on a page,
pictures of the same name, and what the text gives a command for, `eigenstep bench NAME ...`, if a
file of results was made by it. Figures are stale if a part of the code that they depend on does
something else today (`eigenstep_lab.behavior`), or if their command does not exist any more.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from .. import bench
from ..behavior import stale
from ..console import UserError
from .pages import PLACE, read

PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]*results/[^)]+)\.(?:png|svg)\)")
COMMAND = re.compile(r"`(eigenstep bench [^`]+)`")
IRRELEVANT = ("--json", "--plot", "--results", "--jobs")
"""Options with a value that do not decide the figures."""


@dataclass(frozen=True)
class Published:
    """A place with figures, and what its file says of how they were made, if there is one."""

    page: str
    what: str
    command: str = ""
    commit: str = ""
    behaviors: tuple[str, ...] | None = None

    @classmethod
    def of(cls, page: Path, what: str, file: Mapping[str, Any]) -> Published:
        """Return a place whose figures are in a file of `--json`, or in the report of figures."""
        behaviors = file.get("behavior")
        if behaviors is None and ":" in file.get("code", ""):
            behaviors = file["code"].split("+")
        known = None if behaviors is None else tuple(behaviors)
        return cls(page.name, what, file["command"], file.get("commit", "unknown"), known)

    @property
    def status(self) -> str:
        """Whether the figures are of today's code."""
        words = self.command.split()
        if not words:
            return "no file of results"
        if words[1] == "bench" and words[2] not in bench.BENCHMARKS:
            return "stale: its command is gone"
        if self.behaviors is None:
            return "stale: behavior unknown"
        parts = stale(self.behaviors)
        return f"stale: {', '.join(parts)}" if parts else "today's"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where the pages are."""
    parser.add_argument(
        "--project", type=Path, default=Path(), help="folder with README.md and docs (default: .)"
    )


def run(args: argparse.Namespace) -> None:
    """Print the list."""
    pages = [args.project / "README.md", *sorted((args.project / "docs").glob("*.md"))]
    pages = [page for page in pages if page.is_file()]
    if not pages:
        raise UserError(f"there is no README.md and no docs/*.md in {args.project}")
    entries = list(published(pages))
    for page, group in groupby(entries, key=attrgetter("page")):
        print(page)
        for entry in group:
            print(f"  {entry.what}: {entry.status}")
            if entry.command:
                behaviors = ", ".join(entry.behaviors or ("unknown behavior",))
                print(f"    {entry.command}")
                print(f"    at commit {entry.commit}, {behaviors}")
    count = sum(entry.status.startswith("stale") for entry in entries)
    print(f"{len(entries)} published, {count} stale")


def published(pages: list[Path]) -> Iterator[Published]:
    """Give all places of figures on pages."""
    known = known_files(pages)
    for page in pages:
        text = page.read_text("utf-8")
        for place in PLACE.finditer(text):
            yield Published.of(page, f"tables of {place[2]}", read(page.parent / place[2]))
        yield from pictures(page, text)
        for command in dict.fromkeys(COMMAND.findall(PLACE.sub("", text))):
            if essence(command) in known:
                what = f"text, `{' '.join(command.split())}`"
                yield Published.of(page, what, known[essence(command)])


def pictures(page: Path, text: str) -> Iterator[Published]:
    """Give the pictures of benchmarks on a page, and the figures of the paper."""
    for picture in PICTURE.finditer(text):
        path = (page.parent / picture[1]).with_suffix(".json")
        what = f"picture {picture[1]}"
        bare = Published(page.name, what)
        yield Published.of(page, what, read(path)) if path.is_file() else bare
    report = page.with_suffix("") / "report.json"
    if report.is_file():
        yield Published.of(page, "figures and verdicts", json.loads(report.read_text("utf-8")))


def known_files(pages: Iterable[Path]) -> dict[str, Mapping[str, Any]]:
    """Return what benchmarks wrote beside pages, by the command that did."""
    known: dict[str, Mapping[str, Any]] = {}
    for folder in dict.fromkeys(page.parent for page in pages):
        for path in sorted([*folder.glob("results/*.json"), *folder.glob("docs/results/*.json")]):
            file = read(path)
            known[essence(file["command"])] = file
    return known


def essence(command: str) -> str:
    """Return a command without what does not decide its figures."""
    words = shlex.split(command)
    kept = []
    skip = False
    for word in words:
        if not skip and word not in (*IRRELEVANT, "--show"):
            kept.append(word)
        skip = word in IRRELEVANT
    return " ".join(kept)
