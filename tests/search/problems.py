"""Functions with known minima, of one vector or of many as rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def sphere(x: Array) -> Array:
    return (x * x).sum(-1)


def ellipsoid(x: Array, condition: float = 1e4) -> Array:
    d = x.shape[-1]
    return (condition ** (np.arange(d) / max(d - 1, 1)) * x * x).sum(-1)


def rosenbrock(x: Array) -> Array:
    return (100 * (x[..., 1:] - x[..., :-1] ** 2) ** 2 + (x[..., :-1] - 1) ** 2).sum(-1)


def rastrigin(x: Array) -> Array:
    return (x * x + 10 * (1 - np.cos(2 * np.pi * x))).sum(-1)


def rotation(d: int, seed: int = 0) -> Array:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))[0]
