"""Run every benchmark but the longest with its defaults, one after the other, and keep the figures
of each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import bench, cli
from ..console import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where the figures go."""
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("runs/bench"),
        help="where NAME.json goes (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    """Run the benchmarks in the order of their table."""
    failed = []
    for name in bench.BENCHMARKS:
        # The last two take hours
        if (
            name not in ("all", "pages", "status", "suite", "speedrun")
            and cli.main(["bench", name, "--json", str(args.directory / f"{name}.json")]) != 0
        ):
            failed.append(name)
    if failed:
        raise UserError(f"these benchmarks failed, see above: {', '.join(failed)}")
