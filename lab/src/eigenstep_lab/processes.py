"""Calls in several processes, as many at a time as there are processes."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, TypeVar

Name = TypeVar("Name")
Value = TypeVar("Value")
Call = tuple[Name, tuple[Any, ...]]
"""What a call is for, and its arguments."""


def call_all(
    function: Callable[..., Value], calls: Iterator[Call[Name]], jobs: int
) -> Iterator[tuple[Name, Value]]:
    """Yield what each call is for with its value, as soon as it is there.

    Calls are drawn only when a process is free. Processes are stopped if this one is interrupted.

    Args:
        function: What to call.
        calls: Names and arguments of the calls.
        jobs: Number of processes; with one, this process does everything.
    """
    if jobs == 1:
        return ((name, function(*arguments)) for name, arguments in calls)
    return _call_in_processes(function, calls, jobs)


def _call_in_processes(
    function: Callable[..., Value], calls: Iterator[Call[Name]], jobs: int
) -> Iterator[tuple[Name, Value]]:
    running: dict[Future[Value], Name] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool, _stopping_processes():
        for name, arguments in calls:
            running[pool.submit(function, *arguments)] = name
            if len(running) == jobs:
                yield from _finished(running)
        while running:
            yield from _finished(running)


@contextlib.contextmanager
def _stopping_processes() -> Iterator[None]:
    """Stop all processes if this one is interrupted."""
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise


def _finished(running: dict[Future[Value], Name]) -> Iterator[tuple[Name, Value]]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        yield running.pop(future), future.result()
