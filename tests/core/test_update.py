"""Options of the update that no claim of the paper covers: damping, two rates, memory, batches and
number formats.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from eigenstep.core.curvature import Dense, OuterProducts, project
from eigenstep.core.matrices import SPD, Diagonal, Full, Kronecker
from eigenstep.core.step import (
    Turning,
    bounded,
    exp,
    moore_penrose,
    truncated_cayley,
    truncated_exp,
)
from eigenstep.core.update import update
from eigenstep_lab.orthogonality import orthogonality_defect

from .cases import (
    at,
    indices,
    parts,
    random_full,
    random_kronecker,
    random_spd,
    random_symmetric,
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

    @pytest.mark.parametrize("rayleigh", [False, True])
    def test_batched_equals_looped(self, S: SPD, rayleigh: bool) -> None:
        vectors = torch.randn(2, *S.batch_shape, *S.sizes)
        new = update(
            S, OuterProducts(vectors), lr=0.1, damping=0.1, turning=Turning(rayleigh=rayleigh)
        )
        for index in indices(S):
            lead: tuple[slice | int, ...] = (slice(None), *index)
            one = update(
                at(S, index),
                OuterProducts(vectors[lead]),
                lr=0.1,
                damping=0.1,
                turning=Turning(rayleigh=rayleigh),
            )
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
    def test_full_matrix_sees_the_damped_curvature(self) -> None:
        """``H + damping I``, in the eigenvalues and, which leaves them unchanged, in
        the rotations.
        """
        S, H = random_full(5), random_spd(5)
        for rayleigh in (False, True):
            damped = update(S, Dense(H), lr=0.1, damping=0.3, turning=Turning(rayleigh=rayleigh))
            shifted = update(
                S, Dense(H + 0.3 * torch.eye(5)), lr=0.1, turning=Turning(rayleigh=rayleigh)
            )
            assert_close(damped.dense(), shifted.dense())

    @pytest.mark.parametrize("sizes", [[3, 4], [2, 3, 2]])
    def test_kronecker_damping_is_the_projection_of_damping_times_identity(
        self, sizes: list[int]
    ) -> None:
        """The paper's adaptive Lambda is what ``damping I`` projects to; for any number
        of factors.
        """
        S, G = random_kronecker(sizes), torch.randn(1, *sizes)
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


class TestTwoRates:
    def test_basis_rate_leaves_the_papers_eigenvalues_alone(self) -> None:
        S, curvature = random_full(5), OuterProducts(torch.randn(1, 5))
        slow, fast = (
            update(S, curvature, lr=0.05, turning=Turning(rate=rate)) for rate in (0.05, 0.5)
        )
        assert_close(slow.eigs, fast.eigs)
        angles = [(S.basis.T @ new.basis - torch.eye(5)).norm() for new in (slow, fast)]
        assert angles[1] > 1.5 * angles[0]

    def test_basis_rate_is_the_rate_of_the_basis(self) -> None:
        S, curvature = random_full(5), OuterProducts(torch.randn(1, 5))
        assert_close(
            update(S, curvature, lr=0.05, turning=Turning(rate=0.3)).basis,
            update(S, curvature, lr=0.3).basis,
        )

    def test_no_basis_rate_freezes_the_basis(self) -> None:
        S = random_full(5)
        new = update(S, OuterProducts(torch.randn(1, 5)), lr=0.1, turning=Turning(rate=0.0))
        assert_close(new.basis, S.basis)
        assert (new.eigs - S.eigs).norm() > 0.01


class TestMemory:
    """A memory keeps what the rotation has not yet diagonalized, so that nothing of the average is
    lost.
    """

    def test_memory_is_the_average_in_the_new_basis(self) -> None:
        S = random_full(6).with_residual()
        want = S.dense()
        for g in torch.randn(20, 6):
            S = update(S, OuterProducts(g[None]), lr=0.1, positive=truncated_exp)
            want = 0.9 * want + 0.1 * torch.outer(g, g)
            assert S.residual is not None
            assert_close(S.basis @ S.residual @ S.basis.T, want, rtol=1e-10, atol=1e-10)

    def test_rayleigh_with_residual_reads_the_diagonal_of_the_average(self) -> None:
        S = random_full(6).with_residual()
        for g in torch.randn(20, 6):
            S = update(
                S,
                OuterProducts(g[None]),
                lr=0.1,
                positive=truncated_exp,
                turning=Turning(rayleigh=True),
            )
            assert S.residual is not None
            assert_close(S.eigs, S.residual.diagonal(), rtol=1e-10, atol=1e-10)

    def test_memory_learns_a_stream_better(self) -> None:
        """With memory the matrix follows the exact running average more closely than without."""
        gradients = torch.randn(300, 8) @ random_spd(8)
        plain, memory = Full.identity(8), Full.identity(8).with_residual()
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

    def test_kronecker_memory_keeps_the_units_of_its_factor(self) -> None:
        """The memory is scaled with the eigenvalues when determinants are moved into the scale."""
        S = random_kronecker([3, 4]).with_residual()
        for G in torch.randn(20, 1, 3, 4):
            S = update(
                S, OuterProducts(G), lr=0.1, positive=truncated_exp, turning=Turning(rayleigh=True)
            )
            for factor in S.factors:
                assert isinstance(factor, Full)
                assert factor.residual is not None
                assert_close(factor.residual.diagonal(), factor.eigs, rtol=1e-10, atol=1e-10)


class TestRayleighQuotients:
    def test_eigenvalues_are_read_off_in_the_new_basis(self) -> None:
        S, H = random_full(5), random_symmetric(5)
        new = update(S, Dense(H), lr=0.1, decay=0.5, turning=Turning(rayleigh=True))
        average = 0.95 * S.dense() + 0.1 * H
        target = (new.basis.T @ average @ new.basis).diagonal()
        assert_close(new.eigs, exp(S.eigs, target))

    def test_closer_to_the_linear_update_than_the_papers_eigenvalues(self) -> None:
        gaps = torch.zeros(2)
        for _ in range(20):
            S, H = random_full(5), random_spd(5)
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
    def test_agrees_with_the_exact_map_for_small_steps(self) -> None:
        S, curvature = random_full(6), OuterProducts(torch.randn(2, 6))
        exact = update(S, curvature, lr=0.01)
        cut = update(S, curvature, lr=0.01, turning=Turning(map=truncated_cayley))
        assert_close(cut.dense(), exact.dense(), rtol=1e-9, atol=1e-9)

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


def test_learns_a_covariance_from_samples_in_every_structure(S: SPD) -> None:
    """A running mean over 1200 samples brings every structure near the matrix they were
    drawn from.
    """
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


def test_rotations_differ_only_in_the_basis() -> None:
    S, H = random_full(5), random_spd(5)
    a, b = (
        update(S, Dense(H), lr=0.1, turning=Turning(rotation=rotation))
        for rotation in (bounded, moore_penrose)
    )
    assert_close(a.eigs, b.eigs)
    assert_close(a.eigs, exp(S.eigs, S.eigs + 0.1 * (project(S, Dense(H))[0].diagonal() - S.eigs)))
