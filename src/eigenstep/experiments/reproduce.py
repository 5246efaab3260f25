"""Reproduce the paper's figures: each shows the paper's scheme and ours against the paper's baselines.

Every figure ends in verdicts: the paper's claim, the measured figure, and whether the claim holds, as computed from
it. Numbers go to FIGURE.json, pictures to FIGURE.png and FIGURE.svg; `all` also writes report.html, one page that
holds everything. The same command and seed give the same numbers, times excepted.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from .bench import versions
from .console import UserError, print_table
from .figures import FIGURES
from .report import Section, write_figure, write_report
from .results import Result, verdict_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which figure, how thoroughly and where."""
    names = ", ".join(FIGURES)
    parser.add_argument("figure", metavar="FIGURE", choices=[*FIGURES, "all"], help=f"{names}, or all")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="few seeds, short runs: minutes for all figures (default)")
    size.add_argument("--full", action="store_true", help="many seeds, long runs: about an hour for all figures")
    parser.add_argument("--seed", type=int, default=0, help="decides all random numbers (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where to compute, for example cuda (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="figures to make side by side (default: %(default)s)")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/reproduce"), help="where files go (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> None:
    """Make the figures, one after the other; one that cannot be made does not stop the others."""
    if args.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {args.jobs}")
    device = _device(args.device)
    names = list(FIGURES) if args.figure == "all" else [args.figure]
    origin = {"command": args.command, "seed": args.seed, "device": args.device, **versions()}
    sections = []
    for section in _make_all(names, args.jobs, partial(make, full=args.full, seed=args.seed, device=device)):
        sections.append(section)
        name = section.name
        if isinstance(section.result, Result):
            write_figure(args.directory, section, origin)
            table = verdict_table(section.title, section.result.verdicts)
            print_table(table.title, table.columns, table.rows)
            print(f"Numbers and pictures written to {args.directory / name}.json, .png and .svg")
        else:
            print(f"{section.title}: {section.result}")
    if args.figure == "all":
        write_report(args.directory / "report.html", sections, origin)
        print(f"Everything in one page: {args.directory / 'report.html'}")
    failed = [s.name for s in sections if isinstance(s.result, str)]
    if failed:
        raise UserError(f"these figures could not be made, see above: {', '.join(failed)}")


def _make_all(names: Sequence[str], jobs: int, make_one: Callable[[str], Section]) -> Iterator[Section]:
    """Make figures one after the other or side by side; they come in the order of their names."""
    if jobs == 1:
        yield from map(make_one, names)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        # The last figures train networks and take longest: they start first.
        pending = {name: pool.submit(make_one, name) for name in reversed(names)}
        for name in names:
            yield pending[name].result()


def make(name: str, *, full: bool, seed: int, device: torch.device, settings: Any = None) -> Section:
    """Make one figure.

    Args:
        name: One of `FIGURES`.
        full: Whether to take the settings for long runs.
        seed: Decides all random numbers.
        device: Where to compute.
        settings: Other settings than those of the module.
    """
    torch.set_num_threads(1)  # the matrices are small: threads would only wait for each other
    module = importlib.import_module(FIGURES[name].module)
    settings = settings or (module.FULL if full else module.QUICK)
    command = shlex.join(["eigenstep", "reproduce", name, "--full" if full else "--quick", "--seed", str(seed)])
    start = time.perf_counter()
    try:
        result: Result | str = module.run(settings, seed=seed, device=device)
    except UserError as error:
        result = str(error)
    seconds = time.perf_counter() - start
    known: Mapping[str, Any] = asdict(settings)
    return Section(name, FIGURES[name].title, module.__doc__ or "", known, command, seconds, result)


def _device(name: str) -> torch.device:
    """Return the device, or say that there is none."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
