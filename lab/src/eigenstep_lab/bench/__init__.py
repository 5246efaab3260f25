"""Measure eigenstep against other methods. Each benchmark prints tables; --json FILE keeps the
figures.

A benchmark is a module with `add_arguments(parser)`, and with `cells` and `report` as
`eigenstep_lab.study` wants them. To add one, write its module and add one line to BENCHMARKS.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

from eigenstep import __version__

from .. import study
from ..cli import Command, add_commands
from ..console import print_table, write_json

BENCHMARKS: Mapping[str, Command] = {
    "curvature": Command(
        "eigenstep_lab.bench.curvature", "how well learned curvature predicts the next gradient"
    ),
    "step": Command(
        "eigenstep_lab.bench.step", "CPU time, matrix work and memory of an optimizer step"
    ),
    "suite": Command(
        "eigenstep_lab.bench.suite",
        "held-out loss on sixteen tasks of different families, by optimizer",
    ),
    "speedrun": Command(
        "eigenstep_lab.bench.suite.speedrun", "steps to a fixed loss of a modern GPT, by optimizer"
    ),
    "spd": Command(
        "eigenstep_lab.bench.spd",
        "minimize over positive-definite matrices, against pymanopt and geoopt",
    ),
    "search": Command(
        "eigenstep_lab.bench.search", "search without gradients, against pycma and cmaes"
    ),
    "scaling": Command(
        "eigenstep_lab.bench.scaling", "what a step costs on many GPUs: model and measurements"
    ),
    "inference": Command(
        "eigenstep_lab.bench.inference",
        "Gaussian posteriors against exact ones and Monte Carlo, by curvature",
    ),
    "posterior": Command(
        "eigenstep_lab.bench.posterior",
        "posteriors of small networks, against IVON, Laplace and others",
    ),
    "all": Command(
        "eigenstep_lab.bench.every", "run every benchmark with its defaults", computes=False
    ),
    "status": Command(
        "eigenstep_lab.bench.status",
        "which published figures and tables are of today's code",
        computes=False,
    ),
    "pages": Command(
        "eigenstep_lab.bench.pages", "put the tables of --json files into pages", computes=False
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand per benchmark, with what all have in common."""
    add_commands(parser, BENCHMARKS, dest="benchmark", add_common=study.add_arguments)


def run(args: argparse.Namespace) -> None:
    """Run the chosen benchmark, print its tables and, if asked, write what it returned."""
    if hasattr(args.benchmark, "run"):
        args.benchmark.run(args)
        return
    origin = versions()  # before anything is written: pictures may go into the repository
    result, behaviors = study.run(args.benchmark, args)
    for table in result.get("tables", ()):
        print_table(table["title"], table["columns"], table["rows"])
    if args.json:
        file = {"command": args.command, **origin, "behavior": behaviors, "result": result}
        write_json(args.json, file)
        print(f"Figures written to {args.json}")


def versions() -> dict[str, str]:
    """Name the versions that figures depend on."""
    import torch

    return {
        "eigenstep": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def commit() -> str:
    """Name the commit that this code is at, and whether it has changes; "unknown" outside of a
    repository.
    """
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.stdout.strip()
