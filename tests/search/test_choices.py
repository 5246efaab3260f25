"""Methods and restart schedules by name, and of one's own."""

from __future__ import annotations

import numpy as np
import pytest

from eigenstep.core.result import Result
from eigenstep.search import Search, SearchResult, Start, minimize

from .problems import Isotropic, rastrigin, sphere


@pytest.mark.parametrize(
    "method", [Isotropic, Isotropic.start, lambda mean, sigma: Isotropic(mean, np.asarray(sigma))]
)
def test_a_distribution_of_ones_own(method: object) -> None:
    options = {"seed": 0, "bounds": (-3, 3), "integers": [2], "target": 1e-6, "max_evals": 20_000}
    result = minimize(sphere, np.array([2.0, -1.0, 2.0]), 0.7, method=method, **options)
    assert result.success, result.message
    assert result.x[2] == 0
    assert isinstance(Search(np.ones(3), 0.7, method=method).distribution, Isotropic)  # type: ignore[arg-type]


def test_a_schedule_of_ones_own() -> None:
    seen: list[tuple[Start, int]] = []

    def thrice(ended: Start, evals: int, rng: np.random.Generator) -> Start | None:
        seen.append((ended, evals))
        return Start(ended.population + 4, width=0.5) if len(seen) < 4 else None

    result = minimize(
        rastrigin, np.full(3, 3.3), 1.0, seed=0, method="spectral", restarts=thrice, batched=True
    )
    assert result.restarts == 3
    assert result.reason == "tolfun"
    assert [start.population for start, _ in seen] == [8, 12, 16, 20]
    assert sum(evals for _, evals in seen) == result.nfev


def test_results_speak_the_common_language() -> None:
    result = minimize(sphere, np.ones(2), 1.0, seed=0)
    assert isinstance(result, Result)
    assert isinstance(result, SearchResult)
    assert (result.success, result.reason, result.ngrad) == (True, "tolfun", 0)
    assert "history" not in repr(result)
    with pytest.raises(AttributeError):
        result.x = np.zeros(2)  # type: ignore[misc]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bounds_hold_in_the_number_format_of_the_points(dtype: str) -> None:
    """0.1 is another number in each format; samples at the bound must not count as outside."""
    torch = pytest.importorskip("torch")
    form = getattr(torch, dtype)
    bound = torch.tensor(0.1, dtype=form)
    result = minimize(
        lambda x: float(-x.double().sum()),
        torch.zeros(2, dtype=form),
        0.03,
        seed=0,
        bounds=(-0.1, 0.1),
        max_evals=400,
    )
    assert (result.x <= bound).all()
    assert (result.x == bound).all()


def test_points_too_large_for_their_number_format_are_cut() -> None:
    torch = pytest.importorskip("torch")
    result = minimize(
        lambda x: float(-x[0]),
        torch.full((2,), 1e4, dtype=torch.float16),
        5e4,
        seed=0,
        max_evals=60,
    )
    assert torch.isfinite(result.x).all()
