"""A Dask client: a worker that dies or hangs costs its evaluations, not the run."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from eigenstep.search import minimize

distributed = pytest.importorskip("distributed")
over = threading.Event()


def fine(x: np.ndarray) -> float:  # type: ignore[type-arg]
    return float((x**2).sum())


def hangs(x: np.ndarray) -> float:  # type: ignore[type-arg]
    if x[1] > 1.4:
        over.wait(60)
    return float((x**2).sum())


def cluster(**options: Any) -> Any:
    return distributed.LocalCluster(
        threads_per_worker=1, dashboard_address=None, silence_logs=50, **options
    )


def test_workers_of_a_client_give_the_same_result_and_may_hang() -> None:
    with cluster(n_workers=3, processes=False) as workers, distributed.Client(workers) as client:
        alone = minimize(fine, np.full(2, 0.5), 0.3, seed=0, max_evals=30)
        spread = minimize(fine, np.full(2, 0.5), 0.3, seed=0, max_evals=30, executor=client)
        np.testing.assert_array_equal(alone.x, spread.x)
        result = minimize(
            hangs,
            np.full(2, 1.1),
            0.3,
            method="spectral",
            seed=3,
            max_evals=6,
            executor=client,
            timeout=5,
        )
        over.set()
    assert 0 < result.failures < result.nfev
    assert result.first_failure is not None
    assert result.first_failure.startswith("TimeoutError")
    assert result.fun < 2.4
