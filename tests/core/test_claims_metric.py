"""The paper's claims 1 and 3 to 7, one test or class of tests each: coordinates, and the Fisher
metric in them.

The oracle of everything about the metric is automatic differentiation: the metric at a point is the
Hessian, in the local coordinates, of the Kullback-Leibler divergence from the Gaussian at that
point.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian
from torch.testing import assert_close

from eigenstep.core.curvature import Dense
from eigenstep.core.matrices import Full, Kronecker
from eigenstep.core.step import Turning, cayley, exp
from eigenstep.core.update import update

from .cases import (
    defect,
    kron,
    random_diagonal,
    random_full,
    random_kronecker,
    random_orthogonal,
    random_symmetric,
)


def divergence(mean: Tensor, precision: Tensor, mean0: Tensor, precision0: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence from the Gaussian with index 0 to the other one."""
    product = torch.linalg.solve(precision0, precision)
    shift = mean - mean0
    return 0.5 * (
        product.trace() + shift @ precision @ shift - len(mean) - torch.linalg.slogdet(product)[1]
    )


def lower_to_skew(lower: Tensor, n: int) -> Tensor:
    """Return ``Skew(Tril(M))`` for the entries of ``M`` below the diagonal."""
    rows, cols = torch.tril_indices(n, n, -1)
    m = torch.zeros(n, n).index_put((rows, cols), lower)
    return m - m.T


def below_diagonal(matrix: Tensor) -> Tensor:
    """Return ``vecTril(M)``."""
    rows, cols = torch.tril_indices(len(matrix), len(matrix), -1)
    return matrix[rows, cols]


def rotation_metric(d: Tensor) -> Tensor:
    """Return the paper's ``vecTril(C)``, ``C_ij = 4 (d_i/d_j + d_j/d_i - 2)``."""
    return below_diagonal(4 * (d[:, None] / d + d / d[:, None] - 2))


