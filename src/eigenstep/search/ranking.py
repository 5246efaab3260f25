"""Only the order of values counts: from function values to the weights of samples, with ties and failures."""

from __future__ import annotations

import numpy as np

from .rates import Array


def sanitize(values: Array) -> Array:
    """Return the values with everything that is no finite number, a failure, ranked last: ``+inf``."""
    return np.where(np.isfinite(values), values, np.inf)


def assign(values: Array, *tables: Array) -> tuple[Array, ...]:
    """Give each sample its weight from each of several tables.

    Samples with equal values share the mean of their weights: on a plateau, where all are equal, nothing is selected.

    Args:
        values: shape ``(*batch, K)``, without NaN.
        *tables: weights by rank, best first, shape ``(K,)``.

    Returns:
        For each table the weights of the samples, shape ``(*batch, K)``.
    """
    ordered = values.copy()
    ordered.sort(-1)
    if not (ordered[..., 1:] == ordered[..., :-1]).any():
        ranks = values.argsort(-1).argsort(-1)
        return tuple(table[ranks] for table in tables)
    same = (values[..., :, None] == ordered[..., None, :]).astype(np.float64)
    same /= same.sum(-1, keepdims=True)
    return tuple(same @ table for table in tables)
