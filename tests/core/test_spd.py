"""Every method of every structure against dense float64 linear algebra, in one set of tests for all
structures.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from eigenstep.core.matrices import (
    SPD,
    Diagonal,
    Full,
    Identity,
    Kronecker,
    centered_exp,
    factors_of,
)
from eigenstep_lab.baselines.van_loan import nearest_kronecker

from .cases import (
    BATCHES,
    STRUCTURES,
    at,
    dense_oracle,
    indices,
    matrix_power,
    parts,
    random_full,
    random_kronecker,
    random_spd,
)

POWERS = [1.0, -1.0, 0.5, -0.5, -1 / 3, -0.25, 0.0, 2.0, 0.7]


@pytest.fixture
def oracle(S: SPD) -> Tensor:
    return dense_oracle(S)


def events(S: SPD, *lead: int) -> Tensor:
    return torch.randn(*lead, *S.batch_shape, *S.sizes)


def flat(S: SPD, x: Tensor) -> Tensor:
    return x.reshape(*x.shape[: x.ndim - len(S.sizes)], math.prod(S.sizes))


class TestAgainstDenseOracle:
    def test_matmul(self, S: SPD, oracle: Tensor) -> None:
        x = events(S, 2)
        for power in POWERS:
            want = torch.einsum("...ij,l...j->l...i", matrix_power(oracle, power), flat(S, x))
            assert_close(flat(S, S.matmul(x, power)), want, rtol=1e-11, atol=1e-11)

    @pytest.mark.parametrize("power", [-1.0, 1.0])
    def test_sample_covariance(self, structure: str, power: float) -> None:
        """The covariance of 40,000 samples is ``S^power`` to five standard errors of each entry."""
        S = STRUCTURES[structure](())
        count = 40_000
        x = flat(S, S.sample((count,), power=power, generator=torch.Generator().manual_seed(1)))
        want = matrix_power(dense_oracle(S), power)
        error = ((want.diag()[:, None] * want.diag() + want.square()) / count).sqrt()
        assert ((x.T @ x / count - want).abs() < 5 * error).all()
        assert (x.mean(0).abs() < 5 * (want.diag() / count).sqrt()).all()

    def test_sample_shape_and_seed(self, S: SPD) -> None:
        draws = [
            S.sample((2, 3), generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
        ]
        assert draws[0].shape == (2, 3, *S.batch_shape, *S.sizes)
        assert draws[0].equal(draws[1])
        assert not draws[0].equal(draws[2])
        assert S.sample().shape == (*S.batch_shape, *S.sizes)

    def test_from_dense_round_trip(self, S: SPD, oracle: Tensor) -> None:
        """A matrix of a structure is recovered from its dense form."""
        if isinstance(S, Kronecker):
            kinds = [type(factor).__name__.lower() for factor in S.factors]
            again: SPD = nearest_kronecker(oracle, S.sizes, kinds)
        else:
            assert isinstance(S, (Full, Diagonal))
            again = type(S).from_dense(oracle)
        assert type(again) is type(S)
        assert_close(dense_oracle(again), oracle, rtol=1e-11, atol=1e-11)

    def test_numbers_and_dense_forms(self, S: SPD, oracle: Tensor) -> None:
        close = partial(assert_close, rtol=1e-10, atol=1e-10)
        x = events(S)
        close(flat(S, S.solve(x)), torch.linalg.solve(oracle, flat(S, x)))
        close(S.logdet(), torch.linalg.slogdet(oracle)[1])
        close(S.condition(), torch.linalg.cond(oracle))
        close(flat(S, S.spectrum).sort(-1).values, torch.linalg.eigvalsh(oracle))
        for power in POWERS:
            want = matrix_power(oracle, power)
            close(S.dense(power), want)
            close(S.trace(power), want.diagonal(dim1=-2, dim2=-1).sum(-1))


class TestBatches:
    def test_batched_equals_looped(self, S: SPD) -> None:
        x = events(S, 2)
        for index in indices(S):
            one = at(S, index)
            lead: tuple[slice | int, ...] = (slice(None), *index)
            assert_close(S.matmul(x, -0.5)[lead], one.matmul(x[lead], -0.5))
            assert_close(S.dense(0.3)[index], one.dense(0.3))
            for name in ("logdet", "trace", "condition"):
                assert_close(getattr(S, name)()[index], getattr(one, name)())

    def test_one_event_for_the_whole_batch(self, S: SPD) -> None:
        """Batch dimensions of size one are repeated, as everywhere in torch."""
        x = torch.randn(*[1] * len(S.batch_shape), *S.sizes)
        assert_close(S.matmul(x), S.matmul(x.expand(*S.batch_shape, *S.sizes)))


class TestNumberFormats:
    @pytest.mark.parametrize(
        ("dtype", "tolerance"),
        [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)],
    )
    def test_to_lower_precision(self, structure: str, dtype: torch.dtype, tolerance: float) -> None:
        """Half precision is for bases; eigenvalues are float32 then, and results close to exact."""
        S = STRUCTURES[structure]((3,))
        low = S.to(dtype)
        assert low.spectrum.dtype == torch.float32
        bases = [f.basis for f in factors_of(low) if isinstance(f, Full)]
        for part in parts(low):
            half = any(part is basis for basis in bases)
            assert part.dtype == (dtype if half else torch.float32)
        x = events(S, 2)
        got = low.matmul(x.to(dtype), -0.5)
        assert got.dtype == dtype
        assert low.matmul(x.float()).dtype == torch.float32
        want = S.matmul(x, -0.5)
        assert (got.double() - want).norm() <= tolerance * want.norm()
        assert_close(low.logdet().double(), S.logdet(), rtol=1e-4, atol=1e-4)
        assert low.sample((2,)).dtype == torch.float32
        assert low.dense().dtype == torch.float32
        gap = (low.dense().double() - S.dense()).norm()
        assert gap <= tolerance * S.dense().norm()

    def test_to_and_back_keeps_float32_exactly(self, structure: str) -> None:
        single = STRUCTURES[structure]((3,)).to(torch.float32)
        for a, b in zip(
            parts(single.to(torch.float64).to(torch.float32)), parts(single), strict=True
        ):
            assert a.equal(b)

    def test_to_device(self, structure: str) -> None:
        S = STRUCTURES[structure]((3,))
        moved = S.to("meta")
        assert all(part.device.type == "meta" for part in parts(moved))
        assert moved.sizes == S.sizes
        assert moved.spectrum.dtype == S.spectrum.dtype
        assert all(part.device.type == "cpu" for part in parts(S))


class TestStart:
    @pytest.mark.parametrize("batch", BATCHES, ids=str)
    def test_identity(self, batch: tuple[int, ...]) -> None:
        eye = torch.eye(6).expand(*batch, 6, 6)
        kinds = ["full", "identity"]
        starts = [
            Full.identity(6, batch),
            Diagonal.identity(6, batch),
            Kronecker.identity([2, 3], batch),
            Kronecker.identity([2, 3], batch, kinds=kinds),
        ]
        for start in starts:
            assert_close(start.dense(), eye)
            assert start.batch_shape == torch.Size(batch)
            assert start.spectrum.dtype == torch.float64
        assert isinstance(starts[-1].factors[1], Identity)  # type: ignore[attr-defined]
        assert Full.identity(3, dtype=torch.float32).basis.dtype == torch.float32
        assert Kronecker.identity([3], device="meta").scale.device.type == "meta"

    def test_memory(self) -> None:
        """The memory starts as ``Diag(d)``, follows conversions and is no part of the matrix."""
        S = random_kronecker([3, 4], batch=(2,)).with_residual()
        for factor in S.factors:
            assert isinstance(factor, Full)
            assert factor.residual is not None
            assert_close(factor.residual, torch.diag_embed(factor.eigs))
        low = random_full(3).with_residual().to(torch.bfloat16)
        assert low.residual is not None
        assert low.residual.dtype == torch.float32
        scaled = (
            Full(torch.eye(2), torch.tensor([2.0, 8.0])).with_residual().with_unit_determinant()
        )
        assert scaled.residual is not None
        assert_close(scaled.residual, torch.diag(torch.tensor([0.5, 2.0])))


class TestProjectionOntoKronecker:
    """``nearest_kronecker`` solves Van Loan and Pitsianis' nearest-Kronecker-product problem."""

    @pytest.mark.parametrize("batch", BATCHES, ids=str)
    def test_two_factors_equal_leading_singular_vectors(self, batch: tuple[int, ...]) -> None:
        n = 3
        m = 4
        matrix = random_spd(n * m, batch)
        rearranged = (
            matrix.reshape(*batch, n, m, n, m).transpose(-3, -2).reshape(*batch, n * n, m * m)
        )
        u, s, v = torch.linalg.svd(rearranged)
        left = (u[..., :, 0] * s[..., :1]).reshape(*batch, n, n)
        want = torch.einsum("...ij,...kl->...ikjl", left, v[..., 0, :].reshape(*batch, m, m))
        got = nearest_kronecker(matrix, [n, m])
        assert_close(got.dense(), want.reshape(*batch, n * m, n * m), rtol=1e-9, atol=1e-9)


class TestUnitDeterminant:
    def test_centered_exp_has_product_one(self) -> None:
        logs = 20 * torch.randn(4, 7)
        values = centered_exp(logs)
        assert_close(values.log().sum(-1), torch.zeros(4), rtol=0, atol=1e-12)
        assert_close(values.log(), logs - logs.mean(-1, keepdim=True), rtol=1e-12, atol=1e-12)

    def test_centered_exp_of_a_huge_spread_stays_finite(self) -> None:
        for dtype in (torch.float32, torch.float64):
            values = centered_exp(torch.tensor([-3e4, 0.0, 3e4, 100.0], dtype=dtype))
            assert torch.isfinite(values).all()
            assert torch.isfinite(1 / values).all()
            assert_close(values.log().sum().double(), torch.tensor(0.0), rtol=0, atol=1e-4)
