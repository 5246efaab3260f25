"""The parts of the step in NumPy, for the search.

Small matrices are several times faster in NumPy, and need no torch.

Each function has the name and the formula of its torch version in ``eigenstep.core.step``, and a
test compares the two. A step reads::

    turn = cayley(bounded(average))                     generator, then map
    basis = basis @ turn                                turn the basis
    eigs = rayleigh_quotients(average, turn)            diag(Q^T A Q)

All arrays are float64 and may carry leading batch dimensions.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LARGEST_ENTRY = float(np.finfo(np.float64).eps) ** -0.5
"""Larger entries of generators are cut: they turn a pair of axes by half a turn anyway."""
MOST_SKEWNESS_LOST = 1e-8
"""Generators that are less skew than this are made so: at equal eigenvalues, rounding alone may
decide the signs on both sides of the diagonal.
"""


def bounded(average: Array) -> Array:
    """Return the generator ``step.bounded(..., pairwise=True)``.

    ``N_ij = -A_ij sgn(D) / (|D| + sqrt(D^2 + 4 A_ij^2))`` with ``D = A_ii - A_jj``, never larger
    than 1/2, also at equal eigenvalues. Unlike torch's version it does not rescale ``A``: entries
    must be zero, or from 1e-90 to 1e150.
    """
    values = diagonal(average)
    gap = values[..., :, None] - values[..., None, :]
    gap += _tie_breaker(values.shape[-1])
    root = gap * gap
    root += 4 * (average * average)
    gap += np.copysign(np.sqrt(root, out=root), gap)
    generator = average / gap
    diagonal(generator)[...] = 0
    np.negative(generator, out=generator)
    if np.abs(generator + transpose(generator)).max() > MOST_SKEWNESS_LOST:
        generator = (generator - transpose(generator)) / 2
    return generator


def cayley(generator: Array) -> Array:
    """Return ``(I + N)(I - N)^-1 = 2 (I - N)^-1 - I``, orthogonal for skew-symmetric ``N``."""
    shifted = np.minimum(np.maximum(-generator, -LARGEST_ENTRY), LARGEST_ENTRY)
    diagonal(shifted)[...] += 1
    inverse: Array = np.linalg.inv(shifted)
    inverse += inverse
    diagonal(inverse)[...] -= 1
    return inverse


def reorthonormalize(basis: Array) -> Array:
    """Remove what rounding has cost a basis of its orthogonality, by one Newton-Schulz step."""
    return 1.5 * basis - 0.5 * basis @ (transpose(basis) @ basis)


def rayleigh_quotients(average: Array, turn: Array) -> Array:
    """Return ``diag(Q^T A Q)``, the eigenvalues read off along the new axes."""
    return (turn * (average @ turn)).sum(-2)


def transpose(matrix: Array) -> Array:
    """Transpose the last two axes."""
    return matrix.swapaxes(-2, -1)


def diagonal(matrix: Array) -> Array:
    """Return a view of the diagonal, shape ``(*batch, d)``, that can be written to."""
    return np.einsum("...ii->...i", matrix)


@lru_cache(maxsize=64)
def _tie_breaker(d: int) -> Array:
    """Return ones on the diagonal, and skew numbers that matter at equal eigenvalues only."""
    upper = np.triu(np.full((d, d), 1e-100), 1)
    return upper - upper.T + np.eye(d)
