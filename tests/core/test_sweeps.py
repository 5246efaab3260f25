"""Several turns towards one average, no turn at all, and damping that differs from matrix to
matrix.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from eigenstep.core.curvature import Dense, OuterProducts, project
from eigenstep.core.matrices import Full, Kronecker
from eigenstep.core.step import Rotation, Turning, bounded, cayley, truncated_exp
from eigenstep.core.update import update

from .cases import random_full, random_kronecker, random_spd

close = partial(assert_close, rtol=1e-10, atol=1e-10)


class TestSweeps:
    @pytest.mark.parametrize("rotation", [bounded, partial(bounded, pairwise=True)])
    def test_enough_of_them_diagonalize_the_average(self, rotation: Rotation) -> None:
        """With Rayleigh quotients the step is then the default one, ``S <- (1 - lr) S + lr H``, for
        any ``lr``.
        """
        S, H = random_full(6), random_spd(6)
        new = update(
            S,
            Dense(H),
            lr=0.7,
            turning=Turning(sweeps=200, rayleigh=True, rotation=rotation),
            positive=lambda _, n: n,
        )
        assert_close(new.dense(), 0.3 * S.dense() + 0.7 * H, rtol=1e-8, atol=1e-8)

    def test_each_goes_on_from_the_average_that_the_last_has_turned(self) -> None:
        S, curvature, lr = random_full(5), OuterProducts(torch.randn(3, 5)), 0.4
        average = (1 - lr) * torch.diag(S.eigs) + lr * project(S, curvature)[0]
        basis = S.basis
        for _ in range(3):
            turn = cayley(bounded(S.eigs, average))
            average, basis = turn.T @ average @ turn, basis @ turn
        new = update(S.with_residual(), curvature, lr=lr, turning=Turning(sweeps=3))
        assert isinstance(new, Full)
        assert new.residual is not None
        close(new.basis, basis)
        close(new.residual, average)
        close(new.eigs, update(S, curvature, lr=lr).spectrum)

    def test_two_leave_less_to_turn_to_than_one(self) -> None:
        S = random_kronecker([5, 4], batch=(3,)).with_residual()
        curvature = OuterProducts(torch.randn(2, 3, 5, 4))
        rest = []
        for sweeps in (1, 2):
            new = update(S, curvature, lr=0.5, turning=Turning(sweeps=sweeps))
            assert isinstance(new, Kronecker)
            memories = [
                f.residual for f in new.factors if isinstance(f, Full) and f.residual is not None
            ]
            rest.append(
                torch.stack(
                    [
                        torch.linalg.matrix_norm(
                            m - torch.diag_embed(m.diagonal(0, -2, -1)), dim=(-2, -1)
                        )
                        for m in memories
                    ]
                )
            )
        assert (rest[1] < 0.7 * rest[0]).all()

    @pytest.mark.parametrize(
        ("sweeps", "error"),
        [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)],
    )
    def test_bad_numbers_of_sweeps(self, sweeps: int, error: type[Exception]) -> None:
        with pytest.raises(error, match="sweeps must be"):
            update(
                random_full(3),
                OuterProducts(torch.randn(1, 3)),
                lr=0.1,
                turning=Turning(sweeps=sweeps),
            )


class TestEigenvaluesAlone:
    """With rate zero the step is that of a diagonal matrix, seen in the eigenbasis."""

    def test_like_a_diagonal_matrix_in_the_eigenbasis(self) -> None:
        S, gradients = random_kronecker([4, 3], batch=(2,)), torch.randn(1, 2, 4, 3)
        new = update(
            S,
            OuterProducts(gradients),
            lr=0.2,
            turning=Turning(rate=0.0, rayleigh=True),
            damping=0.1,
        )
        axes = torch.eye(4).expand(2, 4, 4), torch.eye(3).expand(2, 3, 3)
        aligned = Kronecker(
            S.scale, tuple(replace(f, basis=b) for f, b in zip(S.factors, axes, strict=True))
        )
        want = update(aligned, OuterProducts(S.rotate(gradients)), lr=0.2, damping=0.1)
        close(new.spectrum, want.spectrum)
        assert isinstance(new, Kronecker)
        for before, after in zip(S.factors, new.factors, strict=True):
            assert isinstance(before, Full)
            assert isinstance(after, Full)
            assert torch.equal(before.basis, after.basis)

    def test_the_memory_waits_as_well(self) -> None:
        S = random_full(4).with_residual()
        new = update(S, OuterProducts(torch.randn(1, 4)), lr=0.2, turning=Turning(rate=0.0))
        assert isinstance(new, Full)
        assert S.residual is not None
        assert new.residual is not None
        assert torch.equal(new.residual, S.residual)


class TestDampingOfEachMatrix:
    def test_like_one_after_the_other(self) -> None:
        S, gradients, damping = (
            random_kronecker([4, 3], batch=(2,)),
            torch.randn(1, 2, 4, 3),
            torch.tensor([0.0, 2.0]),
        )
        both = update(S, OuterProducts(gradients), lr=0.2, damping=damping, positive=truncated_exp)
        for index in range(2):
            one = Kronecker(
                S.scale[index],
                tuple(
                    Full(f.basis[index], f.eigs[index]) for f in S.factors if isinstance(f, Full)
                ),
            )
            curvature = OuterProducts(gradients[:, index])
            alone = update(
                one, curvature, lr=0.2, damping=damping[index].item(), positive=truncated_exp
            )
            close(both.dense()[index], alone.dense())

    @pytest.mark.parametrize(
        ("damping", "text"),
        [
            ([1.0, 1.0, 1.0], r"damping must be a number or have shape \(2,\), got \(3,\)"),
            ([1.0, -1.0], "damping must be at least 0.0, got -1"),
            ([1.0, float("nan")], "damping must be finite"),
        ],
    )
    def test_bad_damping(self, damping: list[float], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            update(
                random_full(3, (2,)),
                OuterProducts(torch.randn(1, 2, 3)),
                lr=0.1,
                damping=torch.tensor(damping),
            )

    def test_bad_format_of_damping(self) -> None:
        with pytest.raises(TypeError, match=r"damping must be torch\.float64"):
            update(
                random_full(3),
                OuterProducts(torch.randn(1, 3)),
                lr=0.1,
                damping=torch.ones((), dtype=torch.float32),
            )
