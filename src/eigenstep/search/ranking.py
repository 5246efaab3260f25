"""Only the order of values counts: from function values to the weights of samples, with ties and failures."""

from __future__ import annotations

import numpy as np

from ..core.numpy_twin import Array


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
