"""The choice of a method, and of a descent before it, by dimension, variables and budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..core.checks import choose
from ..core.numpy_twin import Array
from .cautious import CautiousGaussian
from .descent import Descent, LimitedDescent
from .distribution import Begin
from .gaussian import SpectralGaussian
from .lowrank import LowRankGaussian
from .mixed import Mixed
from .space import Space

LARGE = 400  # In more dimensions, memory has to be linear in them
METHODS: Mapping[str, Begin] = {
    "spectral": SpectralGaussian.start,
    "separable": partial(SpectralGaussian.start, separable=True),
    "lowrank": LowRankGaussian.start,
    "cautious": CautiousGaussian.start,
}


@dataclass(frozen=True)
class Choice:
    """How runs begin, and descents, if there are any; and why."""

    begin: Begin
    descend: Callable[[Array, float], Descent] | None
    reasons: tuple[str, ...]
    again: bool  # whether noisy samples are evaluated more than once


def choose_method(
    method: Any, space: Space, *, exact: bool, noisy: bool, max_evals: int, tolfun: float
) -> Choice:
    """Choose; ``exact`` says that points are in double precision."""
    d = len(space.scale)
    descend = None
    reasons: tuple[str, ...] = ()
    if isinstance(method, str) and method == "auto":
        obstacles = {
            "values are noisy": noisy,
            "some coordinates are integers or categories": space.whole,
            "points are not in double precision": not exact,
            "there are too few evaluations": max_evals < 2 * d,
        }
        obstacle = next((why for why, there in obstacles.items() if there), None)
        first = f"no descent, because {obstacle}"
        if obstacle is None:
            descend = partial((LimitedDescent if d > LARGE else Descent).begin, tolfun=tolfun)
            first = "a descent, in case values are smooth"
        method = "lowrank" if d > LARGE else "spectral"
        reasons = (first, f"the method {method!r}, because there are {d} coordinates")
    # The user's own is a function, or a class with a `start`.
    chosen = choose(method, METHODS, "method")
    begin: Begin = getattr(chosen, "start", chosen)
    if space.categories:
        begin = partial(Mixed.start, begin=begin, categories=space.categories)
    return Choice(begin, descend, reasons, again=method != "cautious")
