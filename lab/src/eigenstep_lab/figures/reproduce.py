"""Reproduce the paper's figures: the paper's scheme and ours, and its baselines.

Every figure ends in verdicts: the paper's claim, the measured figure, and whether the claim holds,
as computed from it. Numbers go to FIGURE.json, pictures to FIGURE.png and FIGURE.svg; `all` also
writes report.html, one page that holds everything, and its verdicts to report.json. The same
command and seed give the same numbers, times excepted. Interrupt it as you like: figures that are
in --directory already, made with the same settings, seed, versions and code of our optimizers, are
not made again, nor are single trainings of networks, which are kept in --directory/trainings.
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

from ..behavior import behavior
from ..bench import commit, pages, versions
from ..console import LARGEST_SEED, UserError, between, print_table, write_json
from ..results import Result, verdict_table
from ..train.building import choose_device
from . import FIGURES
from .report import Section, read_figure, write_figure, write_pictures, write_report

DEPENDS = ("spectral", "paper", "options", "search", "spd", "update")
"""Parts of the library that figures depend on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which figure, how thoroughly and where."""
    names = ", ".join(FIGURES)
    parser.add_argument(
        "figure", metavar="FIGURE", choices=[*FIGURES, "all"], help=f"{names}, or all"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick",
        action="store_true",
        help="few seeds, short runs: minutes for all figures (default)",
    )
    size.add_argument(
        "--full", action="store_true", help="many seeds, long runs: hours on two cores for all"
    )
    parser.add_argument(
        "--brief",
        action="append",
        choices=FIGURES,
        metavar="FIGURE",
        default=[],
        help="with --full: a figure to make as --quick does; can be repeated",
    )
    parser.add_argument(
        "--seed",
        type=between(0, LARGEST_SEED),
        default=0,
        help="decides all random numbers (default: %(default)s)",
    )
    parser.add_argument(
        "--device", default="cpu", help="where to compute, for example cuda (default: %(default)s)"
    )
    stale = parser.add_mutually_exclusive_group()
    stale.add_argument(
        "--again", action="store_true", help="make figures again that are in --directory already"
    )
    stale.add_argument(
        "--as-made",
        action="store_true",
        help="keep figures that are in --directory whatever version made them; the report names "
        "their commits",
    )
    cores = min(2, os.cpu_count() or 1)  # more gain little: one figure takes as long as all others
    parser.add_argument(
        "--jobs",
        type=int,
        default=cores,
        help="figures to make side by side (default: %(default)s)",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("runs/reproduce"),
        help="where files go (default: %(default)s)",
    )
    parser.add_argument(
        "--publish",
        type=Path,
        metavar="FOLDER",
        help="with all: copy report and pictures to FOLDER, and put the verdicts into the page "
        "FOLDER.md",
    )


def run(args: argparse.Namespace) -> None:
    """Make the figures, one after the other; one that cannot be made does not stop the others."""
    _check(args)
    names = list(FIGURES) if args.figure == "all" else [args.figure]
    origin = {"seed": args.seed, "device": args.device, "code": behavior(*DEPENDS), **versions()}
    plans = [
        plan(name, full=args.full and name not in args.brief, seed=args.seed) for name in names
    ]
    sections = []
    for section, new in _make_or_read(args, plans, origin):
        sections.append(section)
        _show(section, args.directory, new)
    if args.figure == "all":
        _report(args.directory, sections, {"command": args.command, **origin})
    failed = [section.name for section in sections if isinstance(section.result, str)]
    if failed:
        raise UserError(f"these figures could not be made, see above: {', '.join(failed)}")
    if args.publish:
        publish(args.directory, args.publish)


def _check(args: argparse.Namespace) -> None:
    if args.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {args.jobs}")
    if args.publish and not (args.figure == "all" and _page(args.publish).is_file()):
        raise UserError(
            f"--publish is for all figures, and needs the page {_page(args.publish)} to put "
            "verdicts into"
        )


def _make_or_read(
    args: argparse.Namespace, plans: Sequence[Section], origin: Mapping[str, Any]
) -> Iterator[tuple[Section, bool]]:
    """Give all figures in their order, and whether they are new."""
    device = choose_device(args.device)
    needed = {} if args.as_made else origin
    kept = {p.name: None if args.again else read_figure(args.directory, p, needed) for p in plans}
    if args.again:
        for planned in plans:
            _trainings(args.directory, planned).unlink(missing_ok=True)
    missing = [planned for planned in plans if kept[planned.name] is None]
    make_one = partial(_make, directory=args.directory, device=device, origin=origin)
    made = _make_all(missing, args.jobs, make_one)
    for section in kept.values():
        yield (next(made), True) if section is None else (section, False)


def _show(section: Section, directory: Path, new: bool) -> None:
    """Print the verdicts of a figure; one that was made before is drawn as they are today."""
    if not new:
        print(f"{section.title}: made before, at commit {section.commit}; --again makes it anew")
        write_pictures(directory, section)
    if isinstance(section.result, Result):
        table = verdict_table(section.title, section.result.verdicts)
        print_table(table.title, table.columns, table.rows)
        print(f"Numbers and pictures are in {directory / section.name}.json, .png and .svg")
    else:
        print(f"{section.title}: {section.result}")


def _report(directory: Path, sections: Sequence[Section], origin: Mapping[str, Any]) -> None:
    """Write the page that holds everything, and its verdicts."""
    write_report(directory / "report.html", sections, origin)
    tables = [
        asdict(verdict_table(_heading(section), section.result.verdicts))
        for section in sections
        if isinstance(section.result, Result)
    ]
    write_json(directory / "report.json", {**origin, "result": {"tables": tables}})
    print(f"Everything in one page: {directory / 'report.html'}")


def publish(directory: Path, folder: Path) -> None:
    """Copy report and pictures to a folder, and the verdicts into the page beside it."""
    folder.mkdir(exist_ok=True)
    for name in ("report.html", "report.json", *(f"{name}.png" for name in FIGURES)):
        shutil.copyfile(directory / name, folder / name)
    page = _page(folder)
    page.write_text(pages.filled(page.read_text(), page.parent))


def _heading(section: Section) -> str:
    """Name a figure, how thoroughly it was made, and by which version of the code."""
    return (
        f"{section.title} ({'full' if '--full' in section.command else 'quick'} run, commit "
        f"{section.commit})"
    )


def _page(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.md")


def _make_all(
    plans: Sequence[Section], jobs: int, make_one: Callable[[Section], Section]
) -> Iterator[Section]:
    """Make figures one after the other or side by side; they come in the order of the plans."""
    work = {planned.name: shares(planned) for planned in plans}
    if jobs == 1 or sum(map(len, work.values())) == 1:
        yield from map(make_one, plans)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        # The last figures train networks and take longest: they start first.
        pending = {
            name: [pool.submit(make_one, share) for share in work[name]] for name in reversed(work)
        }
        for planned in plans:
            made = [future.result() for future in pending[planned.name]]
            # The trainings of all shares are kept now: the whole figure only reads them.
            yield made[0] if len(made) == 1 else make_one(planned)


def shares(planned: Section) -> list[Section]:
    """Cut a figure that trains networks on several tasks into one for each."""
    tasks = planned.settings.get("tasks", ())
    if len(tasks) < 2:
        return [planned]
    return [
        replace(planned, settings={**planned.settings, "tasks": (task,)}, share=task)
        for task in reversed(tasks)
    ]


def plan(name: str, *, full: bool, seed: int) -> Section:
    """Describe a figure that is still to be made.

    Args:
        name: One of `FIGURES`.
        full: Whether to take the settings for long runs.
        seed: Decides all random numbers.
    """
    module = importlib.import_module(FIGURES[name].module)
    settings: Mapping[str, Any] = asdict(module.FULL if full else module.QUICK)
    command = shlex.join(
        ["eigenstep", "reproduce", name, "--full" if full else "--quick", "--seed", str(seed)]
    )
    return Section(
        name,
        FIGURES[name].title,
        module.__doc__ or "",
        settings,
        command,
        0.0,
        commit(),
        "not made yet",
    )


def _make(
    planned: Section, *, directory: Path, device: torch.device, origin: Mapping[str, Any]
) -> Section:
    """Make one figure and write it at once, so that it is kept if others are interrupted."""
    section = make(
        planned, seed=origin["seed"], device=device, trainings=_trainings(directory, planned)
    )
    if isinstance(section.result, Result) and not section.share:
        write_figure(directory, section, origin)
    return section


def _trainings(directory: Path, planned: Section) -> Path:
    """Return the file in which the trainings of a figure are kept."""
    return directory / "trainings" / f"{planned.name}.jsonl"


def make(
    planned: Section, *, seed: int, device: torch.device, trainings: Path | None = None
) -> Section:
    """Make one figure.

    Args:
        planned: What `plan` gave, perhaps with other settings.
        seed: Decides all random numbers.
        device: Where to compute.
        trainings: File in which figures that train networks keep what is done; none by default.
    """
    torch.set_num_threads(1)  # the matrices are small: threads would only wait for each other
    module = importlib.import_module(FIGURES[planned.name].module)
    start = time.perf_counter()
    more = {"trainings": trainings} if FIGURES[planned.name].trains else {}
    try:
        result: Result | str = module.run(
            module.Settings(**planned.settings), seed=seed, device=device, **more
        )
    except UserError as error:
        result = str(error)
    return replace(planned, seconds=time.perf_counter() - start, result=result)
