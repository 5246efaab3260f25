"""Which method a search has, and whether a descent comes first, by dimension, variables
and budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..core.checks import choose
from .categories import Mixed
from .cautious import CautiousGaussian
from .descent import Descent, LimitedDescent
from .domain import Domain
from .lowrank import LowRankGaussian
from .spectral import Begin, SpectralGaussian

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
    descend: Begin | None
    reasons: tuple[str, ...]
    again: bool  # whether noisy samples are evaluated more than once

    @classmethod
    def make(
        cls, method: Any, domain: Domain, *, exact: bool, noisy: bool, max_evals: int, tolfun: float
    ) -> Choice:
        """Choose; ``exact`` says that points are in double precision."""
        d, descend, reasons = len(domain.scale), None, []
        if isinstance(method, str) and method == "auto":
            obstacles = {
                "values are noisy": noisy,
                "some coordinates are integers or categories": domain.whole,
                "points are not in double precision": not exact,
                "there are too few evaluations": max_evals < 2 * d,
            }
            found = [why for why, there in obstacles.items() if there]
            if not found:
                descend = partial((LimitedDescent if d > LARGE else Descent).begin, tolfun=tolfun)
            method = "lowrank" if d > LARGE else "spectral"
            reasons = [
                f"no descent, because {found[0]}"
                if found
                else "a descent, in case values are smooth",
                f"the method {method!r}, because there are {d} coordinates",
            ]
        # The user's own is a function, or a class with a `start`
        chosen = choose(method, METHODS, "method")
        begin: Begin = getattr(chosen, "start", chosen)
        if domain.categories:
            begin = partial(Mixed.start, begin=begin, categories=domain.categories)
        return cls(begin, descend, tuple(reasons), again=method != "cautious")
