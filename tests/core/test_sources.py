"""Every source of curvature against a dense float64 oracle, or against its limit for
many samples.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.testing import assert_close

from eigenstep.core import sources
from eigenstep.core.curvature import OuterProducts
from eigenstep.core.matrices import SPD
from eigenstep.core.update import update

from .cases import (
    BATCHES,
    STRUCTURES,
    dense_curvature,
    random_full,
    random_kronecker,
    random_spd,
    random_symmetric,
)


def matrix_of(curvature: OuterProducts) -> Tensor:
    """Return the sum of outer products as a matrix, without batch dimensions and shift."""
    vectors = curvature.vectors.flatten(1)
    weights = torch.ones(len(vectors)) if curvature.weights is None else curvature.weights
    return torch.einsum("k,ki,kj->ij", weights, vectors, vectors)


def network(parameters: Tensor, x: Tensor) -> Tensor:
    """A layer of 3 by 4 and a nonlinearity: enough for curvature that is not constant."""
    return torch.tanh(parameters @ x) * torch.tensor([1.0, 2.0, 0.5])


class TestGradients:
    def test_gradient_outer_product(self) -> None:
        g = torch.randn(5)
        assert_close(matrix_of(sources.gradient_outer_product(g)), torch.outer(g, g))
        G = torch.randn(3, 4)
        assert_close(
            matrix_of(sources.gradient_outer_product(G)), torch.outer(G.flatten(), G.flatten())
        )


class TestHessian:
    def test_parameters_of_any_shape(self) -> None:
        A = random_symmetric(6)
        G = torch.randn(2, 3)
        curvature = sources.hessian(lambda w: 0.5 * w.flatten() @ A @ w.flatten() + w.sum() ** 3, G)
        assert_close(curvature.matrix, A + 6 * G.sum() * torch.ones(6, 6))


class TestGaussNewton:
    def test_least_squares_is_jacobian_transposed_times_jacobian(self) -> None:
        parameters = torch.randn(3, 4)
        x = torch.randn(10, 4)
        y = torch.randn(10, 3)
        curvature = sources.gauss_newton(
            network, lambda f, t: 0.5 * (f - t).square().sum(), parameters, x, y
        )
        J = torch.func.jacrev(lambda p: torch.stack([network(p, one) for one in x]))(
            parameters
        ).reshape(30, 12)
        assert_close(matrix_of(curvature), J.T @ J / 10)
        assert curvature.vectors.shape == (30, 3, 4)
        assert curvature.semidefinite


class TestSampledFisher:
    def test_categorical_converges_to_gauss_newton(self) -> None:
        parameters = torch.randn(3, 4)
        x = torch.randn(5, 4)
        # The Hessian of cross-entropy does not depend on them
        labels = torch.zeros(5, dtype=torch.long)
        exact = matrix_of(
            sources.gauss_newton(network, torch.nn.functional.cross_entropy, parameters, x, labels)
        )
        draws = 4000
        sampled = sources.sampled_fisher(
            network, lambda f: Categorical(logits=f), parameters, x, draws
        )
        assert sampled.vectors.shape == (5 * draws, 3, 4)
        assert (matrix_of(sampled) - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.enable_grad])
def test_curvature_of_trainable_parameters_holds_no_graph(grad_mode: type[torch.no_grad]) -> None:
    """Sources work with and without gradient mode, and what they return would not keep a graph
    alive.
    """
    parameters = torch.randn(3, 4, requires_grad=True)
    x = torch.randn(5, 4)
    labels = torch.randint(3, (5,))
    with grad_mode():
        tensors = [
            sources.hessian(lambda p: p.square().sum() ** 2, parameters).matrix,
            sources.gauss_newton(
                network, torch.nn.functional.cross_entropy, parameters, x, labels
            ).vectors,
            sources.sampled_fisher(network, lambda f: Categorical(logits=f), parameters, x).vectors,
        ]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert all(tensor.norm() > 0 for tensor in tensors)
    assert parameters.grad is None


def quadratic(A: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return (
        0.5 * torch.einsum("k...i,...ij,k...j->k...", w, A, w)
        + torch.einsum("...i,k...i->k...", b, w)
        + 3
    )


@pytest.fixture(params=BATCHES[:2], ids=str)
def S(structure: str, request: pytest.FixtureRequest) -> SPD:
    return STRUCTURES[structure](request.param)


class TestSampledHessians:
    """For a quadratic function, the mean Hessian under any Gaussian is the Hessian itself."""

    COUNT = 20_000

    def problem(self, S: SPD) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ``A``, ``b``, deviations with inverse covariance ``S``, and the same as flat
        vectors.
        """
        deviations = S.sample((self.COUNT,))
        w = deviations.flatten(1 + len(S.batch_shape))
        size = w.shape[-1]
        return (
            random_symmetric(size, S.batch_shape),
            torch.randn(*S.batch_shape, size),
            deviations,
            w,
        )

    def test_reinforce(self, S: SPD) -> None:
        A, b, deviations, w = self.problem(S)
        values = quadratic(A, b, w)
        values = values - values.mean(0)
        estimate = dense_curvature(S, sources.reinforce(S, deviations, values)).matrix
        # The statistical error is that of the sample mean; the claim is that nothing else is left.
        s = S.dense()
        terms = torch.einsum("...ij,k...j->k...i", s, w)
        spread = (
            torch.einsum("k...,k...i,k...j->k...ij", values, terms, terms).std(0) / self.COUNT**0.5
        )
        assert (
            (estimate - A).abs()
            < 5 * spread + 5 * values.std(0)[..., None, None] * s.abs() / self.COUNT**0.5
        ).all()

    def test_reparametrization(self, S: SPD) -> None:
        A, b, deviations, w = self.problem(S)
        gradients = (torch.einsum("...ij,k...j->k...i", A, w) + b).reshape(deviations.shape)
        curvature = sources.reparametrization(S, deviations, gradients)
        assert not curvature.semidefinite
        estimate = dense_curvature(S, curvature).matrix
        sw = torch.einsum("...ij,k...j->k...i", S.dense(), w)
        products = torch.einsum("k...i,k...j->k...ij", sw, gradients.reshape(w.shape))
        products = (products + products.mT) / 2
        assert_close(estimate, products.mean(0), rtol=1e-9, atol=1e-9)
        assert ((estimate - A).abs() < 5 * products.std(0) / self.COUNT**0.5).all()

    def test_reparametrization_of_small_gradients_keeps_their_digits(self) -> None:
        S = random_full(3)
        deviations = S.sample((4,))
        gradients = 1e-9 * torch.randn(4, 3)
        sw = S.matmul(deviations)
        want = sw.T @ gradients / 4
        got = matrix_of(sources.reparametrization(S, deviations, gradients))
        assert_close(got, (want + want.T) / 2, rtol=1e-10, atol=1e-19)


