"""Pictures of results, all in one style."""

from pathlib import Path
from typing import Any

from eigenstep.core.progress import require


def figure(
    columns: int = 1, rows: int = 1, width: float = 5.5, height: float = 3.8
) -> tuple[Any, Any]:
    """Return a new figure and its grid of axes, drawn without a screen."""
    require("matplotlib", "matplotlib").use("Agg")
    pyplot = require("matplotlib.pyplot", "matplotlib")
    drawn, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def shade(position: float) -> Any:
    """Return the color of a place between 0, the first, and 1, the last."""
    return require("matplotlib", "matplotlib").colormaps["viridis"](0.9 * position)


def save(drawn: Any, path: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF, by its name's ending, and tell where."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(target, dpi=120)
    require("matplotlib.pyplot", "matplotlib").close(drawn)
    print(f"Picture written to {target}")
    return target
