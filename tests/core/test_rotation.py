"""The generators of the rotation, entry by entry and as a whole."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from eigenstep.core.curvature import Dense
from eigenstep.core.matrices import Full
from eigenstep.core.step import Rotation, Turning, bounded, cayley, moore_penrose, normalized
from eigenstep.core.update import update

from .cases import random_spd, random_symmetric, spread_eigs

pairwise = partial(bounded, pairwise=True)
ALL: dict[str, Rotation] = {
    "moore_penrose": moore_penrose,
    "normalized": normalized,
    "bounded": bounded,
    "pairwise": pairwise,
}


@pytest.fixture(params=ALL)
def rotation(request: pytest.FixtureRequest) -> Rotation:
    return ALL[request.param]


class TestAllRotations:
    def test_skew_symmetric(self, rotation: Rotation) -> None:
        N = rotation(spread_eigs(6, (4,)), random_symmetric(6, (4,)))
        assert_close(N, -N.mT, rtol=0, atol=1e-15)

    def test_diagonal_average_does_not_turn(self, rotation: Rotation) -> None:
        d = spread_eigs(6)
        assert rotation(d, d.diag()).eq(0).all()
        assert rotation(d, torch.zeros(6, 6)).eq(0).all()

    def test_arguments_are_left_alone(self, rotation: Rotation) -> None:
        d = spread_eigs(5)
        A = random_symmetric(5)
        before = d.clone(), A.clone()
        rotation(d, A)
        assert d.equal(before[0])
        assert A.equal(before[1])

    def test_turns_towards_the_curvature(self, rotation: Rotation) -> None:
        """A small step lowers what is off the diagonal."""
        d = spread_eigs(5)
        A = d.diag() + 1e-3 * random_symmetric(5)
        Q = cayley(rotation(d, A) if rotation is not normalized else normalized(d, A, rate=1e-4))
        after = Q.T @ A @ Q
        assert off(after).norm() < off(A).norm()


def off(matrix: Tensor) -> Tensor:
    return matrix - torch.diag(matrix.diag())


class TestMoorePenrose:
    def test_gap_is_relative_to_the_larger_eigenvalue(self) -> None:
        A = torch.ones(2, 2)
        for scale in (1e-12, 1.0, 1e12):
            d = scale * torch.tensor([1.0, 1.05])
            assert moore_penrose(d, A, gap=0.1).eq(0).all()
            assert moore_penrose(d, A, gap=0.04).abs().max() > 0

    def test_equal_eigenvalues_never_turn(self) -> None:
        for gap in (0.0, 1e-6):
            assert moore_penrose(torch.ones(4), random_symmetric(4), gap=gap).eq(0).all()

    def test_overflow_is_cut(self) -> None:
        N = moore_penrose(torch.tensor([1e-200, 2e-200]), 1e200 * torch.ones(2, 2))
        assert torch.isfinite(N).all()


class TestBounded:
    def test_pairwise_is_half_the_tangent_of_jacobis_angle(self) -> None:
        """Jacobi's angle diagonalizes a pair of axes; ``Cayley(N)`` turns by it up to
        third order.
        """
        A = torch.tensor([[2.0, 0.3], [0.3, 1.0]])
        angle = 0.5 * math.atan2(2 * 0.3, 2.0 - 1.0)
        turn = torch.tensor(
            [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        )
        assert abs((turn.T @ A @ turn)[0, 1]) < 1e-15
        N = pairwise(torch.ones(2), A)
        assert N[1, 0].item() == pytest.approx(math.tan(angle) / 2)
        assert abs(2 * math.atan(N[1, 0].item()) - angle) < angle**3 / 3

    def test_row_norms(self) -> None:
        for n in (2, 5, 40):
            for A in (random_symmetric(n, (20,)), random_spd(n, (20,)), torch.ones(20, n, n)):
                N = bounded(torch.ones(20, n), A)
                assert torch.linalg.vector_norm(N, dim=-1).max() <= 0.5**0.5 + 1e-12
                assert pairwise(torch.ones(20, n), A).abs().max() <= 0.5 + 1e-12

    def test_row_norms_where_squares_underflow(self) -> None:
        A = torch.diag(torch.tensor([1.0, 1e-180, 1e-180])) + 1e-170 * (
            torch.ones(3, 3) - torch.eye(3)
        )
        for N in (bounded(torch.ones(3), A), pairwise(torch.ones(3), A)):
            assert torch.linalg.vector_norm(N, dim=-1).max() <= 0.5**0.5 + 1e-12


class TestLeavingATie:
    """From ``S = I``, curvature with unit diagonal tells the eigenvalues nothing: only a rotation
    gets anywhere.
    """

    def correlation(self, n: int = 8) -> Tensor:
        H = random_spd(n)
        scale = H.diagonal().rsqrt()
        H = scale[:, None] * H * scale
        return (H + H.T) / 2 - torch.diag(H.diagonal() - 1)

    @pytest.mark.parametrize("is_pairwise", [False, True])
    @pytest.mark.parametrize("rayleigh", [False, True])
    def test_bounded_learns_the_matrix(self, is_pairwise: bool, rayleigh: bool) -> None:
        H = self.correlation()
        S = Full.identity(8)
        first = update(
            S,
            Dense(H),
            lr=0.2,
            turning=Turning(rotation=partial(bounded, pairwise=is_pairwise), rayleigh=rayleigh),
        )
        assert (first.basis - S.basis).norm() > 0.1
        for _ in range(600):
            S = update(
                S,
                Dense(H),
                lr=0.2,
                turning=Turning(rotation=partial(bounded, pairwise=is_pairwise), rayleigh=rayleigh),
            )
        assert_close(S.dense(), H, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("rotation", [moore_penrose, normalized])
    def test_the_papers_rotations_are_stuck_for_ever(self, rotation: Rotation) -> None:
        H = self.correlation()
        S = Full.identity(8)
        for _ in range(600):
            S = update(S, Dense(H), lr=0.2, turning=Turning(rotation))
        assert_close(S.dense(), torch.eye(8))
        assert (S.dense() - H).norm() > 0.5
