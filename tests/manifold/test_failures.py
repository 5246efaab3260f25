"""Curvature of every kind, values that are not finite, steps far too long: positive definite, or an
error.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from eigenstep import Full
from eigenstep.core.sources import spd_gradient
from eigenstep.core.step import Turning
from eigenstep.core.update import update
from eigenstep.manifold import minimize_spd
from eigenstep.manifold.descent import METHODS
from eigenstep.manifold.retractions import RETRACTIONS
from eigenstep_lab.extras import BarzilaiBorwein

from .problems import log_det, random_spd


def logs(S: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(S).log()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    # Its Hessian has both signs at the start, which is near a maximum; the least value is -1/4 for
    # each eigenvalue.
    "indefinite": lambda S: (logs(S).pow(4) - logs(S).square()).sum(),
    # Flat in all directions but one, everywhere.
    "singular": lambda S: (S.trace() - 7).square() - 1,
    "ill-conditioned": lambda S: (S.diagonal() * torch.logspace(0, 12, 4)).sum() - torch.logdet(S),
    # NaN or infinite beyond a wall that stands in the way of the first steps.
    "a wall of NaN": lambda S: -S.trace() - 0.1 * (2 - torch.linalg.eigvalsh(S)).log().sum(),
    "a pit of -inf": lambda S: (
        torch.where(S.trace() > 4.1, -torch.inf, S.trace()) - torch.logdet(S)
    ),
}
LEAST = {"indefinite": -1.0, "singular": -1.0, "ill-conditioned": 4 + 24 * math.log(10)}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("method", [*METHODS, BarzilaiBorwein])
def test_any_curvature(name: str, method: str) -> None:
    start = torch.diag(torch.tensor([1.01, 0.99, 1.02, 0.97]))
    result = minimize_spd(FUNCTIONS[name], start, method=method, max_iter=150)
    assert (result.S.spectrum > 0).all()
    assert torch.isfinite(result.S.spectrum).all()
    assert result.fun <= FUNCTIONS[name](start).item()
    assert result.fun == pytest.approx(FUNCTIONS[name](result.S.dense()).item(), rel=1e-9)
    if name in LEAST and method == "lbfgs":
        assert result.fun == pytest.approx(LEAST[name], abs=1e-6)
    elif name in LEAST:
        # No matrix outside of the cone has pretended to be better
        assert result.fun >= LEAST[name] - 1e-9


@pytest.mark.parametrize("retraction", RETRACTIONS)
def test_fixed_steps_of_any_size_stay_in_the_cone(retraction: str) -> None:
    fun, least = log_det(random_spd(5, 100.0))
    for lr in (5e-4, 0.5, 5e5):
        result = minimize_spd(fun, random_spd(5, 3.0), lr=lr, retraction=retraction, max_iter=30)
        assert (result.S.spectrum > 0).all()
        assert torch.linalg.cholesky_ex(result.S.dense()).info == 0
        assert min(iterate.fun for iterate in result.history) >= least - 1e-9


# The paper's scheme and the baselines.


def test_the_paper_s_scheme_is_the_update_of_the_paper() -> None:
    """Retraction "paper" takes the very steps of `update` with gamma = 0 and the same `lr`."""
    Q = random_spd(5)
    S = Full.from_dense(random_spd(5, 3.0))
    result = minimize_spd(log_det(Q)[0], S, lr=0.05, retraction="paper", max_iter=10)
    for _ in range(10):
        gradient = Q - torch.linalg.inv(S.dense())
        curvature = spd_gradient(S, (gradient + gradient.mT) / 2)
        S = update(S, curvature, lr=0.05, decay=0.0, turning=Turning("moore_penrose"))
    assert_close(result.S.dense(), S.dense(), rtol=1e-8, atol=1e-10)


def test_what_is_cut_off_a_step_does_not_come_back_with_momentum() -> None:
    lengths = []
    result = minimize_spd(
        lambda S: 1e3 * S.trace() - torch.logdet(S),
        torch.eye(2),
        lr=0.005,
        momentum=0.5,
        max_step=0.5,
        max_iter=20,
        callback=lambda r: lengths.append(r.S.logdet().item()),
    )
    assert result.history[-1].fun < result.history[0].fun
    # Two eigenvalues, half a unit of logarithm each
    assert max(-torch.tensor(lengths).diff()) <= 1.0 + 1e-9
