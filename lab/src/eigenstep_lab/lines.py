"""Pictures of one line for each of several things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from eigenstep.plotting import figure, save

Curve = tuple[Sequence[float], Sequence[float]]


def save_lines(path: str | Path, curves: Mapping[str, Curve], *, title: str, x: str, y: str, log: bool = False) -> Path:
    """Draw one line for each entry and write the picture."""
    drawn, axes = figure()
    ax = axes[0, 0]
    for number, (name, (xs, ys)) in enumerate(curves.items()):
        dash = "-" if number < 10 else "--"  # there are ten colors
        ax.plot(xs, ys, dash, marker="o" if len(xs) < 20 else None, markersize=4, label=name)
    ax.set(title=title, xlabel=x, ylabel=y)
    if log:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        marks = sorted({x for xs, _ in curves.values() for x in xs})
        ax.set_xticks(marks, [f"{x:g}" for x in marks])
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(drawn, path)
