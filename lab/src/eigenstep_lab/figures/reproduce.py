"""Reproduce the paper's figures: each shows the paper's scheme and ours against the paper's baselines.

Every figure ends in verdicts: the paper's claim, the measured figure, and whether the claim holds, as computed from
it. Numbers go to FIGURE.json, pictures to FIGURE.png and FIGURE.svg; `all` also writes report.html, one page that
holds everything, and its verdicts to report.json. The same command and seed give the same numbers, times excepted.
Interrupt it as you like: figures that are in --directory already, made with the same settings, seed and versions, are
not made again, nor are the parts of those that train networks, which are in --directory/parts.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ..bench import commit, versions
from ..console import LARGEST_SEED, UserError, between, print_table, write_json
from ..results import Result, verdict_table
from ..train.building import choose_device
from . import FIGURES
from .report import Section, read_figure, write_figure, write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which figure, how thoroughly and where."""
    names = ", ".join(FIGURES)
    parser.add_argument("figure", metavar="FIGURE", choices=[*FIGURES, "all"], help=f"{names}, or all")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="few seeds, short runs: minutes for all figures (default)")
    size.add_argument("--full", action="store_true", help="many seeds, long runs: hours on two cores for all")
    parser.add_argument(
        "--seed", type=between(0, LARGEST_SEED), default=0, help="decides all random numbers (default: %(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="where to compute, for example cuda (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="make figures again that are in --directory already")
    cores = min(2, os.cpu_count() or 1)  # more gain little: one figure takes as long as all others
    parser.add_argument("--jobs", type=int, default=cores, help="figures to make side by side (default: %(default)s)")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/reproduce"), help="where files go (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> None:
    """Make the figures, one after the other; one that cannot be made does not stop the others."""
    if args.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {args.jobs}")
    device = choose_device(args.device)
    names = list(FIGURES) if args.figure == "all" else [args.figure]
    origin = {"seed": args.seed, "device": args.device, **versions()}
    plans = [plan(name, full=args.full, seed=args.seed) for name in names]
    kept = {p.name: read_figure(args.directory, p, origin) for p in plans if not args.again}
    for planned in plans if args.again else ():
        shutil.rmtree(args.directory / "parts" / planned.name, ignore_errors=True)
    missing = [p for p in plans if kept.get(p.name) is None]
    made = _make_all(
        missing, args.jobs, partial(_make_and_write, directory=args.directory, device=device, origin=origin)
    )
    sections = []
    for name in names:
        section = kept.get(name)
        if section is None:
            section = next(made)
        else:
            print(f"{section.title}: made before, at commit {section.commit}; --again makes it anew")
        sections.append(section)
        if isinstance(section.result, Result):
            table = verdict_table(section.title, section.result.verdicts)
            print_table(table.title, table.columns, table.rows)
            print(f"Numbers and pictures are in {args.directory / name}.json, .png and .svg")
        else:
            print(f"{section.title}: {section.result}")
    if args.figure == "all":
        origin = {"command": args.command, **origin}
        write_report(args.directory / "report.html", sections, origin)
        done = [(f"{s.title} (commit {s.commit})", s.result) for s in sections if isinstance(s.result, Result)]
        tables = [asdict(verdict_table(title, result.verdicts)) for title, result in done]
        write_json(args.directory / "report.json", {**origin, "result": {"tables": tables}})
        print(f"Everything in one page: {args.directory / 'report.html'}")
    failed = [s.name for s in sections if isinstance(s.result, str)]
    if failed:
        raise UserError(f"these figures could not be made, see above: {', '.join(failed)}")


def _make_all(plans: Sequence[Section], jobs: int, make_one: Callable[[Section], Section]) -> Iterator[Section]:
    """Make figures one after the other or side by side; they come in the order of the plans."""
    if jobs == 1 or len(plans) == 1:
        yield from map(make_one, plans)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        # The last figures train networks and take longest: they start first.
        pending = [pool.submit(make_one, planned) for planned in reversed(plans)]
        for future in reversed(pending):
            yield future.result()


def plan(name: str, *, full: bool, seed: int) -> Section:
    """Describe a figure that is still to be made.

    Args:
        name: One of `FIGURES`.
        full: Whether to take the settings for long runs.
        seed: Decides all random numbers.
    """
    module = importlib.import_module(FIGURES[name].module)
    settings: Mapping[str, Any] = asdict(module.FULL if full else module.QUICK)
    command = shlex.join(["eigenstep", "reproduce", name, "--full" if full else "--quick", "--seed", str(seed)])
    return Section(name, FIGURES[name].title, module.__doc__ or "", settings, command, 0.0, commit(), "not made yet")


def _make_and_write(planned: Section, *, directory: Path, device: torch.device, origin: Mapping[str, Any]) -> Section:
    """Make one figure and write it at once, so that it is kept if others are interrupted."""
    section = make(planned, seed=origin["seed"], device=device, parts=directory / "parts" / planned.name)
    if isinstance(section.result, Result):
        write_figure(directory, section, origin)
    return section


def make(planned: Section, *, seed: int, device: torch.device, parts: Path | None = None) -> Section:
    """Make one figure.

    Args:
        planned: What `plan` gave, perhaps with other settings.
        seed: Decides all random numbers.
        device: Where to compute.
        parts: Where figures that train networks keep what is done; nowhere by default.
    """
    torch.set_num_threads(1)  # the matrices are small: threads would only wait for each other
    module = importlib.import_module(FIGURES[planned.name].module)
    start = time.perf_counter()
    more = {"parts": parts} if FIGURES[planned.name].in_parts else {}
    try:
        result: Result | str = module.run(module.Settings(**planned.settings), seed=seed, device=device, **more)
    except UserError as error:
        result = str(error)
    return replace(planned, seconds=time.perf_counter() - start, result=result)
