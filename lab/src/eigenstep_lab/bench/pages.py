"""Put the tables that benchmarks wrote with --json into pages of the documentation.

A page says where the tables go, and which file they come from, by two lines:

    <!-- tables of results/step.json -->
    <!-- end of tables -->

What stands between them is replaced. The file's path is relative to the page.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..console import UserError
from ..results import read_table

PLACE = re.compile(r"(<!-- tables of (\S+) -->\n).*?(<!-- end of tables -->\n)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which pages to fill."""
    parser.add_argument(
        "pages", nargs="+", type=Path, metavar="PAGE", help="Markdown files to rewrite"
    )


def run(args: argparse.Namespace) -> None:
    """Rewrite the pages."""
    for path in args.pages:
        try:
            text = path.read_text()
        except OSError as error:
            raise UserError(f"cannot read the page {path}: {error}") from error
        path.write_text(filled(text, path.parent))
        print(f"{path}: {len(PLACE.findall(text))} places filled")


def filled(text: str, folder: Path) -> str:
    """Return a page with its tables.

    Args:
        text: The page.
        folder: What the paths in it are relative to.
    """

    def replace(place: re.Match[str]) -> str:
        file = read(folder / place[2])
        origin = f"*Made by `{file['command']}` at commit {file.get('commit', 'unknown')}.*"
        return "\n".join(
            (place[1], f"{markdown(file['result']['tables'])}\n\n{origin}\n", place[3])
        )

    return PLACE.sub(replace, text)


def markdown(tables: Iterable[Mapping[str, Any]]) -> str:
    """Return tables, each with its title above it, as Markdown."""
    parts = []
    for table in tables:
        lines = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
        parts.append(
            "\n".join([f"**{table['title']}**", "", *(f"| {' | '.join(line)} |" for line in lines)])
        )
    return "\n\n".join(parts)


def read(path: Path) -> dict[str, Any]:
    """Return what a benchmark wrote."""
    try:
        file = dict(json.loads(path.read_text()))
        file["command"], [read_table(table) for table in file["result"]["tables"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} does not hold tables of a benchmark ({error!r})") from error
    return file
