"""Run ``Spectral`` and its transcription side by side on the same gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from eigenstep import Spectral, Turning
from eigenstep.core.step import ROTATIONS
from eigenstep.optim import Fused

from .formulas import Array
from .transcription import DEFAULTS, FAST, PAPER, Oracle

Shape = tuple[int, ...]
LR = 0.1
LONGEST = int(os.environ.get("EIGENSTEP_ORACLE_STEPS", "1000"))
"""Where to stop; `make mutants` stops early, as thousands of mutants each run these tests."""
RECIPES: dict[str, tuple[Callable[..., Spectral], dict[str, Any]]] = {
    "default": (Spectral, DEFAULTS),
    "fast": (Spectral.fast, FAST),
    "paper": (Spectral.paper, PAPER),
}


FUSED = ("sizes", "heads", "axis", "batch_dims")
TURNING = ("rotation", "map", "rate", "mend", "dtype")


def arguments_of(options: dict[str, Any], recipe: str) -> dict[str, Any]:
    """Return arguments of ``Spectral`` for options of the oracle: those that it puts together."""
    arguments = dict(options)

    def taken(names: Sequence[str]) -> dict[str, Any]:
        return {name: arguments.pop(name) for name in names if name in arguments}

    fused = taken(FUSED)
    if fused:
        arguments["fused"] = Fused(**fused)
    if recipe != "paper":
        own, turning = taken(("gap",)), taken(TURNING)
        if "basis_lr" in arguments:
            own["rate"] = arguments.pop("basis_lr")
        if own:
            turning["rotation"] = partial(ROTATIONS[turning["rotation"]], **own)
        if turning:
            arguments["turning"] = Turning(**turning)
    return arguments


def stream(shape: Shape, steps: int, seed: int = 0, scale: float = 0.3) -> Array:
    """Return gradients that are correlated along every axis, of uneven size, with a drift and
    louder phases.
    """
    random = np.random.default_rng([seed, *shape])
    gradients = random.standard_normal((steps, *shape))
    for axis, n in enumerate(shape, start=1):
        mixing = np.linalg.qr(random.standard_normal((n, n)))[0] * np.geomspace(1, 4, n)
        gradients = np.moveaxis(np.tensordot(gradients, mixing, (axis, 0)), -1, axis)
    loudness = np.exp(np.sin(np.arange(steps)))
    return (
        scale
        * (gradients + 0.5 * random.standard_normal(shape))
        * loudness.reshape(-1, *[1] * len(shape))
    )


def gradients_of(shapes: Sequence[Shape], steps: int = 30) -> list[list[Array | None]]:
    """Return gradients of parameters for each step, which tests may change."""
    streams = [stream(shape, steps, at) for at, shape in enumerate(shapes)]
    return [list(gradients) for gradients in zip(*streams, strict=True)]


def assert_same(
    shapes: Shape | Sequence[Shape],
    recipe: str = "default",
    *,
    steps: int = 30,
    tolerance: float = 1e-9,
    gradients: Sequence[Sequence[Array | None]] | None = None,
    curvature: Sequence[dict[int, Array]] | None = None,
    units: Sequence[float] | None = None,
    **options: Any,
) -> None:
    """Assert that both move parameters alike: differences at any time are small compared with the
    whole move.

    Args: shapes: shape of the parameter, or of several. recipe: a key of ``RECIPES``. steps: how
        many. tolerance: the largest difference, relative to the largest move of each parameter.
        gradients: for each step those of all parameters; :func:`stream` by default. curvature: for
        each step the vectors given to it, by number of the parameter. units: numbers by which the
        library's gradients are multiplied, one for each parameter, but the oracle's are not: most
        options make steps that do not depend on them. **options: those of the oracle that differ
        from the recipe's, and the number format of bases.
    """
    shapes = [shapes] if isinstance(shapes, tuple) else list(shapes)
    units = units or [1.0] * len(shapes)
    gradients = gradients or gradients_of(shapes, steps)
    steps = min(steps, LONGEST)
    build, defaults = RECIPES[recipe]
    starts = [np.array(stream(shape, 1, 77)[0]) for shape in shapes]
    params = [torch.tensor(start, requires_grad=True) for start in starts]
    optimizer = build(params, **arguments_of({"lr": LR, **options}, recipe))
    half = options.pop("basis_dtype" if recipe == "paper" else "dtype", None) == torch.bfloat16
    arrays = [start.copy() for start in starts]
    oracle = Oracle(arrays, {**defaults, "lr": LR, **options, "half": half})
    assert oracle.options.keys() == defaults.keys()

    differences = np.zeros(len(shapes))
    for at in range(steps):
        for param, gradient, unit in zip(params, gradients[at], units, strict=True):
            param.grad = None if gradient is None else torch.tensor(gradient * unit)
        vectors = curvature[at] if curvature else {}
        optimizer.step(curvature={params[number]: torch.tensor(v) for number, v in vectors.items()})
        oracle.step(list(gradients[at]), vectors)
        apart = [
            abs(p.detach().numpy() - array).max() for p, array in zip(params, arrays, strict=True)
        ]
        differences = np.maximum(differences, apart)
    moves = np.array(
        [abs(array - start).max() for array, start in zip(arrays, starts, strict=True)]
    )
    assert (moves > 0).all(), "nothing moved"
    assert (differences <= tolerance * moves).all(), f"relative differences {differences / moves}"
