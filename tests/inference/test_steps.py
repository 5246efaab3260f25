"""One step of the precision matrix against dense linear algebra."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence
from torch.testing import assert_close

from eigenstep import Dense, Diagonal, Full, Kronecker
from eigenstep.inference.gaussian import NotPositiveDefinite, average, longest_step, tangent_vector
from eigenstep_lab.baselines.van_loan import nearest_kronecker

from .problems import random_spd


@pytest.mark.parametrize(("lr", "decay", "condition"), [(0.1, 1.0, 10.0), (1.0, 0.0, 1e6)])
def test_exact_average(lr: float, decay: float, condition: float) -> None:
    S = random_spd(8, condition)
    H = random_spd(8, condition)
    new = average(Full.from_dense(S), Dense(H), lr=lr, decay=decay, damping=0.3)
    want = (1 - lr * decay) * S + lr * (H + 0.3 * torch.eye(8))
    assert_close(new.dense(), want, rtol=1e-12, atol=1e-12 * condition)
    assert new.residual is None


def test_condition_1e12_from_the_identity_in_one_step() -> None:
    H = random_spd(20, 1e12)
    S = average(Full.identity(20, dtype=torch.float64), Dense(H), lr=1.0)
    assert_close(S.dense(), H, rtol=0, atol=1e-14 * 1e12)
    assert (S.eigs > 0).all()
    assert S.condition().item() == pytest.approx(1e12, rel=1e-3)


def test_first_order_average_agrees_to_first_order() -> None:
    S = Full.from_dense(random_spd(6))
    H = Dense(random_spd(6))
    errors = [
        torch.dist(average(S, H, lr=lr, exact=False).dense(), average(S, H, lr=lr).dense()).item()
        for lr in (1e-3, 1e-4)
    ]
    assert errors[0] / errors[1] == pytest.approx(100, rel=0.1)


def test_nothing_is_projected_where_the_average_is_indefinite() -> None:
    S = Full.identity(2, dtype=torch.float64)
    H = Dense(torch.diag(torch.tensor([-3.0, 1.0])))
    with pytest.raises(NotPositiveDefinite, match="not positive definite"):
        average(S, H, lr=0.5)
    low, high = tangent_vector(S, H)[1:]
    assert (low, high) == pytest.approx((-3.0, 1.0))
    lr = longest_step(low, high, exact=True)
    assert_close(average(S, H, lr=lr).eigs.min(), torch.tensor(0.25))
    assert average(S, H, lr=0.5, exact=False).eigs.min() > 0


@pytest.mark.parametrize("kind", ["full", "diagonal", "kronecker"])
def test_squared_length_of_a_step_is_twice_the_divergence(kind: str) -> None:
    """Kullback-Leibler divergence of nearby Gaussians, as torch computes it."""
    small = 1e-4
    if kind == "full":
        S = random_spd(5)
        H = random_spd(5)
        matrix: Full | Diagonal | Kronecker = Full.from_dense(S)
        near = S + small * (H - S)
    elif kind == "diagonal":
        matrix = Diagonal(torch.rand(5) + 0.5)
        S = matrix.dense()
        near = S + small * torch.diag(torch.randn(5))
    else:
        a = random_spd(2)
        b = random_spd(3)
        matrix = nearest_kronecker(torch.kron(a, b), (2, 3))
        S = torch.kron(a, b)
        near = torch.kron(a + small * random_spd(2), b + small * random_spd(3))
    vector = tangent_vector(matrix, Dense(near))[0]
    zero = torch.zeros(len(S))
    want = kl_divergence(
        MultivariateNormal(zero, precision_matrix=near),
        MultivariateNormal(zero, precision_matrix=S),
    )
    assert 0.5 * vector.square().sum().item() == pytest.approx(want.item(), rel=1e-2)
