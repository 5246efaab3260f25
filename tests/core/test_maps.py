"""The maps to orthogonal matrices and positive vectors, exact and truncated."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from eigenstep.core.step import (
    cayley,
    exp,
    quadratic,
    reorthonormalize,
    shrink_factor,
    truncated_cayley,
    truncated_exp,
)

from .cases import defect, random_orthogonal, random_skew

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class TestCayley:
    def test_two_axes_turn_by_twice_the_arc_tangent(self) -> None:
        for x in (0.0, 0.3, 1.0, 40.0):
            N = torch.tensor([[0.0, -x], [x, 0.0]])
            angle = torch.tensor(2 * x).atan2(torch.tensor(1 - x * x))
            want = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).reshape(2, 2)
            assert_close(cayley(N), want)

    def test_huge_generators_stay_orthogonal(self) -> None:
        """Even if the norm is far beyond what the solve could handle, in odd sizes, where ``N`` is
        singular, too.
        """
        for size in (1e6, 1e12, 1e200):
            for n in (2, 5, 40):
                assert defect(reorthonormalize(cayley(random_skew(n, (3,), size)))) < 1e-10


class TestTruncatedCayley:
    def test_is_exact_up_to_the_eighth_power(self) -> None:
        """``truncated = Cayley(N)(I - N^8)``."""
        N = random_skew(5, size=0.2)
        rest = torch.eye(5) - torch.linalg.matrix_power(N, 8)
        assert_close(truncated_cayley(N, cap=None), cayley(N) @ rest)

    def test_cap_shortens_long_generators_only(self) -> None:
        short = random_skew(5, size=0.02)
        long = random_skew(5, size=3.0)
        assert_close(truncated_cayley(short), truncated_cayley(short, cap=None))
        shrink = shrink_factor(long @ long, 0.6).squeeze()
        assert shrink < 1
        assert_close(
            torch.linalg.matrix_norm(torch.linalg.matrix_power(shrink * long, 2)).sqrt(),
            torch.tensor(0.6),
        )
        assert_close(truncated_cayley(long), truncated_cayley(shrink * long, cap=None))

    def test_cap_bounds_the_spectral_norm_and_so_the_defect(self) -> None:
        N = random_skew(8, (50,), 5.0)
        shrink = shrink_factor(N @ N, 0.6)
        assert torch.linalg.matrix_norm(shrink * N, 2).max() <= 0.6
        assert defect(truncated_cayley(N)) < 2 * 0.6**8


class TestReorthonormalize:
    def test_squares_the_defect(self) -> None:
        B = random_orthogonal(6)
        for size in (1e-1, 1e-2, 1e-4):
            bent = B + size * torch.randn(6, 6) / 6
            before = torch.linalg.matrix_norm(bent.T @ bent - torch.eye(6), 2)
            once = reorthonormalize(bent)
            after = torch.linalg.matrix_norm(once.T @ once - torch.eye(6), 2)
            assert after <= before**2
            assert after > before**2 / 10


class TestExponentialMaps:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_positive_and_finite_at_the_edges(self, dtype: torch.dtype) -> None:
        limits = torch.finfo(dtype)
        d = torch.tensor([limits.tiny, 1e-30, 1.0, 1e30, limits.max * limits.eps], dtype=dtype)
        h = torch.tensor([0.0, 1.0, -1.0, 1e30, -1e30], dtype=dtype)
        for tangent in h:
            new = exp(d, d + tangent)
            assert (new > 0).all()
            assert torch.isfinite(new).all()
            assert torch.isfinite(1 / new).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_truncated_stays_positive_when_everything_cancels(self, dtype: torch.dtype) -> None:
        """A step with ``lr * decay = 1`` forgets the old eigenvalue; what is left may be lost in
        its rounding.
        """
        d = torch.tensor([1.0, 1e15, 1e-20], dtype=dtype)
        for left in (0.0, 1e-30):
            new = truncated_exp(d, torch.full_like(d, left))
            assert (new > 0).all()
            assert (new <= torch.finfo(dtype).eps * d + 2 * left).all()


def test_generators_beyond_all_measure_turn_nothing() -> None:
    """The norm of their square is infinite, their square is not."""
    generator = 1e15 * torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]], dtype=torch.float32)
    assert_close(quadratic(generator), torch.eye(2, dtype=torch.float32)[None], rtol=0, atol=1e-6)
