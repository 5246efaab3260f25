"""Progress bars, and the optional packages that something needs."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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


Show = Callable[[int, str], None]
"""``show(done, text)`` moves the bar and writes beside it."""


@contextmanager
def bar(total: int, wanted: bool = True) -> Iterator[Show]:
    """Show a progress bar, or a silent one unless it is wanted."""
    if not wanted:
        yield lambda done, text: None
        return
    with require("rich.progress", "rich").Progress() as display:
        task = display.add_task("starting", total=total)
        yield lambda done, text: display.update(task, completed=done, description=text)
