"""Half-precision bases over a long time: rounding must not add up."""

from __future__ import annotations

import pytest
import torch

from eigenstep.core.matrices import Full, Kronecker
from eigenstep.core.sources import gradient_outer_product
from eigenstep.core.step import Turning, truncated_cayley, truncated_exp
from eigenstep.core.update import update
from eigenstep_lab.orthogonality import orthogonality_defect


def stream(n: int, count: int) -> torch.Tensor:
    """Return a random stream of float32 gradients, some directions a hundred times larger than
    others.
    """
    return torch.randn(count, n, dtype=torch.float32) * torch.logspace(
        -1, 1, n, dtype=torch.float32
    )


def test_thousands_of_bf16_updates_stay_orthogonal() -> None:
    """``||B^T B - I||_F / sqrt(n)`` of a basis stays below 1e-2, however long it learns."""
    S = Full.identity(64, dtype=torch.float32).to(torch.bfloat16)
    for step, g in enumerate(stream(64, 4000), start=1):
        S = update(S, gradient_outer_product(g), lr=0.05)
        if step % 500 == 0:
            assert orthogonality_defect(S.basis) <= 1e-2
    assert S.basis.dtype == torch.bfloat16
    assert S.eigs.dtype == torch.float32
    # It has learned something, too: fresh gradients are more likely under S than under the best
    # multiple of I.
    fresh = stream(64, 1000)
    learned = (fresh * S.solve(fresh)).sum(-1).mean() + S.logdet()
    isotropic = 64 + 64 * fresh.square().mean().log()
    assert learned < isotropic


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_truncated_maps_stay_orthogonal_as_well(dtype: torch.dtype) -> None:
    S = Kronecker.identity([24, 16], dtype=torch.float32).to(dtype)
    for _ in range(300):
        G = stream(16, 24)
        S = update(
            S,
            gradient_outer_product(G),
            lr=0.05,
            damping=1e-6,
            turning=Turning(map=truncated_cayley),
            positive=truncated_exp,
        )
    for factor in S.factors:
        assert isinstance(factor, Full)
        assert orthogonality_defect(factor.basis) <= 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_learns_what_float32_learns(dtype: torch.dtype) -> None:
    """On the same stream, the matrices agree to a few times the rounding of the basis."""
    single = Full.identity(16, dtype=torch.float32)
    half = single.to(dtype)
    for g in stream(16, 400):
        single, half = (update(S, gradient_outer_product(g), lr=0.02) for S in (single, half))
    gap = (single.dense() - half.dense()).norm() / single.dense().norm()
    assert gap <= 4 * torch.finfo(dtype).eps
