"""A progress bar that a function shows if it is asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .extras import require

Show = Callable[[int, str], None]  # To be told how much is done, and what to write beside the bar


@contextmanager
def bar(total: int, wanted: bool) -> Iterator[Show]:
    """Show a progress bar, or a silent one unless it is wanted."""
    if not wanted:
        yield lambda done, text: None
        return
    Progress = require("rich.progress", "rich").Progress
    with Progress() as display:
        task = display.add_task("starting", total=total)
        yield lambda done, text: display.update(task, completed=done, description=text)
