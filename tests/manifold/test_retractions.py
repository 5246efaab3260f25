"""Steps of all retractions and baselines against each other: equal to first order, and always
positive definite.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from eigenstep import Full
from eigenstep.manifold.point import Matrix
from eigenstep.manifold.retractions import RETRACTIONS, geodesic
from eigenstep_lab.baselines.rgd import cholesky_step, retraction_step
from eigenstep_lab.orthogonality import orthogonality_defect

from .problems import random_spd, symmetric


def all_steps(S: Full, gradient: Tensor, lr: float) -> dict[str, Tensor]:
    """Return the matrix after one step of `S - 2 lr S (dl/dS) S`, to first order, by
    every scheme.
    """
    frame = S.basis * S.eigs.sqrt()
    tangent = -2 * lr * frame.mT @ gradient @ frame
    found = {
        name: retraction(S, (tangent + tangent.mT) / 2)[0].dense()
        for name, retraction in RETRACTIONS.items()
    }
    factor = cholesky_step(torch.linalg.cholesky(S.dense()), gradient, lr)
    return {
        **found,
        "second order": retraction_step(S.dense(), gradient, lr),
        "cholesky": factor @ factor.mT,
    }


def test_all_schemes_agree_to_first_order() -> None:
    S = Full.from_dense(random_spd(5))
    gradient = symmetric(5)
    linear = S.dense() @ gradient @ S.dense()

    def errors(lr: float) -> dict[str, float]:
        steps = all_steps(S, gradient, lr)
        return {
            name: (step - S.dense() + 2 * lr * linear).norm().item() for name, step in steps.items()
        }

    coarse = errors(1e-5)
    fine = errors(1e-6)
    for name in coarse:
        assert coarse[name] / fine[name] == pytest.approx(100, rel=0.02), name


def test_geodesic_is_the_dense_formula() -> None:
    S = Full.from_dense(random_spd(5, 1e3, batch=(2,)))
    X = symmetric(5, (2,))
    frame = S.basis * S.eigs.sqrt()[..., None, :]
    assert_close(geodesic(S, X)[0].dense(), frame @ torch.linalg.matrix_exp(X) @ frame.mT)


@pytest.mark.parametrize("name", RETRACTIONS)
def test_result_is_spectral_and_turn_orthogonal(name: str) -> None:
    for S in (Full.from_dense(random_spd(6, 1e12)), Full.identity(6)):
        for size in (1e-8, 1.0, 3.0):
            new, turn = RETRACTIONS[name](S, size * symmetric(6))
            assert (new.eigs > 0).all()
            assert orthogonality_defect(new.basis) < 1e-13
            assert orthogonality_defect(turn) < 1e-10


@pytest.mark.parametrize("name", RETRACTIONS)
def test_turn_carries_vectors_along_the_geodesic_between_the_points(name: str) -> None:
    S = Full.from_dense(random_spd(5, 50.0))
    new, turn = RETRACTIONS[name](S, 0.5 * symmetric(5))
    between = torch.linalg.inv(S.basis * S.eigs.sqrt()) @ (new.basis * new.eigs.sqrt()) @ turn.mT
    assert_close(between, between.mT)  # no turning: positive definite and symmetric
    assert (torch.linalg.eigvalsh(between) > 0).all()


@pytest.mark.parametrize("name", RETRACTIONS)
def test_out_of_range_is_an_error_and_not_cut_off(name: str) -> None:
    S = Full.identity(3, dtype=torch.float32)
    with pytest.raises(FloatingPointError, match="float32 cannot hold"):
        RETRACTIONS[name](S, torch.diag(torch.tensor([200.0, 0.0, -1.0], dtype=torch.float32)))


def test_unit_determinant_is_kept() -> None:
    S = Full.from_dense(random_spd(4)).with_unit_determinant()
    for retraction in RETRACTIONS.values():
        block = Matrix.of(S, torch.eye(4), 1.5, True, retraction)
        assert_close(
            block.move(symmetric(4)).factor.logdet(), torch.tensor(0.0), atol=1e-12, rtol=0
        )
