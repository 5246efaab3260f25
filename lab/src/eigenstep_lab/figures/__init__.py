"""The figures of the paper, one module each.

A module offers `QUICK` and `FULL`, its settings as frozen dataclasses, and `run(settings, *, seed,
device)`, which returns a `Result`; its docstring says what is done and goes into the report. To add
a figure, write its module and add one line to FIGURES.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        module: Imported when the figure is made.
        title: Its heading.
        trains: Whether it trains networks, which takes so long that `run` keeps each training in
            the file `trainings`.
    """

    module: str
    title: str
    trains: bool = False


FIGURES: Mapping[str, Figure] = {
    "full_matrix": Figure("eigenstep_lab.figures.full_matrix", "Full-matrix scheme"),
    "kronecker": Figure("eigenstep_lab.figures.kronecker", "Kronecker scheme"),
    "spd": Figure("eigenstep_lab.figures.spd", "Optimization over positive-definite matrices"),
    "gradient_free": Figure("eigenstep_lab.figures.gradient_free", "Gradient-free optimization"),
    "exact_vs_truncated": Figure(
        "eigenstep_lab.figures.exact_vs_truncated", "Exact or truncated Cayley map", True
    ),
    "low_precision": Figure(
        "eigenstep_lab.figures.low_precision", "Training in low precision", True
    ),
}
