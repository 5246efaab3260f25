"""How searches report: results, progress bars, and the optional packages that they need."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a search went; what it found is in the attributes of each kind of result.

    Attributes:
        success: whether it found what it was asked for.
        reason: why it ended, as one word to compare with.
        message: why it ended, as a sentence to read.
        nit: number of steps.
        nfev: number of values of the function that were computed.
        ngrad: number of gradients that were computed.
        history: what is known of each step.
    """

    success: bool
    reason: str
    message: str
    nit: int
    nfev: int
    ngrad: int = 0
    history: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Ending:
    """Why a search is over: the part of a ``Result`` of that name."""

    reason: str  # one word
    message: str  # a sentence
    success: bool = False  # whether it found what it was asked for


RUNNING = Ending("running", "still running")  # What callbacks see


class MissingPackage(ImportError):
    """An optional package is not installed; the message says how to install it."""


def require(module: str, install: str) -> Any:
    """Import an optional package, or say what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"this needs the package {module!r}, which cannot be imported ({error}). "
            f"Install it with: pip install '{install}'"
        ) from error


Show = Callable[[int, str], None]  # To be told how much is done, and what to write beside the bar


@contextmanager
def bar(total: int, wanted: bool) -> Iterator[Show]:
    """Show a progress bar, or a silent one unless it is wanted."""
    if not wanted:
        yield lambda done, text: None
        return
    with require("rich.progress", "rich").Progress() as display:
        task = display.add_task("starting", total=total)
        yield lambda done, text: display.update(task, completed=done, description=text)
