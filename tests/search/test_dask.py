"""A Dask client: a worker that dies or hangs costs its evaluations, not the run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from eigenstep.search import minimize

distributed = pytest.importorskip("distributed")


def fine(x: np.ndarray) -> float:  # type: ignore[type-arg]
    return float((x**2).sum())


def deadly(x: np.ndarray) -> float:  # type: ignore[type-arg]
    if x[0] > 1.4:
        os._exit(1)
    if x[1] > 1.4:
        time.sleep(20)
    return float((x**2).sum())


@pytest.fixture
def client() -> Iterator[Any]:
    import dask

    settings = {"distributed.scheduler.allowed-failures": 0, "distributed.worker.daemon": True}
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.mark.slow
def test_a_cluster_with_workers_that_die_and_hang(client: Any) -> None:
    alone = minimize(fine, np.full(2, 0.5), 0.3, seed=0, max_evals=60)
    spread = minimize(fine, np.full(2, 0.5), 0.3, seed=0, max_evals=60, executor=client)
    np.testing.assert_array_equal(alone.x, spread.x)
    result = minimize(deadly, np.full(2, 1.1), 0.3, seed=3, max_evals=18, executor=client, timeout=8)
    assert 0 < result.failures < result.nfev
    assert result.fun < 1.5
    assert result.first_failure is not None