class TestClaim1LinearInvariance:
    """Riemannian gradient descent takes the same steps in linear, also over-parametrized,
    coordinates.

    The coordinates are ``tau = log d``, in which our exponential map makes ``update`` exactly such
    a descent.
    """

    @pytest.mark.parametrize("extra", [0, 3], ids=["invertible", "over-parametrized"])
    def test_descent_in_linear_coordinates_equals_update(self, extra: int) -> None:
        n = 4
        lr = 0.1
        decay = 0.5
        S = random_diagonal(n)
        curvatures = [random_symmetric(n) for _ in range(5)]
        U = torch.randn(n, n + extra)
        lam = U.pinverse() @ S.eigs.log()
        zero = torch.zeros(n)

        for H in curvatures:

            def objective(coordinates: Tensor, H: Tensor = H) -> Tensor:
                tau = U @ coordinates
                return 0.5 * (H.diag() * (-tau).exp()).sum() + 0.5 * decay * tau.sum()

            here = lam

            def kl(coordinates: Tensor, here: Tensor = here) -> Tensor:
                return divergence(
                    zero, (U @ coordinates).exp().diag(), zero, (U @ here).exp().diag()
                )

            metric = hessian(kl)(lam)
            assert torch.linalg.matrix_rank(metric, hermitian=True) == n
            inverse = torch.linalg.pinv(metric, hermitian=True, rtol=1e-9)
            lam = lam - lr * inverse @ grad(objective)(lam)
            S = update(S, Dense(H), lr=lr, decay=decay)
            assert_close(U @ lam, S.eigs.log(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_claim_3_local_coordinates_satisfy_the_constraints(n: int, size: float) -> None:
    """``d exp(m)`` is positive and ``B Cayley(Skew(Tril(M)))`` orthogonal for any local
    coordinates.
    """
    S = random_full(n, (20,))
    m = size * torch.randn(20, n)
    M = size * torch.randn(20, n, n).tril(-1)
    d = exp(S.eigs, S.eigs + S.eigs * m)
    B = S.basis @ cayley(M - M.mT)
    assert (d > 0).all()
    assert_close(d, S.eigs * m.exp())
    assert defect(B) < 1e-10
    assert defect(B.mT) < 1e-10


class Coordinates:
    """Local coordinates of a Gaussian around a point, in blocks of the given sizes."""

    sizes: list[int]
    here: Tensor

    def precision(self, coordinates: Tensor) -> Tensor:
        raise NotImplementedError

    def mean(self, coordinates: Tensor) -> Tensor:
        raise NotImplementedError

    def origin(self) -> Tensor:
        return torch.zeros(sum(self.sizes))

    def metric(self) -> Tensor:
        zero = torch.zeros(len(self.here))

        def kl(c: Tensor) -> Tensor:
            return divergence(self.mean(c), self.precision(c), zero, self.here)

        return hessian(kl)(self.origin())

    def natural_step(self, H: Tensor, decay: float, lr: float) -> Tensor:
        """Return a step of Riemannian gradient descent on the variational objective."""

        def objective(c: Tensor) -> Tensor:
            precision = self.precision(c)
            curved = torch.linalg.solve(precision, H).trace()
            return 0.5 * (curved + decay * torch.linalg.slogdet(precision)[1])

        return -lr * torch.linalg.solve(self.metric(), grad(objective)(self.origin()))


class FullCoordinates(Coordinates):
    """The paper's local coordinates ``(m, vecTril(M), delta)`` of a full-matrix Gaussian."""

    def __init__(self, S: Full) -> None:
        self.S = S
        self.n = S.sizes[0]
        self.here = S.dense()
        self.sizes = [self.n, self.n * (self.n - 1) // 2, self.n]

    def precision(self, coordinates: Tensor) -> Tensor:
        m, lower, _ = torch.split(coordinates, self.sizes)
        B = self.S.basis @ cayley(lower_to_skew(lower, self.n))
        return (B * (self.S.eigs * m.exp())) @ B.T

    def mean(self, coordinates: Tensor) -> Tensor:
        return self.S.basis @ (self.S.eigs.rsqrt() * torch.split(coordinates, self.sizes)[2])


class KroneckerCoordinates(Coordinates):
    """The paper's local coordinates of a matrix Gaussian: ``n`` for alpha, ``m`` and ``M`` per
    factor, ``delta``.

    The paper's map for ``delta`` leaves out ``alpha``; ``with_scale=False`` gives that map.
    """

    def __init__(self, S: Kronecker, with_scale: bool = True) -> None:
        self.S = S
        self.with_scale = with_scale
        self.here = S.dense()
        self.sizes = [1]
        for n in S.sizes:
            self.sizes += [n - 1, n * (n - 1) // 2]
        self.sizes.append(len(self.here))

    def precision(self, coordinates: Tensor) -> Tensor:
        blocks = torch.split(coordinates, self.sizes)
        factors = []
        for at, factor in enumerate(self.S.factors):
            assert isinstance(factor, Full)
            free, lower = blocks[1 + 2 * at : 3 + 2 * at]
            m = torch.cat([free, -free.sum(0, keepdim=True)])
            B = factor.basis @ cayley(lower_to_skew(lower, len(m)))
            factors.append((B * (factor.eigs * m.exp())) @ B.T)
        return self.S.scale * blocks[0].exp() * kron(factors)

    def mean(self, coordinates: Tensor) -> Tensor:
        delta = torch.split(coordinates, self.sizes)[-1].reshape(self.S.sizes)
        spectrum = self.S.spectrum if self.with_scale else self.S.spectrum / self.S.scale
        return self.S.unrotate(delta / spectrum.sqrt()).flatten()


class TestClaim5FisherMetricOfFullMatrix:
    @pytest.mark.parametrize("n", [1, 2, 5])
    def test_closed_form_at_the_origin(self, n: int) -> None:
        """``F = Diag(1/2, ..., vecTril(C), 1, ...)`` with ``C_ij = 4 (d_i/d_j + d_j/d_i - 2)``."""
        S = random_full(n)
        want = torch.cat([torch.full((n,), 0.5), rotation_metric(S.eigs), torch.ones(n)]).diag()
        assert_close(FullCoordinates(S).metric(), want, rtol=1e-10, atol=1e-10)

    def test_singular_where_eigenvalues_repeat(self) -> None:
        S = Full(random_orthogonal(3), torch.tensor([1.0, 2.0, 2.0]))
        metric = FullCoordinates(S).metric()
        assert torch.linalg.matrix_rank(metric, hermitian=True, rtol=1e-10) == len(metric) - 1


class TestClaim6UniqueKroneckerFactors:
    @pytest.mark.parametrize("sizes", [[1, 3], [3, 4], [2, 3, 2], [2, 2, 3, 1]])
    def test_scale_and_factors_follow_from_the_matrix(self, sizes: list[int]) -> None:
        """However the scale is spread over the factors, the normalized ones are the same, with
        determinant one.
        """
        S = random_kronecker(sizes)
        shares = torch.logspace(-2, 2, len(sizes))
        spread = tuple(
            Full(factor.basis, factor.eigs * share)  # type: ignore[union-attr]
            for factor, share in zip(S.factors, shares, strict=True)
        )
        again = Kronecker(S.scale / shares.prod(), spread)
        assert_close(again.dense(), S.dense(), rtol=1e-12, atol=1e-12)
        again = again.normalized()
        assert_close(again.scale, S.scale, rtol=1e-12, atol=1e-12)
        for a, b in zip(again.factors, S.factors, strict=True):
            assert_close(a.dense(), b.dense(), rtol=1e-12, atol=1e-12)
            assert_close(torch.linalg.det(a.dense()), torch.tensor(1.0), rtol=1e-11, atol=1e-11)

    def test_scale_is_the_geometric_mean_of_the_spectrum(self) -> None:
        S = random_kronecker([3, 4, 2])
        assert_close(S.scale.log(), S.logdet() / 24)


class TestClaim7FisherMetricOfKroneckerProduct:
    @pytest.mark.parametrize("sizes", [[3, 4], [4, 2], [2, 3, 2]])
    def test_closed_form_at_the_origin(self, sizes: list[int]) -> None:
        """The metric is block-diagonal, with blocks in closed form.

        The paper's blocks are right up to constants that its appendix leaves out. With ``N`` the
        size of ``S`` and ``k = N / l`` for a factor of size ``l``, the metric is ``N/2`` for alpha
        (paper: 1/2), ``k/2 (I + 1 1^T)`` for ``m`` (paper: without ``k``) and ``k
        Diag(vecTril(C))`` for ``M`` (paper: without ``k``). The paper's update uses the right
        constants: that is where its ``1/k`` comes from.
        """
        S = random_kronecker(sizes)
        total = math.prod(sizes)
        blocks = [torch.full((1, 1), total / 2)]
        for factor, n in zip(S.factors, sizes, strict=True):
            blocks.append(total / n / 2 * (torch.eye(n - 1) + 1))
            blocks.append(total / n * rotation_metric(factor.eigs).diag())
        blocks.append(torch.eye(total))
        joined = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
        assert_close(KroneckerCoordinates(S).metric(), joined, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("n", [2, 3, 5])
    def test_inverse_block_of_the_eigenvalues(self, n: int) -> None:
        """``F_mm^-1 = 2/k [(l-1)/l on the diagonal, -1/l off it]``; the paper prints ``+1/l`` and
        no ``1/k``.
        """
        coordinates = KroneckerCoordinates(random_kronecker([n, 3]))
        block = coordinates.metric()[1:n, 1:n]
        truth = 2 / 3 * (torch.eye(n - 1) - 1 / n)
        assert_close(torch.linalg.inv(block), truth, rtol=1e-9, atol=1e-9)
        if n > 2:
            printed = 2 / 3 * (torch.eye(n - 1) * (n - 2) / n + 1 / n)
            assert (torch.linalg.inv(block) - printed).abs().max() > 0.1

    def test_mean_needs_the_scale_in_its_map(self) -> None:
        """``F_delta = I`` if delta's map has ``(alpha d_C x d_K)^(-1/2)``; as printed, without
        alpha, it is alpha I.
        """
        S = random_kronecker([3, 2])
        for with_scale, want in ((True, 1.0), (False, S.scale.item())):
            block = KroneckerCoordinates(S, with_scale).metric()[-6:, -6:]
            assert_close(block, want * torch.eye(6), rtol=1e-10, atol=1e-10)


class TestNaturalGradientsInLocalCoordinates:
    """One step of RGD in local coordinates, by automatic differentiation, is the closed form that
    ``update`` uses.
    """

    @pytest.mark.parametrize("decay", [0.0, 0.4])
    def test_full(self, decay: float) -> None:
        n = 5
        lr = 0.03
        S = random_full(n)
        H = random_symmetric(n)
        coordinates = FullCoordinates(S)

        step = coordinates.natural_step(H, decay, lr)
        m, lower, delta = torch.split(step, coordinates.sizes)
        assert delta.abs().max() == 0
        new = update(S, Dense(H), lr=lr, decay=decay, turning=Turning("moore_penrose"))
        assert_close(new.eigs, S.eigs * m.exp(), rtol=1e-10, atol=1e-10)
        assert_close(new.basis, S.basis @ cayley(lower_to_skew(lower, n)), rtol=1e-10, atol=1e-10)

    def test_full_gradients_before_the_metric(self) -> None:
        """``g_m = -diag(W)/d`` and ``g_M = 4 vecTril(W/d_j - W/d_i)`` with ``W = B^T g B``, as the
        appendix says.
        """
        S = random_full(4)
        g = random_symmetric(4)
        coordinates = FullCoordinates(S)

        def objective(c: Tensor) -> Tensor:
            return torch.linalg.solve(coordinates.precision(c), g).trace()

        g_m, g_lower, _ = torch.split(grad(objective)(coordinates.origin()), coordinates.sizes)
        W = S.basis.T @ g @ S.basis
        assert_close(g_m, -W.diag() / S.eigs)
        assert_close(g_lower, 4 * below_diagonal(W / S.eigs - W / S.eigs[:, None]))

    def test_mean_moves_by_the_preconditioned_gradient(self) -> None:
        """In ``delta`` the metric is ``I``, so a step is ``-beta S^-1 g``: the preconditioner with
        p = 1.
        """
        for S, coordinates in (
            (full := random_full(6), FullCoordinates(full)),
            (kronecker := random_kronecker([2, 3]), KroneckerCoordinates(kronecker)),
        ):
            g = torch.randn(6)
            gradient = grad(lambda c, at=coordinates, g=g: at.mean(c) @ g)(coordinates.origin())
            step = coordinates.mean(-0.1 * torch.linalg.solve(coordinates.metric(), gradient))
            assert_close(step, -0.1 * S.solve(g.reshape(S.sizes)).flatten())

    @pytest.mark.parametrize("decay", [0.0, 1.0])
    @pytest.mark.parametrize("sizes", [[3, 2], [2, 3, 2]])
    def test_kronecker(self, sizes: list[int], decay: float) -> None:
        lr = 0.03
        S = random_kronecker(sizes)
        H = random_symmetric(math.prod(sizes))
        coordinates = KroneckerCoordinates(S)

        step = coordinates.natural_step(H, decay, lr)
        new = update(S, Dense(H), lr=lr, decay=decay, turning=Turning("moore_penrose"))
        blocks = torch.split(step, coordinates.sizes)
        assert_close(new.scale, S.scale * blocks[0][0].exp(), rtol=1e-10, atol=1e-10)
        assert_close(new.dense(), coordinates.precision(step), rtol=1e-10, atol=1e-10)
        for at, (a, b) in enumerate(zip(new.factors, S.factors, strict=True)):
            free, lower = blocks[1 + 2 * at : 3 + 2 * at]
            assert_close(a.eigs, b.eigs * torch.cat([free, -free.sum(0, keepdim=True)]).exp())
            assert isinstance(a, Full)
            assert isinstance(b, Full)
            assert_close(a.basis, b.basis @ cayley(lower_to_skew(lower, len(a.eigs))))
