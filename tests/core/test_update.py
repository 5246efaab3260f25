"""Options of the update that no claim of the paper covers: damping, two rates, memory, batches and
number formats.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from eigenstep.core.curvature import Dense, OuterProducts
from eigenstep.core.matrices import SPD, Diagonal, Full, Kronecker
from eigenstep.core.step import (
    Turning,
    truncated_cayley,
    truncated_exp,
)
from eigenstep.core.update import update
from eigenstep_lab.orthogonality import orthogonality_defect

from .cases import (
    STRUCTURES,
    at,
    indices,
    parts,
    random_full,
    random_kronecker,
    random_spd,
)


class TestStructure:
    def test_structure_shape_and_format_are_kept(self, S: SPD) -> None:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            old = S.to(dtype)
            new = update(
                old, OuterProducts(torch.randn(2, *S.batch_shape, *S.sizes)), lr=0.1, damping=0.1
            )
            assert type(new) is type(old)
            assert new.sizes == old.sizes
            for a, b in zip(parts(new), parts(old), strict=True):
                assert a.shape == b.shape
                assert a.dtype == b.dtype

    def test_batched_equals_looped(self, S: SPD) -> None:
        step = partial(update, lr=0.1, damping=0.1, turning=Turning(rayleigh=True))
        vectors = torch.randn(2, *S.batch_shape, *S.sizes)
        new = step(S, OuterProducts(vectors))
        for index in indices(S):
            one = step(at(S, index), OuterProducts(vectors[(slice(None), *index)]))
            for a, b in zip(parts(at(new, index)), parts(one), strict=True):
                assert_close(a, b)

    def test_zero_rate_changes_nothing(self, S: SPD) -> None:
        new = update(S, OuterProducts(torch.randn(2, *S.batch_shape, *S.sizes)), lr=0.0)
        for a, b in zip(parts(new), parts(S), strict=True):
            assert_close(a, b, rtol=1e-12, atol=1e-12)

    def test_zero_curvature_only_decays(self, S: SPD) -> None:
        """``S <- (1 - lr) S`` with truncated maps, ``e^-lr S`` with exact ones."""
        zero = OuterProducts(torch.zeros(1, *S.batch_shape, *S.sizes))
        assert_close(update(S, zero, lr=0.1, positive=truncated_exp).dense(), 0.9 * S.dense())
        assert_close(update(S, zero, lr=0.1).dense(), torch.tensor(-0.1).exp() * S.dense())
        assert_close(update(S, zero, lr=0.1, decay=0.0).dense(), S.dense())

    def test_scaling_the_problem_scales_the_result(self, S: SPD) -> None:
        """``S -> c^2 S`` and gradients ``-> c g`` give ``c^2`` times the result: there are no units
        anywhere.
        """
        vectors = torch.randn(2, *S.batch_shape, *S.sizes)
        c = 1e8
        big: SPD
        if isinstance(S, Kronecker):
            big = Kronecker(c**2 * S.scale, S.factors)
        elif isinstance(S, Full):
            big = Full(S.basis, c**2 * S.eigs)
        else:
            assert isinstance(S, Diagonal)
            big = Diagonal(c**2 * S.eigs)
        small_new = update(S, OuterProducts(vectors), lr=0.1, damping=0.01)
        big_new = update(big, OuterProducts(c * vectors), lr=0.1, damping=0.01 * c**2)
        assert_close(big_new.dense() / c**2, small_new.dense(), rtol=1e-10, atol=1e-10)


class TestDamping:
    @pytest.mark.parametrize("sizes", [[3, 4], [2, 3, 2]])
    def test_kronecker_damping_is_the_projection_of_damping_times_identity(
        self, sizes: list[int]
    ) -> None:
        """The paper's adaptive Lambda is what ``damping I`` projects to; for any number
        of factors.
        """
        S = random_kronecker(sizes)
        G = torch.randn(1, *sizes)
        H = torch.outer(G.flatten(), G.flatten())
        damped = update(S, OuterProducts(G), lr=0.1, damping=0.3)
        shifted = update(S, Dense(H + 0.3 * torch.eye(len(H))), lr=0.1)
        assert_close(damped.dense(), shifted.dense())

    def test_keeps_rank_deficient_curvature_invertible(self) -> None:
        """A 12 by 2 gradient tells nothing about ten directions: undamped, their eigenvalues
        vanish.
        """
        G = torch.randn(1, 12, 2)
        undamped = damped = Kronecker.identity([12, 2])
        for _ in range(100):
            undamped = update(undamped, OuterProducts(G), lr=0.5, positive=truncated_exp)
            damped = update(damped, OuterProducts(G), lr=0.5, damping=1e-6, positive=truncated_exp)
        assert damped.spectrum.min() > 1e-8
        assert undamped.spectrum.min() < 1e-20
        assert torch.isfinite(undamped.spectrum).all()


class TestMemory:
    """A memory keeps what the rotation has not yet diagonalized, so that nothing of the average is
    lost.
    """

    def test_memory_learns_a_stream_better(self) -> None:
        """With memory the matrix follows the exact running average more closely than without."""
        gradients = torch.randn(300, 8) @ random_spd(8)
        plain = Full.identity(8)
        memory = Full.identity(8).with_residual()
        want = torch.eye(8)
        gaps = torch.zeros(2)
        for g in gradients:
            plain, memory = (
                update(
                    S,
                    OuterProducts(g[None]),
                    lr=0.1,
                    positive=truncated_exp,
                    turning=Turning(rayleigh=True),
                )
                for S in (plain, memory)
            )
            want = 0.9 * want + 0.1 * torch.outer(g, g)
            gaps += torch.stack([(S.dense() - want).norm() for S in (plain, memory)])
        assert gaps[1] < 0.7 * gaps[0]


class TestRayleighQuotients:
    def test_closer_to_the_linear_update_than_the_papers_eigenvalues(self) -> None:
        gaps = torch.zeros(2)
        for _ in range(20):
            S = random_full(5)
            H = random_spd(5)
            want = 0.9 * S.dense() + 0.1 * H
            for i, rayleigh in enumerate((False, True)):
                new = update(
                    S,
                    Dense(H, semidefinite=True),
                    lr=0.1,
                    positive=truncated_exp,
                    turning=Turning(rayleigh=rayleigh),
                )
                gaps[i] += (new.dense() - want).norm()
        assert gaps[1] < gaps[0]


class TestTruncatedCayleyInTheUpdate:
    @pytest.mark.parametrize("cap", [0.3, 0.6])
    def test_stays_orthogonal_with_long_steps(self, cap: float) -> None:
        """The cap bounds the defect of one step by ``2 cap^8``, which one Newton-Schulz step
        squares.
        """
        S = Full.identity(20)
        for _ in range(100):
            S = update(
                S,
                OuterProducts(torch.randn(1, 20)),
                lr=0.9,
                turning=Turning(map=partial(truncated_cayley, cap=cap)),
            )
            assert orthogonality_defect(S.basis) < (2 * cap**8) ** 2


def test_learns_a_covariance_from_samples_in_every_structure(structure: str) -> None:
    """A running mean over 1200 samples brings every structure near the matrix they were
    drawn from.
    """
    S = STRUCTURES[structure]((3,))
    want = S.dense()
    learned: SPD
    if isinstance(S, Kronecker):
        kinds = [type(factor).__name__.lower() for factor in S.factors]
        learned = Kronecker.identity(S.sizes, S.batch_shape, kinds=kinds)
    else:
        assert isinstance(S, (Full, Diagonal))
        learned = type(S).identity(S.sizes[0], S.batch_shape)
    for t in range(1, 61):
        samples = S.sample((20,), power=1.0)
        curvature = OuterProducts(samples / 20**0.5)
        learned = update(learned, curvature, lr=1 / (t + 1), positive=truncated_exp)
    error = torch.linalg.matrix_norm(learned.dense() - want) / torch.linalg.matrix_norm(want)
    assert error.max() < 0.35


@pytest.mark.parametrize("rotation", ["bounded", "pairwise"])
def test_enough_sweeps_diagonalize_the_average(rotation: str) -> None:
    """With Rayleigh quotients the step is then ``(1 - lr) S + lr H``, for any ``lr``."""
    S = random_full(6)
    H = random_spd(6)
    turning = Turning(rotation, sweeps=200, rayleigh=True)
    new = update(S, Dense(H), lr=0.7, turning=turning, positive=lambda _, n: n)
    assert_close(new.dense(), 0.3 * S.dense() + 0.7 * H, rtol=1e-8, atol=1e-8)


def test_the_memory_of_a_still_basis_waits() -> None:
    S = random_full(4).with_residual()
    new = update(S, OuterProducts(torch.randn(1, 4)), lr=0.2, turning=Turning(rate=0.0))
    assert S.residual is not None
    assert new.residual is not None
    assert new.residual.equal(S.residual)
