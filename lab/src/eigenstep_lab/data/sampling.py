"""Draw some classes of a folder of pictures: ImageNet-25 has 25 of ImageNet-1k's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..console import UserError, atomic_write
from .files import read_text

PARTS = ("train", "val")
LIST = "classes.txt"


def sample_classes(
    source: Path, target: Path, *, classes: int, seed: int, listed: Path | None = None
) -> tuple[str, ...]:
    """Make a folder with links to some classes of another, and a list of their names.

    Args:
        source: Has `train/<class>/*` and `val/<class>/*`.
        target: Gets the same for the chosen classes, and classes.txt.
        classes: How many.
        seed: Decides which; the same for the same names.
        listed: Names the classes instead, one in each line, as classes.txt does.
    """
    there = [
        {entry.name for entry in (source / part).glob("*") if entry.is_dir()} for part in PARTS
    ]
    names = sorted(set.intersection(*there))
    chosen = _listed(listed, names, source) if listed else _drawn(classes, seed, names, source)
    if target.exists() and any(target.iterdir()):
        raise UserError(f"{target} is not empty: choose another folder")
    for part in PARTS:
        (target / part).mkdir(parents=True, exist_ok=True)
        for name in chosen:
            original = (source / part / name).resolve()
            (target / part / name).symlink_to(original, target_is_directory=True)
    with atomic_write(target / LIST) as file:
        file.write("".join(f"{name}\n" for name in chosen).encode())
    return tuple(chosen)


def _listed(listing: Path, names: list[str], source: Path) -> list[str]:
    chosen = sorted(set(read_text(listing).split()))
    missing = sorted(set(chosen) - set(names))
    if missing:
        raise UserError(f"{source} has no class {', '.join(missing[:5])} in both train and val")
    return chosen


def _drawn(classes: int, seed: int, names: list[str], source: Path) -> list[str]:
    if len(names) < classes:
        raise UserError(
            f"{source} has {len(names)} classes in both train and val, cannot draw {classes}"
        )
    return sorted(np.random.default_rng(seed).choice(names, classes, replace=False).tolist())
