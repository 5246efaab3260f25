"""Pictures of one line for each of several things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .plotting import figure, save

Curve = tuple[Sequence[float], Sequence[float]]
OURS = "#D55E00"
OTHERS = (
    "#0072B2",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#8C564B",
    "#7F7F7F",
    "#B8A000",
    "#4B0082",
    "#000000",
)
"""Our color, and those of everything that we compare with, none of which is near it."""
DASHES = ("--", "-.", ":")
"""By which variants of ours are told apart."""


def look(name: str, number: int = 0) -> dict[str, Any]:
    """Return how a line is drawn: ours thick in one color, its variants broken.

    Args:
        name: of the method.
        number: its place among all, which decides the color if it is not ours.
    """
    if name.lower().startswith(("spectral", "eigenstep", "ours")):
        plain = name.lower() in ("spectral", "eigenstep", "ours")
        return {
            "color": OURS,
            "linewidth": 2.5,
            "zorder": 3,
            "linestyle": "-" if plain else DASHES[number % 3],
        }
    dash = "-" if number < len(OTHERS) else ":"
    return {"color": OTHERS[number % len(OTHERS)], "linewidth": 1.2, "linestyle": dash}


def save_lines(
    path: str | Path, curves: Mapping[str, Curve], *, title: str, x: str, y: str, log: bool = False
) -> Path:
    """Draw one line for each entry and write the picture."""
    drawn, axes = figure()
    ax = axes[0, 0]
    for number, (name, (xs, ys)) in enumerate(curves.items()):
        ax.plot(
            xs,
            ys,
            marker="o" if len(xs) < 20 else None,
            markersize=4,
            label=name,
            **look(name, number),
        )
    ax.set(title=title, xlabel=x, ylabel=y)
    if log:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        marks = sorted({x for xs, _ in curves.values() for x in xs})
        ax.set_xticks(marks, [f"{x:g}" for x in marks])
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(drawn, path)
