"""Streams of gradients for one parameter: how large each entry is at each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

Pattern = Callable[[np.random.Generator, tuple[int, ...], int], np.ndarray]
"""Called with chance, the parameter's shape and the number of steps; returns steps × shape."""


def _noise(chance: np.random.Generator, shape: tuple[int, ...], steps: int) -> np.ndarray:
    return chance.standard_normal((steps, *shape))


def _signal(chance: np.random.Generator, shape: tuple[int, ...], steps: int) -> np.ndarray:
    return chance.standard_normal(shape) + 0.3 * _noise(chance, shape, steps)


def _once(chance: np.random.Generator, shape: tuple[int, ...], steps: int) -> np.ndarray:
    """A few steps, then zero for ever."""
    stream = _noise(chance, shape, steps)
    stream[chance.integers(1, 6) :] = 0
    return stream


def _late(chance: np.random.Generator, shape: tuple[int, ...], steps: int) -> np.ndarray:
    """An expert that nobody asks at first."""
    stream = _noise(chance, shape, steps)
    stream[: chance.integers(1, steps + 1)] = 0
    return stream


def _sparse(chance: np.random.Generator, shape: tuple[int, ...], steps: int) -> np.ndarray:
    return _noise(chance, shape, steps) * (
        chance.random((steps, *shape)) < chance.choice([0.01, 0.05, 0.3])
    )


def _spikes(chance: np.random.Generator, shape: tuple[int, ...], steps: int) -> np.ndarray:
    loud = chance.random(steps) < 0.1
    return _noise(chance, shape, steps) * np.where(loud, chance.choice([1e4, 1e6]), 1.0).reshape(
        -1, *[1] * len(shape)
    )


def _fading(chance: np.random.Generator, shape: tuple[int, ...], steps: int) -> np.ndarray:
    factor = chance.choice([0.5, 0.7, 0.9, 1.1, 1.5]) ** np.arange(steps)
    return _noise(chance, shape, steps) * factor.reshape(-1, *[1] * len(shape))


def _turns(chance: np.random.Generator, shape: tuple[int, ...], steps: int) -> np.ndarray:
    """Rows that take turns."""
    stream = _noise(chance, shape, steps)
    rows = shape[0] if shape else 1
    period = int(chance.integers(1, 5))
    for step in range(steps):
        stream[step][np.arange(rows) % (period + 1) != step % (period + 1)] = 0
    return stream


def _alternating(chance: np.random.Generator, shape: tuple[int, ...], steps: int) -> np.ndarray:
    signs = np.where(np.arange(steps) % 2, -1.0, 1.0).reshape(-1, *[1] * len(shape))
    return signs * (chance.standard_normal(shape) + 0.1 * _noise(chance, shape, steps))


def _low_rank(chance: np.random.Generator, shape: tuple[int, ...], steps: int) -> np.ndarray:
    return np.broadcast_to(
        chance.standard_normal(shape[-1:]), (steps, *shape)
    ) * chance.standard_normal((steps, *shape[:-1], 1))


PATTERNS: Mapping[str, Pattern] = {
    "noise": _noise,
    "signal": _signal,
    "once": _once,
    "late": _late,
    "sparse": _sparse,
    "spikes": _spikes,
    "fading": _fading,
    "turns": _turns,
    "alternating": _alternating,
    "low rank": _low_rank,
}


def gradients(
    chance: np.random.Generator, pattern: str, shape: tuple[int, ...], steps: int, scale: float
) -> Tensor:
    """Return all gradients of a parameter, steps × shape, in double precision.

    Args:
        chance: Decides everything.
        pattern: One of `PATTERNS`.
        shape: The parameter's shape.
        steps: How many gradients.
        scale: Size of a usual entry.
    """
    return torch.from_numpy(np.ascontiguousarray(PATTERNS[pattern](chance, shape, steps))) * scale
