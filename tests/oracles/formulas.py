"""The formulas of one matrix at a time, with numpy and loops over pairs of eigenvectors: what the
library must equal.

Nothing here is fast, batched or guarded against overflow, and nothing is imported from the library.
Names are those of the paper: ``W`` curvature in eigen-coordinates, ``A`` its average with the past,
``N`` the skew-symmetric generator, ``Q`` the rotation, ``d`` eigenvalues, ``beta`` a rate,
``gamma`` the decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

Array = np.ndarray


@dataclass(frozen=True)
class Format:
    """Number format of bases: exact (that is, float64), or bfloat16, whose products are float32
    sums, then rounded.
    """

    half: bool = False

    def round(self, x: Array) -> Array:
        return (
            torch.from_numpy(np.array(x)).to(torch.bfloat16).double().numpy()
            if self.half
            else np.array(x)
        )

    def wide(self, x: Array) -> Array:
        """Return numbers in the format in which half precision is computed."""
        return x.astype(np.float32) if self.half else x

    def product(self, a: Array, b: Array) -> Array:
        return self.round((self.wide(a) @ self.wide(b)).astype(np.float64))


EXACT = Format()


def bounded(A: Array, *, pairwise: bool = False) -> Array:
    """``N_ij = -A_ij sgn(D) / (|D| + sqrt(D^2 + 4 e))`` with ``D = A_ii - A_jj``, and sgn(0) = 1
    for i < j.
    """
    n = len(A)
    rows = [sum(A[i, k] ** 2 for k in range(n) if k != i) for i in range(n)]
    N = np.zeros((n, n))
    for i in range(n):
        for j in range(i + 1, n):
            difference = A[i, i] - A[j, j]
            e = A[i, j] ** 2 if pairwise else (rows[i] + rows[j]) / 2
            sign = 1 if difference >= 0 else -1
            length = abs(difference) + math.sqrt(difference**2 + 4 * e)
            N[i, j] = -A[i, j] * sign / length if length else 0.0
            N[j, i] = -N[i, j]
    return N


def moore_penrose(d: Array, A: Array, gap: float) -> Array:
    """``N_ij = -A_ij / (2 (d_i - d_j))``, zero where eigenvalues differ by no more than ``gap``
    times the larger.
    """
    n = len(A)
    N = np.zeros((n, n))
    for i in range(n):
        for j in range(i):
            if abs(d[i] - d[j]) > gap * max(d[i], d[j]):
                N[i, j] = -A[i, j] / (2 * (d[i] - d[j]))
                N[j, i] = -N[i, j]
    return N


def normalized(d: Array, A: Array, gap: float, rate: float) -> Array:
    """The same, as long as half the paper's second rate, beta-bar-2."""
    N = moore_penrose(d, A, gap)
    length = np.linalg.norm(N)
    return rate / 2 * N / length if length else N


def cayley(N: Array, form: Format = EXACT) -> Array:
    """``(I + N)(I - N)^-1``."""
    N = form.wide(N)
    identity = np.eye(len(N), dtype=N.dtype)
    return form.round(((identity + N) @ np.linalg.inv(identity - N)).astype(np.float64))


def shortened(N: Array, Y: Array, cap: float | None, form: Format) -> tuple[Array, Array]:
    """Shorten ``N``, and ``Y = N^2`` with it, so that ``||N^2||_F^(1/2)``, a bound on its norm, is
    at most ``cap``.
    """
    if cap is None:
        return N, Y
    factor = form.round(np.array(min(1.0, cap / max(np.linalg.norm(Y) ** 0.5, 1e-300))))
    return form.round(N * factor), form.round(Y * form.round(factor**2))


def truncated_cayley(N: Array, cap: float | None, form: Format = EXACT) -> Array:
    """``(I + N)^2 (I + N^2)(I + N^4)``; in half precision as ``(I + Y)(I + Y^2)(I + Y + 2N)``, ``Y
    = N^2``.
    """
    identity = np.eye(len(N))
    N, Y = shortened(N, form.product(N, N), cap, form)
    if not form.half:
        return (identity + N) @ (identity + N) @ (identity + Y) @ (identity + Y @ Y)
    tail = form.product(form.round(identity + Y), form.round(identity + form.product(Y, Y)))
    return form.product(tail, form.round(identity + form.round(Y + 2 * N)))


def quadratic_cayley(N: Array, cap: float | None, form: Format = EXACT) -> Array:
    """``I + 2cN + 2N^2``, the Cayley map to second order; if only one plane turns, ``c`` keeps its
    vectors' lengths.
    """
    Y = form.product(N, N)
    factor = 1.0 if cap is None else min(1.0, cap / max(np.linalg.norm(Y) ** 0.5, 1e-300))
    length = -np.trace(Y)  # ||N||^2
    c = np.sqrt(1 - factor**2 * np.sum(Y**2) / length) if length > 0 else 1.0
    curved = form.round(form.round(2 * factor**2) * Y)
    return form.round(np.eye(len(N)) + form.round(form.round(2 * c * factor) * N + curved))


def newton_schulz(B: Array, form: Format = EXACT) -> Array:
    """``3/2 B - 1/2 B B^T B``."""
    b = form.wide(B)
    return form.round((1.5 * b - 0.5 * b @ (b.T @ b)).astype(np.float64))


def rate(beta: float, t: float) -> float:
    """Weight of the ``t``-th term of a running average that starts as a mean, as by Adam's bias
    correction.
    """
    return (1 - beta) / (1 - beta**t)


def factor_curvature(H: Array, d: list[Array], at: int) -> Array:
    """Return ``W`` of one Kronecker factor: the mean of ``H`` over all other axes, divided by their
    eigenvalues.

    For two factors and ``H = vec(G) vec(G)^T`` this is the paper's ``G Diag(1/d_K) G^T / m``.

    Args:
        H: curvature of the whole in eigen-coordinates, in units of alpha, ``N`` by ``N``.
        d: eigenvalues of all factors; ``N`` is the product of their lengths.
        at: which factor.
    """
    sizes = [len(values) for values in d]
    tensor = H.reshape(*sizes, *sizes)
    W = np.zeros((sizes[at], sizes[at]))
    for other in np.ndindex(*sizes[:at], *sizes[at + 1 :]):
        place = (*other[:at], slice(None), *other[at:])
        weight = math.prod(values[i] for values, i in zip(d[:at] + d[at + 1 :], other, strict=True))
        W += tensor[place + place] / weight
    return W / math.prod(sizes[:at] + sizes[at + 1 :])


def unit_determinant(n: Array) -> tuple[Array, float]:
    """Return ``n`` divided by its geometric mean, and that mean."""
    mean = math.exp(np.mean(np.log(n)))
    return n / mean, mean
