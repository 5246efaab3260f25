"""`minimize_spd` against solutions known in closed form, and its manners with bad input."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from eigenstep import Diagonal, Full, Kronecker
from eigenstep.manifold import SPDResult, TangentView, minimize_spd
from eigenstep.manifold.descent import METHODS, Metric
from eigenstep_lab.extras import BarzilaiBorwein

from .problems import log_det, nearness, random_spd


@pytest.mark.parametrize("retraction", ["geodesic", "spectral"])
@pytest.mark.parametrize("method", [*METHODS, BarzilaiBorwein])
def test_every_method_finds_the_inverse(method: str, retraction: str) -> None:
    Q = random_spd(8, 20.0)
    fun, least = log_det(Q)
    result = minimize_spd(fun, torch.eye(8), method=method, retraction=retraction, max_iter=3000)
    assert result.success, result.message
    assert result.fun == pytest.approx(least, abs=1e-9)
    assert_close(result.S.dense(), torch.linalg.inv(Q), rtol=1e-4, atol=1e-4)


def test_nearness_takes_few_gradients_at_any_condition() -> None:
    for condition in (10.0, 1e3, 1e5):
        fun, _ = nearness(random_spd(20, condition))
        result = minimize_spd(fun, torch.eye(20), gtol=0.0, callback=lambda r: r.fun < 1e-8)
        assert result.fun < 1e-8
        assert result.ngrad <= 60, condition


def test_correlation_matrix_from_the_identity() -> None:
    """A unit diagonal: the letter of the paper never leaves the axes, ours does."""
    Q = 0.9 ** (torch.arange(10)[:, None] - torch.arange(10)).abs().double()
    fun, least = log_det(Q)
    assert minimize_spd(fun, torch.eye(10)).fun == pytest.approx(least, abs=1e-9)
    assert minimize_spd(fun, torch.eye(10), retraction="spectral").fun == pytest.approx(
        least, abs=1e-9
    )
    stuck = minimize_spd(fun, torch.eye(10), retraction="paper")
    assert not stuck.success
    assert "no step" in stuck.message


def test_dense_and_factored_objectives_are_the_same_function() -> None:
    Q = random_spd(6)

    def factored(S: TangentView) -> Tensor:
        return S.matmul(Q).diagonal().sum() - S.logdet()

    one = minimize_spd(log_det(Q)[0], torch.eye(6))
    two = minimize_spd(factored, torch.eye(6), factored=True)
    assert_close(one.S.dense(), two.S.dense(), rtol=1e-6, atol=1e-8)
    assert one.ngrad == two.ngrad


@pytest.mark.parametrize("kinds", [("full", "full"), ("full", "diagonal"), ("identity", "full")])
def test_kronecker_maximum_likelihood(kinds: tuple[str, str]) -> None:
    """The flip-flop equations of the matrix normal hold at the minimum."""
    X = torch.randn(40, 3, 4) * torch.linspace(1, 3, 4) @ torch.randn(4, 4)

    def fun(S: TangentView) -> Tensor:
        return -S.log_prob(X).mean()

    result = minimize_spd(fun, Kronecker.identity((3, 4), kinds=kinds), factored=True)
    S = result.S
    assert isinstance(S, Kronecker)
    assert result.success, result.message
    left, right = (factor.dense() for factor in S.factors)
    flips = {
        0: (left, 4, torch.einsum("kij,jl,kml->im", X, right, X)),
        1: (right, 3, torch.einsum("kij,il,klm->jm", X, left, X)),
    }
    for at, (factor, size, moment) in flips.items():
        if kinds[at] == "full":
            expected = size * torch.linalg.inv(S.scale * moment / len(X))
            assert_close(factor, expected, rtol=1e-5, atol=1e-6)
    assert_close(S.factors[0].logdet(), torch.tensor(0.0), atol=1e-10, rtol=0)


def test_joint_with_euclidean_tensors() -> None:
    data = torch.randn(200, 3) @ torch.randn(3, 3) + torch.tensor([1.0, -2.0, 5.0])

    def fun(S: TangentView, mean: Tensor) -> Tensor:
        return -S.log_prob(data - mean, power=1).mean()

    result = minimize_spd(fun, torch.eye(3), torch.zeros(3), factored=True)
    assert result.success, result.message
    assert_close(result.x[0], data.mean(0), rtol=1e-5, atol=1e-6)
    assert_close(result.S.dense(), torch.cov(data.T, correction=0), rtol=1e-5, atol=1e-6)


def test_stochastic_objective_with_fixed_steps_and_momentum() -> None:
    data = torch.randn(2000, 4) * torch.tensor([1.0, 2.0, 3.0, 0.5])
    draws = torch.Generator().manual_seed(0)

    def fun(S: TangentView) -> Tensor:
        part = data[torch.randint(len(data), (50,), generator=draws)]
        return -S.log_prob(part, power=1).mean()

    result = minimize_spd(
        fun,
        torch.eye(4),
        factored=True,
        lr=lambda k: 0.25 / (1 + 0.05 * k),
        momentum=0.5,
        max_iter=400,
    )
    covariance = data.T @ data / len(data)
    distance = torch.linalg.solve(covariance, result.S.dense()) - torch.eye(4)
    assert distance.norm() < 0.2
    assert result.ngrad == 401
    assert result.message.startswith("max_iter")


def test_result_tells_what_was_done() -> None:
    fun, least = log_det(random_spd(5))
    calls = 0

    def counted(S: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return fun(S)

    seen: list[SPDResult] = []
    result = minimize_spd(counted, torch.eye(5), callback=seen.append)
    assert result.nfev == calls
    assert result.nit == len(result.history) - 1
    assert result.ngrad == result.history[-1].ngrad
    # Gradients of the look at the curvature at the end
    assert 1 <= result.ngrad - len(result.history) <= 2
    assert len(seen) == len(result.history) - 1  # the last point already met the criterion
    assert result.fun == min(iterate.fun for iterate in result.history)
    assert result.history[-1].gradient_norm <= 1e-6
    assert result.reason == "gtol"
    assert "at most gtol, and its curvature promises a further decrease by" in result.message
    stopped = minimize_spd(fun, torch.eye(5), callback=lambda r: r.fun < least + 0.1)
    assert stopped.reason == "callback"
    assert stopped.message == "the callback asked to stop"
    assert stopped.ngrad < result.ngrad


def test_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    with redirect_stdout(io.StringIO()) as output:
        minimize_spd(log_det(random_spd(3))[0], torch.eye(3), progress=True)
    assert "gradient" in output.getvalue()
    monkeypatch.setitem(__import__("sys").modules, "rich.progress", None)
    with pytest.raises(ImportError, match="pip install"):
        minimize_spd(log_det(random_spd(3))[0], torch.eye(3), progress=True)


# What can go wrong.


@pytest.mark.parametrize("retraction", ["geodesic", "spectral"])
def test_ill_conditioned_problem_is_solved_to_the_last_eigenvalue(retraction: str) -> None:
    """Condition 1e12: a dense log-det would lose all digits of the small eigenvalues, the factored
    one does not.
    """
    basis = torch.linalg.qr(torch.randn(6, 6))[0]
    eigs = torch.logspace(0, 12, 6)

    def fun(
        S: TangentView,
    ) -> Tensor:  # tr(S Q) - log det S, with the root of Q to spare half of the digits
        return S.matmul((basis * eigs.sqrt()).T, 0.5).square().sum() - S.logdet()

    result = minimize_spd(fun, torch.eye(6), factored=True, retraction=retraction, max_iter=3000)
    assert result.success, result.message
    assert_close(result.S.spectrum.sort().values, (1 / eigs).sort().values, rtol=1e-5, atol=0)


def test_unbounded_objective_ends_with_a_message() -> None:
    result = minimize_spd(lambda S: -torch.logdet(S), torch.eye(3), max_iter=2000)
    assert not result.success
    assert (result.S.spectrum > 0).all()
    assert torch.isfinite(result.S.spectrum).all()


def test_fixed_steps_that_diverge_say_so() -> None:
    fun, _ = log_det(1e3 * random_spd(4))
    result = minimize_spd(lambda S: fun(S).exp(), 1e-3 * torch.eye(4), lr=500.0, max_step=50.0)
    assert not result.success
    assert "lower lr" in result.message
    assert (result.S.spectrum > 0).all()


@pytest.mark.parametrize(
    ("start", "error", "message"),
    [
        (torch.diag(torch.tensor([1.0, -1.0])), ValueError, "S0|matrix must be positive definite"),
        (torch.diag(torch.tensor([1.0, 1e-17])), ValueError, "beyond rounding"),
        (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), ValueError, "symmetric"),
        (Diagonal(torch.tensor([1.0, -2.0])), ValueError, "eigenvalue -2"),
        ([[1.0]], TypeError, "S0 must be a tensor"),
    ],
)
def test_infeasible_starts(start: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        minimize_spd(torch.sum, start)
    with pytest.raises(ValueError, match="fun must be finite at S0, got nan"):
        minimize_spd(lambda S: S.sum() * torch.nan, torch.eye(2))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "newton"}, ValueError, "method must be one of lbfgs"),
        ({"retraction": "qr"}, ValueError, "retraction must be one of geodesic"),
        (
            {"method": dict},
            TypeError,
            "method must give a rule with window, propose and learn, got dict",
        ),
        ({"lr": -1.0}, ValueError, "lr must be"),
        ({"lr": lambda k: float("nan")}, ValueError, r"lr\(0\) must be"),
        ({"momentum": 0.5}, ValueError, "momentum needs"),
        ({"lr": 0.1, "momentum": 2.0}, ValueError, "momentum must be"),
        ({"max_step": 0.0}, ValueError, "max_step"),
        ({"callback": 1}, TypeError, "callback"),
        ({"x0": [1.0]}, TypeError, r"x0\[0\] must be a real floating-point tensor, got float"),
        (
            {"retraction": lambda S, X: (Full.identity(3), X)},
            TypeError,
            "retraction must return a Full",
        ),
        ({"x0": torch.ones(2, dtype=torch.float32)}, TypeError, r"x0\[0\] must be"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        minimize_spd(lambda S, *x: S.sum(), torch.eye(2), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fun",
    [
        lambda S: S,
        lambda S: 1.0,
        lambda S: S.detach().sum(),
    ],
)
def test_objectives_that_cannot_be_differentiated(fun: object) -> None:
    with pytest.raises(TypeError, match="fun must return one real number"):
        minimize_spd(fun, torch.eye(2))  # type: ignore[arg-type]


def test_gradient_that_is_not_finite_ends_the_search() -> None:
    result = minimize_spd(lambda S: (S[0, 1] ** 2).sqrt() + S.trace(), torch.eye(2))
    assert not result.success
    assert result.message == "the gradient is not finite"


# The metric that L-BFGS starts from.


@pytest.mark.parametrize(
    ("exponents", "fun"),
    [
        ((0.0, 0.0), lambda S, Q: (S @ Q).trace() - torch.logdet(S)),
        ((0.0, 1.0), lambda S, Q: (S @ Q - torch.eye(len(Q))).square().sum()),
        ((1.0, 0.0), lambda S, Q: (S - torch.linalg.inv(Q)).square().sum()),
        ((-1.0, 0.0), lambda S, Q: (torch.linalg.inv(S) - Q).square().sum()),
    ],
)
def test_metric_of_typical_problems_is_recognized(
    exponents: tuple[float, float], fun: object
) -> None:
    Q = random_spd(8, 1e3)
    chosen: list[Metric] = []

    class Recorder(METHODS["lbfgs"]):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            chosen.append(self._metric)

    METHODS["recorder"] = Recorder
    try:
        # A start near the solution, with other eigenvectors
        root = torch.linalg.cholesky(torch.linalg.inv(Q))
        minimize_spd(
            lambda S: fun(S, Q), root @ random_spd(8, 1.5) @ root.T, method="recorder", max_iter=8
        )  # type: ignore[operator]
    finally:
        del METHODS["recorder"]
    assert tuple(chosen[-1].exponents.tolist()) == exponents


def test_a_number_beside_the_matrix() -> None:
    """A tensor without axes is minimized over as well, whichever metric fits the matrix."""
    target = random_spd(3)

    def fun(S: Tensor, x: Tensor) -> Tensor:
        return ((S - target).square().sum() + 1) * (1 + (x - 3).square())

    result = minimize_spd(fun, torch.eye(3), torch.tensor(0.0))
    assert result.success
    assert_close(result.S.dense(), target, rtol=1e-3, atol=1e-3)
    assert_close(result.x[0], torch.tensor(3.0), rtol=1e-3, atol=1e-3)
