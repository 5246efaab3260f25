"""How searches report."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a search went; subclasses have what came out.

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


RUNNING = Ending("running", "still running")
"""What callbacks see."""
