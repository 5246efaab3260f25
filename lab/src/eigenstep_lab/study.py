"""One runner for all benchmarks: what is to be computed is computed once, by as many processes as
one likes, kept in one file, and reported.

A benchmark is a module with

    cells(args, found)     what to compute: by name, a `Cell`, or a function that returns a `Plan`,
                           for searches whose next cell depends on the last one's result. It is
                           asked again with all that was found, as long as it has new names.
    report(args, found)    the figures, as plain dicts, lists, strings and numbers. What is under
                           "tables" is printed, and put into pages by `eigenstep bench pages`.

and, if it wants, RESULTS, the file in which results are kept unless another one is named (without
one they are not), and PARTIAL, if it can report what is there when not everything is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

from .console import UserError, track
from .results import Table, Verdict, verdict_table
from .store import Cells


@dataclass(frozen=True)
class Cell:
    """Something to compute.

    Attributes:
        key: Everything that decides the result but our code, in plain types.
        compute: Returns the result, in plain types; numbers survive the file exactly. Without it
            the result is only looked up.
        behavior: The behavior of our code that the result depends on, if it does.
    """

    key: Mapping[str, Any]
    compute: Callable[[], Any] | None
    behavior: str = ""


class Missing(Exception):
    """A result is not there, and not to be computed."""


Plan = Generator[Cell, Any, Any]
"""Yields cells, is sent their results, and returns a value."""
Plans = Mapping[Any, Cell | Callable[[], Plan]]


@dataclass(frozen=True)
class Followed:
    """What a plan returned, nothing if a cell was missing; and the behaviors that it used."""

    value: Any
    behaviors: frozenset[str]


def follow(plan: Cell | Callable[[], Plan], path: Path | None, *, show: bool) -> Followed:
    """Go through a plan, computing what is not in a file, and adding it.

    Args:
        plan: What to compute.
        path: The file; without one nothing is kept.
        show: Whether nothing is computed.
    """
    results = Cells(None) if path is None else _opened(path, path.exists() and path.stat().st_size)
    behaviors = set[str]()
    running = _one(plan) if isinstance(plan, Cell) else plan()
    answer = None
    try:
        while True:
            cell = running.send(answer)
            behaviors.update(filter(None, cell.behavior.split("+")))
            answer = _result(results, cell, show)
    except StopIteration as stop:
        return Followed(stop.value, frozenset(behaviors))
    except Missing:
        return Followed(None, frozenset(behaviors))


@lru_cache(1)
def _opened(path: Path, size: int) -> Cells:
    """Return what is in a file, read again only if it has another size."""
    return Cells(path)


def _one(cell: Cell) -> Plan:
    return (yield cell)


def _result(results: Cells, cell: Cell, show: bool) -> Any:
    key = {**cell.key, "behavior": cell.behavior}
    compute = cell.compute

    def plain() -> Any:
        if compute is None or show:
            raise Missing
        return json.loads(json.dumps(compute()))

    return results.get(key, plain)


def execute(
    plans: Plans, *, path: Path | None = None, jobs: int = 1, show: bool = False, title: str = ""
) -> dict[Any, Followed]:
    """Follow plans, so many side by side; one that fails does not stop the others.

    Args:
        plans: What to compute, by name.
        path: File of results.
        jobs: Number of processes of one thread each; with one, this process computes.
        show: Whether nothing is computed.
        title: What the progress bar says.
    """
    found: dict[Hashable, Followed] = {}
    failed: list[str] = []
    for name, finish in track(_finishing(plans, path, jobs, show), title, total=len(plans)):
        try:
            found[name] = finish()
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if len(plans) == 1 or isinstance(error, UserError):
                raise
            failed.append(f"{name}: {type(error).__name__}: {error}")
    if failed:
        raise UserError("these failed, all others are kept:\n" + "\n".join(failed))
    return {name: found[name] for name in plans}


def _finishing(
    plans: Plans, path: Path | None, jobs: int, show: bool
) -> Iterator[tuple[Any, Callable[[], Followed]]]:
    """Give names of plans, and what waits for their values, as they are done."""
    if jobs == 1 or len(plans) == 1:
        for name, plan in plans.items():
            yield name, partial(follow, plan, path, show=show)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=one_thread) as pool:
        futures = {pool.submit(follow, plan, path, show=show): name for name, plan in plans.items()}
        for future in as_completed(futures):
            yield futures[future], future.result


def one_thread() -> None:
    """Keep torch to one thread in this process."""
    import torch

    torch.set_num_threads(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what all benchmarks have."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the figures to FILE, with versions and command",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes of one thread each (default: %(default)s)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="keep results in FILE, and compute none that is there",
    )
    parser.add_argument("--show", action="store_true", help="compute nothing, show what is there")


def run(module: ModuleType, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Run a benchmark, and return its figures and the behaviors that they depend on."""
    if args.jobs < 1:
        raise UserError(f"--jobs must be at least 1, got {args.jobs}")
    path = args.results or getattr(module, "RESULTS", None)
    title = module.__name__.rpartition(".")[2].capitalize()
    found: dict[Any, Any] = {}
    behaviors = set[str]()
    while plans := _new(module.cells(args, found), found):
        done = execute(plans, path=path, jobs=args.jobs, show=args.show, title=title)
        for name, followed in done.items():
            found[name] = followed.value
            behaviors |= followed.behaviors
    missing = sum(value is None for value in found.values())
    if args.show and missing and not getattr(module, "PARTIAL", False):
        raise UserError(
            f"{missing} of {len(found)} results are not in {path}: run it without --show"
        )
    return module.report(args, found), sorted(behaviors)


def _new(plans: Plans, found: Mapping[Any, Any]) -> Plans:
    return {name: plan for name, plan in plans.items() if name not in found}


def nested(found: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return results by name as nested dicts; numbers at the end of names make lists."""
    tree: dict[Any, Any] = {}
    for names, value in found.items():
        place = tree
        for name in names[:-1]:
            place = place.setdefault(name, {})
        place[names[-1]] = value
    return _with_lists(tree)


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(name, int) for name in tree):
        return list(tree.values())
    return {name: _with_lists(branch) for name, branch in tree.items()}


def figures(
    plain: Mapping[str, Any], verdicts: list[Verdict], tables: list[Table], title: str
) -> dict[str, Any]:
    """Return a report: plain figures, verdicts, and tables, of which the last shows the verdicts.

    Args:
        plain: The figures.
        verdicts: What follows from them.
        tables: What shows them.
        title: Of the table of verdicts.
    """
    shown = [*tables, verdict_table(title, verdicts)] if verdicts else tables
    return {
        **plain,
        "verdicts": [{**asdict(v), "holds": v.holds} for v in verdicts],
        "tables": [asdict(table) for table in shown if table.rows],
    }