class TestGradientOfAnSpdProblem:
    def log_det(self, Q: Tensor, S: Tensor) -> Tensor:
        return (S @ Q).trace() - torch.linalg.slogdet(S)[1]

    def test_formula(self, S: SPD) -> None:
        size = S.dense().shape[-1]
        G = random_symmetric(size, S.batch_shape)
        assert_close(
            sources.spd_gradient(S, G).matrix,
            -2 * S.dense() @ G @ S.dense(),
            rtol=1e-10,
            atol=1e-10,
        )

    @pytest.mark.parametrize("kind", ["full", "diagonal", "kronecker"])
    def test_first_order_descent(self, kind: str) -> None:
        """A small step lowers the loss by ``lr`` times the squared Riemannian gradient norm, to
        first order.
        """
        Q = random_spd(6)
        S: SPD = {
            "full": random_full(6),
            "diagonal": STRUCTURES["diagonal"](()),
            "kronecker": random_kronecker([2, 3]),
        }[kind]
        if kind == "diagonal":
            Q = Q[:4, :4].contiguous()
        loss = partial(self.log_det, Q)
        gradient = torch.func.grad(loss)(S.dense())
        gradient = (gradient + gradient.T) / 2
        drops = []
        for lr in (1e-4, 1e-5):
            new = update(S, sources.spd_gradient(S, gradient), lr=lr, decay=0.0)
            drops.append((loss(S.dense()) - loss(new.dense())) / lr)
        assert drops[1] > 0
        assert_close(drops[0], drops[1], rtol=1e-2, atol=0)
        if kind == "full":
            want = 2 * (S.dense() @ gradient @ S.dense() @ gradient).trace()
            assert_close(drops[1], want, rtol=1e-3, atol=0)
