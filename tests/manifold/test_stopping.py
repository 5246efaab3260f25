"""`success` of `minimize_spd` means that next to nothing is left to gain, also where the objective
is flat.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from eigenstep.manifold import minimize_spd
from eigenstep.manifold.descent import METHODS
from eigenstep.manifold.objective import Objective, look_ahead
from eigenstep.manifold.point import Point
from eigenstep_lab.extras import BarzilaiBorwein

from .problems import log_det, random_spd

Problem = tuple[Callable[..., Tensor], list[Tensor], float]
GTOL = 1e-6


def weighted(seed: int, dtype: torch.dtype) -> Problem:
    """Return log-dets of the diagonal, some with next to no weight: their minima are flat and far
    away.
    """
    generator = torch.Generator().manual_seed(seed)
    n = 2 + seed % 5
    weights = (10 ** (-8 * torch.rand(n, generator=generator))).to(dtype)
    q = (10 ** (2 * torch.randn(n, generator=generator)).clamp(-4, 4)).to(dtype)

    def fun(S: Tensor) -> Tensor:
        d = S.diagonal()
        return (weights * (d * q - d.log())).sum() + (S - torch.diag(d)).square().sum()

    return fun, [torch.eye(n, dtype=dtype)], (weights * (1 + q.log())).sum().item()


def with_vector(seed: int, dtype: torch.dtype) -> Problem:
    """Return a log-det, and beside it a quadratic function of a vector of any curvature."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (-8 * torch.rand(4, generator=generator))
    curvature = (scale * 10 ** (2 * torch.rand((), generator=generator))).to(dtype)
    target = (10 ** (3 * torch.rand(4, generator=generator))).to(dtype)
    Q = random_spd(3, 10.0).to(dtype)
    fun, least = log_det(Q)
    x = torch.zeros(4, dtype=dtype)
    return (
        lambda S, x: fun(S) + 0.5 * (curvature * (x - target).square()).sum(),
        [torch.eye(3, dtype=dtype), x],
        least,
    )


def gap_of(problem: Problem, **options: object) -> tuple[bool, float, str]:
    fun, (S0, *x0), least = problem
    result = minimize_spd(fun, S0, x0, gtol=GTOL, **options)  # type: ignore[arg-type]
    exact = fun(result.S.to(torch.float64).dense(), *[x.double() for x in result.x]).item()
    return result.success, exact - least, result.message


@pytest.mark.parametrize("method", [*METHODS, BarzilaiBorwein])
@pytest.mark.parametrize("make", [weighted, with_vector])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_success_means_a_small_gap(
    make: Callable[[int, torch.dtype], Problem], dtype: torch.dtype, method: str
) -> None:
    for seed in range(4):
        problem = make(seed, dtype)
        success, gap, message = gap_of(problem, method=method, max_iter=300)
        limit = 10 * max(GTOL, 100 * torch.finfo(dtype).eps * abs(problem[2]))
        assert not success or gap <= limit, message


@pytest.mark.parametrize("method", [*METHODS, BarzilaiBorwein])
def test_a_short_gradient_far_from_the_minimum_is_no_end(method: str) -> None:
    """At the start the gradient is shorter than `gtol`, and the minimum is a thousand
    units away.
    """

    def fun(S: Tensor, x: Tensor) -> Tensor:
        return S.trace() - torch.logdet(S) + 5e-10 * (x - 1e3).square().sum()

    result = minimize_spd(fun, torch.eye(2), torch.full((1,), 100.0), method=method, gtol=GTOL)
    assert result.history[0].gradient_norm < GTOL
    assert result.success, result.message
    assert result.fun == pytest.approx(2.0, abs=1e-6)


def test_a_saddle_is_no_minimum() -> None:
    """The gradient at the start is nearly zero, but so it is on a hilltop."""

    def fun(S: Tensor) -> Tensor:
        logs = torch.linalg.eigvalsh(S).log()
        return (logs.pow(4) - logs.square()).sum()

    result = minimize_spd(fun, torch.diag(torch.tensor([1 + 1e-8, 1 - 1e-8])))
    assert result.fun == pytest.approx(-0.5, abs=1e-6)


def test_start_at_the_minimum() -> None:
    result = minimize_spd(lambda S: S.trace() - torch.logdet(S), torch.eye(3))
    assert result.success
    assert result.reason == "gtol"
    assert result.nit == 0


@pytest.mark.parametrize(
    ("n", "seed", "least"), [(2, 2, 4.65191251), (3, 3, 5.87848700), (4, 4, 3.61495304)]
)
def test_least_values_at_singular_matrices(n: int, seed: int, least: float) -> None:
    """Quadratic measurements `a S a` that no positive-definite matrix fits: BFGS on `S = L L^T`
    found the least values.

    Steps are relative to `S`, so that the gradient gets short where `S` has shrunk in a wrong
    direction.
    """
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(6, n, generator=generator)
    y = torch.randn(6, generator=generator)
    result = minimize_spd(
        lambda S: ((a @ S * a).sum(-1) - y).square().sum(), torch.eye(n), gtol=GTOL
    )
    assert torch.isfinite(result.S.spectrum).all()
    assert (result.S.spectrum > 0).all()
    assert not result.success or result.fun - least <= 10 * GTOL
    if seed != 2:
        assert result.reason in ("flat", "max_iter")


@pytest.mark.parametrize("condition", [10.0, 1e3, 1e5])
def test_ordinary_problems_cost_two_gradients_more_at_most(condition: float) -> None:
    fun, _ = log_det(random_spd(10, condition))
    result = minimize_spd(fun, torch.eye(10))
    assert result.reason == "gtol", result.message
    assert result.ngrad - len(result.history) <= 2


def test_look_ahead_solves_a_quadratic_problem() -> None:
    """The gain is `g H^-1 g / 2`, and the step leads to the minimum, whatever the conditioning."""
    curvature = torch.logspace(0, -3, 4)
    x = torch.tensor([0.1, -0.2, 0.3, 0.05])
    objective = Objective(lambda S, x: 0.5 * (curvature * x.square()).sum() + 0 * S.sum(), False)
    at = objective.at(Point.start(torch.eye(1)).beside([x]))
    ahead = look_ahead(at, lambda v: v, enough=at.value)
    assert ahead.gain == pytest.approx(at.value, rel=1e-3)
    remaining = curvature * (ahead.step[1:] + x)
    assert remaining.norm() <= at.value / 10
    assert objective.ngrad <= 1 + 4  # as many products as there are different curvatures
    exact = look_ahead(at, lambda v: v / torch.cat([torch.ones(1), curvature]), 1.0)
    assert exact.gain == pytest.approx(at.value, rel=1e-9)
    assert_close(exact.step[1:], -x)
    before = objective.ngrad
    less = look_ahead(at, lambda v: v, enough=at.value / 100)
    assert not less.is_at_most(at.value / 100)
    assert objective.ngrad == before + 1  # the first product finds that there is more
