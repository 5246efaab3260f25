"""Problems over positive-definite matrices whose solution is known, in the forms that each package takes.

Log-det: ``l(S) = tr(S Q) - log det S``. Metric nearness: ``l(S) = 1/(2N) sum ||S Q x_i - x_i||^2``. Both are least at
``S = Q^-1``, where ``Q`` has random eigenvectors and eigenvalues from 1 to a condition number, evenly on a logarithmic
scale. All solvers start at ``S = I``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from eigenstep.core.numerics import symmetrize, transpose

Array = Any
SAMPLES = 1000
"""How many x_i there are."""


@dataclass(frozen=True)
class Problem:
    """A function to minimize.

    Attributes:
        size: rows of the matrix.
        value: the function of a torch tensor, differentiable.
        cost: the same function of a numpy array.
        gradient: its gradient, by hand.
        hessian: derivative of the gradient along a symmetric matrix, by hand.
        least: its least value.
    """

    size: int
    value: Callable[[Tensor], Tensor]
    cost: Callable[[Array], float]
    gradient: Callable[[Array], Array]
    hessian: Callable[[Array, Array], Array]
    least: float


def random_spd(size: int, condition: float, generator: Generator, batch: tuple[int, ...] = ()) -> Tensor:
    """Return random matrices with eigenvalues from 1 to ``condition``."""
    draws = torch.randn(*batch, size, size, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(draws)[0]
    eigs = torch.logspace(0, math.log10(condition), size, dtype=torch.float64)
    return symmetrize(basis * eigs @ transpose(basis))


def log_det(size: int, condition: float, seed: int) -> Problem:
    """Return the log-det problem of one random matrix."""
    Q = random_spd(size, condition, Generator().manual_seed(seed))
    q = Q.numpy()

    def hessian(S: Array, direction: Array) -> Array:
        return np.linalg.solve(S, np.linalg.solve(S, direction).T)

    return Problem(
        size,
        value=lambda S: (S * Q).sum() - torch.logdet(S),
        cost=lambda S: float((S * q).sum() - np.linalg.slogdet(S)[1]),
        gradient=lambda S: q - np.linalg.inv(S),
        hessian=hessian,
        least=size + torch.logdet(Q).item(),
    )


def nearness(size: int, condition: float, seed: int) -> Problem:
    """Return the metric nearness problem of one random matrix."""
    generator = Generator().manual_seed(seed)
    Q = random_spd(size, condition, generator)
    x = torch.randn(size, SAMPLES, generator=generator, dtype=torch.float64)
    y = Q @ x
    a, b = x.numpy(), y.numpy()

    def gradient(S: Array) -> Array:
        half = (S @ b - a) @ b.T / SAMPLES
        return (half + half.T) / 2

    def hessian(S: Array, direction: Array) -> Array:
        half = (direction @ b) @ b.T / SAMPLES
        return (half + half.T) / 2

    return Problem(
        size,
        value=lambda S: (S @ y - x).square().sum() / (2 * SAMPLES),
        cost=lambda S: float(np.square(S @ b - a).sum() / (2 * SAMPLES)),
        gradient=gradient,
        hessian=hessian,
        least=0.0,
    )


PROBLEMS: dict[str, Callable[[int, float, int], Problem]] = {"log-det": log_det, "nearness": nearness}
"""Problems by name, each a function of size, condition number and seed."""
