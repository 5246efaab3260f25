"""Samples: how they are drawn, and how much each counts by the order of their values."""

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


def sanitize(values: Array) -> Array:
    """Return the values with everything that is no finite number, a failure, ranked last: ``+inf``."""
    return np.where(np.isfinite(values), values, np.inf)


def assign(values: Array, *tables: Array) -> tuple[Array, ...]:
    """Give each sample its weight from each of several tables.

    Samples with equal values share the mean of their weights: on a plateau, where all are equal, nothing is selected.
    """
    order = values.argsort(-1)
    ordered = np.take_along_axis(values, order, -1)
    ranks = order.argsort(-1)
    leads = np.ones(values.shape, dtype=bool)  # the first sample of each set of equal ones
    leads[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    if leads.all():
        return tuple(table[ranks] for table in tables)
    ties = leads.ravel().cumsum() - 1  # which set each sample belongs to, over the whole batch
    sizes = np.bincount(ties)

    def share(table: Array) -> Array:
        sums = np.bincount(ties, np.broadcast_to(table, values.shape).ravel())
        shared = (sums / sizes)[ties].reshape(values.shape)
        return np.take_along_axis(shared, ranks, -1)

    return tuple(share(table) for table in tables)
