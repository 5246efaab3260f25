"""Standard normal samples that cover the directions evenly: mirrored pairs, and orthogonal within a generation."""

from __future__ import annotations

import numpy as np

from ..core.numpy_twin import Array


def mirrored_orthogonal(rng: np.random.Generator, batch: tuple[int, ...], population: int, d: int) -> Array:
    """Return samples ``z`` and ``-z`` whose directions are orthogonal, as far as ``d`` of them can be.

    Each sample alone is standard normal: its direction is uniform, and it keeps the length that it was drawn with.
    An odd population has one sample without a mirror image.
    """
    half = (population + 1) // 2
    z = rng.standard_normal((*batch, half, d))
    lengths = np.sqrt((z * z).sum(-1, keepdims=True))
    for start in range(0, half, d):
        block = slice(start, start + d)
        z[..., block, :] = orthonormal_rows(z[..., block, :]) * lengths[..., block, :]
    return np.concatenate([z, -z], -2)[..., :population, :]


def orthonormal_rows(z: Array) -> Array:
    """Return what Gram and Schmidt make of ``k <= d`` rows, shape ``(*batch, k, d)``."""
    rows, d = z.shape[-2:]
    if 2 * rows <= d:
        # Few random rows are far from dependent: the Cholesky factor of their products is exact enough, and faster.
        return np.asarray(np.linalg.solve(np.linalg.cholesky(z @ z.swapaxes(-2, -1)), z))
    q, r = np.linalg.qr(z.swapaxes(-2, -1))
    # Directions are uniform only with a positive diagonal of R, whose signs QR leaves open.
    signs = np.copysign(1.0, np.einsum("...ii->...i", r))
    return q.swapaxes(-2, -1) * signs[..., None]
