"""Two problems over positive-definite matrices whose solution is known.

Log-det: ``l(S) = tr(S Q) - log det S``. Metric nearness: ``l(S) = 1/(2N) sum ||S Q x_i - x_i||^2``.
Both are least at ``S = Q^-1``. Values and derivatives are written by hand, for batches of matrices,
for all ``x_i`` or for those that a minibatch picks; the same formulas serve torch and, after
``problem.numpy()``, numpy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Generator, Tensor
from torch.linalg import diagonal

from eigenstep.core.step import symmetrize

Array = Any
"""A torch tensor or a numpy array."""
Some = TypeVar("Some", bound="_Data")
ALL: Any = slice(None)
SAMPLES = 1000
"""How many x_i there are in a random problem."""


@dataclass(frozen=True)
class _Data:
    """What a problem knows.

    Attributes:
        Q: inverse of the solution, shape ``(*batch, n, n)``.
        x: what minibatches pick from, shape ``(*batch, n, count)``.
        linalg: what calculates with them, `torch.linalg` or `numpy.linalg`.
    """

    Q: Array
    x: Array = None
    linalg: Any = torch.linalg

    @property
    def size(self) -> int:
        """Rows of the matrix."""
        return int(self.Q.shape[-1])

    def numpy(self: Some) -> Some:
        """Return the same problem for numpy arrays."""
        x = None if self.x is None else self.x.numpy()
        return dataclasses.replace(self, Q=self.Q.numpy(), x=x, linalg=np.linalg)


class LogDet(_Data):
    """``tr(S Q) - log det S``; a minibatch sees the mean of some ``x_i x_i^T``, where ``Q`` is the
    mean of all.
    """

    @cached_property
    def least(self) -> float:
        """Least value of a problem that is not a batch."""
        return self.size + float(self.linalg.slogdet(self.Q)[1])

    @cached_property
    def _root(self) -> Tensor:
        return torch.linalg.cholesky(self.Q)

    def _seen(self, picked: Array) -> Array:
        if picked is ALL:
            return self.Q
        part = self.x[..., picked]
        return part @ part.swapaxes(-1, -2) / part.shape[-1]

    def value(self, S: Array, picked: Array = ALL) -> Array:
        """Return the function, shape ``(*batch,)``."""
        return (S * self._seen(picked)).sum((-2, -1)) - self.linalg.slogdet(S)[1]

    def gradient(self, S: Array, picked: Array = ALL) -> Array:
        """Return ``Q - S^-1``."""
        return _symmetric(self._seen(picked) - self.linalg.inv(S))

    def hessian(self, S: Array, direction: Array) -> Array:
        """Return ``S^-1 V S^-1``, the derivative of the gradient along a symmetric matrix."""
        return self.linalg.solve(S, self.linalg.solve(S, direction).swapaxes(-1, -2))

    def gap(self, S: Tensor) -> Tensor:
        """Return how far the value is above the least, from the eigenvalues of ``S Q``: all one at
        the solution.
        """
        excess = torch.linalg.eigvalsh(self._root.mT @ S @ self._root) - 1
        return (excess - torch.log1p(excess)).sum(-1)


class Nearness(_Data):
    """``1/(2N) sum ||S y_i - x_i||^2`` with ``y_i = Q x_i``; all agree on the solution, so
    minibatches do too.
    """

    least = 0.0

    @cached_property
    def _y(self) -> Array:
        return self.Q @ self.x

    @cached_property
    def _moment(self) -> Tensor:
        return self.x @ self.x.mT / self.x.shape[-1]

    def value(self, S: Array, picked: Array = ALL) -> Array:
        """Return the function, shape ``(*batch,)``."""
        x = self.x[..., picked]
        return ((S @ self._y[..., picked] - x) ** 2).sum((-2, -1)) / (2 * x.shape[-1])

    def gradient(self, S: Array, picked: Array = ALL) -> Array:
        """Return the mean of ``(S y_i - x_i) y_i^T``, made symmetric."""
        x, y = self.x[..., picked], self._y[..., picked]
        return _symmetric((S @ y - x) @ y.swapaxes(-1, -2)) / x.shape[-1]

    def hessian(self, S: Array, direction: Array) -> Array:
        """Return the mean of ``V y_i y_i^T``, made symmetric: the derivative of the gradient along
        ``V``.
        """
        return _symmetric((direction @ self._y) @ self._y.swapaxes(-1, -2)) / self.x.shape[-1]

    def gap(self, S: Tensor) -> Tensor:
        """Return how far the value is above the least, zero, from the second moment of
        all ``x_i``.
        """
        error = S @ self.Q - torch.eye(self.size).to(S)
        return diagonal(error @ self._moment @ error.mT).sum(-1) / 2


Problem = LogDet | Nearness


def _symmetric(matrix: Array) -> Array:
    return (matrix + matrix.swapaxes(-1, -2)) / 2


def random_spd(
    size: int, condition: float, generator: Generator, batch: tuple[int, ...] = ()
) -> Tensor:
    """Return matrices with random eigenvectors, and eigenvalues from 1 to ``condition`` on a
    logarithmic scale.
    """
    draws = torch.randn(*batch, size, size, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(draws)[0]
    eigs = torch.logspace(0, math.log10(condition), size, dtype=torch.float64)
    return symmetrize(basis * eigs @ basis.mT)


def log_det(size: int, condition: float, seed: int, batch: tuple[int, ...] = ()) -> LogDet:
    """Return the log-det problem of random matrices."""
    return LogDet(random_spd(size, condition, Generator().manual_seed(seed), batch))


def sampled_log_det(size: int, condition: float, seed: int, batch: tuple[int, ...] = ()) -> LogDet:
    """Return the log-det problem of covariances of samples, for minibatches of them."""
    generator = Generator().manual_seed(seed)
    root = torch.linalg.cholesky(random_spd(size, condition, generator, batch))
    x = root @ torch.randn(*batch, size, SAMPLES, generator=generator, dtype=torch.float64)
    return LogDet(x @ x.mT / SAMPLES, x)


def nearness(size: int, condition: float, seed: int, batch: tuple[int, ...] = ()) -> Nearness:
    """Return the metric nearness problem of random matrices."""
    generator = Generator().manual_seed(seed)
    Q = random_spd(size, condition, generator, batch)
    return Nearness(Q, torch.randn(*batch, size, SAMPLES, generator=generator, dtype=torch.float64))


PROBLEMS: Mapping[str, Callable[..., Problem]] = {"log-det": log_det, "nearness": nearness}
"""Problems by name, each a function of size, condition number and seed."""
MINIBATCHES: Mapping[str, Callable[..., Problem]] = {
    "log-det": sampled_log_det,
    "nearness": nearness,
}
"""The same, fit for minibatches."""
