"""Settings in which the update is a method that everyone knows, or the paper's boxes to
the letter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from eigenstep.core.curvature import Dense, OuterProducts
from eigenstep.core.matrices import Diagonal, Full, Kronecker
from eigenstep.core.sources import gradient_outer_product, hessian
from eigenstep.core.step import (
    ROTATIONS,
    Rotation,
    Turning,
    bounded,
    moore_penrose,
    normalized,
    truncated_exp,
)
from eigenstep.core.update import update

from .cases import (
    random_diagonal,
    random_full,
    random_kronecker,
    spread_eigs,
)

close = partial(assert_close, rtol=1e-10, atol=1e-10)


class TestDiagonalIsAnAdaptiveMethod:
    """Diagonal ``S`` learned from gradient outer products with the truncated map, then ``w <- w -
    lr S^(-1/p) g``.
    """

    N = 6
    STEPS = 50
    LR = 0.05

    @staticmethod
    def loss(w: Tensor) -> Tensor:
        """A Rosenbrock valley."""
        return (2 * (w[1:] - w[:-1] ** 2).square() + (1 - w[:-1]).square()).sum()

    def ours(self, start: Tensor, eigs: float, p: float, lr: float, decay: float) -> Tensor:
        w = start.clone()
        S = Diagonal(torch.full((self.N,), eigs))
        for _ in range(self.STEPS):
            g = torch.func.grad(self.loss)(w)
            S = update(S, gradient_outer_product(g), lr=lr, decay=decay, positive=truncated_exp)
            w = w - self.LR * S.matmul(g, -1 / p)
        return w

    def theirs(
        self, start: Tensor, build: Callable[[list[Tensor]], torch.optim.Optimizer]
    ) -> Tensor:
        w = start.clone().requires_grad_()
        optimizer = build([w])
        for _ in range(self.STEPS):
            w.grad = torch.func.grad(self.loss)(w.detach())
            optimizer.step()
        return w.detach()

    def test_rmsprop(self) -> None:
        """p = 2, gamma = 1 from ``S = 0``, or as near to it as a positive number gets."""
        start = torch.randn(self.N)
        rmsprop = self.theirs(start, partial(torch.optim.RMSprop, lr=self.LR, alpha=0.9, eps=0.0))
        close(self.ours(start, eigs=1e-300, p=2, lr=0.1, decay=1.0), rmsprop)

    def test_adagrad(self) -> None:
        """p = 2, gamma = 0, beta = 1."""
        start = torch.randn(self.N)
        adagrad = self.theirs(
            start, partial(torch.optim.Adagrad, lr=self.LR, initial_accumulator_value=0.3, eps=0.0)
        )
        close(self.ours(start, eigs=0.3, p=2, lr=1.0, decay=0.0), adagrad)

    @pytest.mark.parametrize("p", [1, 4])
    @pytest.mark.parametrize("decay", [0.0, 1.0])
    def test_other_roots(self, p: int, decay: float) -> None:
        """p = 1 (root-free RMSprop and Adagrad) and p = 4, written out."""
        start = torch.randn(self.N)
        w = start.clone()
        square = torch.full((self.N,), 2.0)
        for _ in range(self.STEPS):
            g = torch.func.grad(self.loss)(w)
            square = (1 - 0.1 * decay) * square + 0.1 * g**2
            w = w - self.LR * g / square ** (1 / p)
        close(self.ours(start, eigs=2.0, p=p, lr=0.1, decay=decay), w)


class TestNewton:
    """gamma = 1, beta = 1 and the Hessian as curvature: ``S`` is the Hessian after one step, ``S^-1
    g`` is Newton's.
    """

    @staticmethod
    def loss(w: Tensor) -> Tensor:
        return (
            w.exp().sum() + (w.sum() - 1) ** 2 + 0.5 * (torch.arange(1.0, 6.0) * w).square().sum()
        )

    def test_in_the_eigenbasis(self) -> None:
        w = torch.randn(5)
        for _ in range(4):
            H = torch.func.hessian(self.loss)(w)
            g = torch.func.grad(self.loss)(w)
            curvature = Dense(hessian(self.loss, w).matrix, semidefinite=True)
            start = Full(torch.linalg.eigh(H)[1], spread_eigs(5))
            S = update(start, curvature, lr=1.0, decay=1.0, positive=truncated_exp)
            close(S.dense(), H)
            close(S.solve(g), torch.linalg.solve(H, g))
            w = w - S.solve(g)
        assert torch.func.grad(self.loss)(w).norm() < 1e-6


class TestKroneckerContainsTheOthers:
    @pytest.mark.parametrize("rotation", ROTATIONS)
    @pytest.mark.parametrize("decay", [0.0, 1.0])
    def test_one_full_factor_is_full(self, rotation: str, decay: float) -> None:
        full = random_full(5)
        kronecker = Kronecker(torch.tensor(1.0), (full,)).normalized()
        for _ in range(5):
            step = partial(
                update,
                curvature=OuterProducts(torch.randn(2, 5)),
                lr=0.1,
                decay=decay,
                damping=0.01,
                turning=Turning(rotation),
            )
            full = step(full)
            kronecker = step(kronecker)
            close(kronecker.dense(), full.dense())
            close(kronecker.factors[0].basis, full.basis)  # type: ignore[union-attr]

    @pytest.mark.parametrize("kind", ["full", "diagonal"])
    def test_identity_factors_average_over_their_axes(self, kind: str) -> None:
        """``S_C x I`` learns from ``G`` what ``S_C`` learns from ``G G^T / m``; the same with two
        identity factors.
        """
        one = random_full(4) if kind == "full" else random_diagonal(4)
        two = Kronecker.identity([4, 3, 2], kinds=[kind, "identity", "identity"])
        two = Kronecker(torch.tensor(1.0), (one, *two.factors[1:])).normalized()
        for _ in range(5):
            G = torch.randn(4, 3, 2)
            one = update(one, OuterProducts(G.reshape(4, 6).T / 6**0.5), lr=0.1)
            two = update(two, OuterProducts(G[None]), lr=0.1)
            close(two.scale * two.factors[0].dense(), one.dense())
            for factor in two.factors[1:]:
                close(factor.eigs, torch.ones_like(factor.eigs))


def skew_tril(u: Tensor) -> Tensor:
    return u.tril(-1) - u.tril(-1).T


def papers_u(w: Tensor, d: Tensor) -> Tensor:
    """``U_ij = -W_ij / (d_i - d_j)``; the caller sees to it that eigenvalues differ."""
    return torch.where(torch.eye(len(d)) == 1, 0.0, -w / (d[:, None] - d + torch.eye(len(d))))


def papers_cayley(n: Tensor) -> Tensor:
    return (torch.eye(len(n)) + n) @ torch.linalg.inv(torch.eye(len(n)) - n)


def papers_truncated_cayley(n: Tensor) -> Tensor:
    eye = torch.eye(len(n))
    return (eye + n) @ (eye + n) @ (eye + n @ n) @ (eye + n @ n @ n @ n)


class TestPapersBoxesToTheLetter:
    """Transcriptions of the paper's figures, run beside ``update`` for several steps."""

    STEPS = 10

    @pytest.mark.parametrize(
        ("gamma", "lam", "positive"),
        [(0.0, 0.0, "exp"), (1.0, 0.0, "exp"), (1.0, 0.02, "truncated_exp")],
    )
    def test_full_matrix(self, gamma: float, lam: float, positive: str) -> None:
        """Top box of the figure with the update schemes, right box of that with truncated maps."""
        beta = 0.05
        S = random_full(5)
        B = S.basis
        d = S.eigs
        options = {"decay": gamma, "damping": lam, "turning": Turning("moore_penrose")}
        for _ in range(self.STEPS):
            g = torch.randn(5)
            W = B.T @ torch.outer(g, g) @ B
            B = B @ papers_cayley(beta / 2 * skew_tril(papers_u(W, d)))
            h = -gamma * d + W.diag() + lam
            d = d + beta * h if lam else d * torch.exp(beta / d * h)
            S = update(S, gradient_outer_product(g), lr=beta, positive=positive, **options)
            close(S.basis, B)
            close(S.eigs, d)

    @pytest.mark.parametrize("gamma", [0.0, 1.0])
    @pytest.mark.parametrize("scheme", ["exact", "truncated", "normalized"])
    def test_kronecker(self, gamma: float, scheme: str) -> None:
        """Bottom box of the figure with the update schemes, right box of that with truncated maps.

        The latter also with its caption's step size for the bases. The paper's truncated Cayley map
        leaves a basis a little less than orthogonal, which we repair in each step: at this rate the
        difference is below the tolerance.
        """
        beta, rate = 0.05, 0.1
        S = random_kronecker([3, 4])
        lam = 0.0 if scheme == "exact" else 0.01
        alpha = S.scale
        B = [f.basis for f in S.factors]  # type: ignore[union-attr]
        d = [f.eigs for f in S.factors]
        turning = Turning("moore_penrose")
        if scheme == "normalized":
            turning = Turning(partial(normalized, rate=rate, gap=1e-6), "truncated_cayley")
        for _ in range(self.STEPS):
            G = torch.randn(3, 4)
            inverses = [torch.linalg.inv(b @ e.diag() @ b.T) for b, e in zip(B, d, strict=True)]
            Q = [G @ inverses[1] @ G.T, G.T @ inverses[0] @ G]
            logs = []
            for at, other in ((0, 1), (1, 0)):
                k = alpha * len(d[other])
                W = B[at].T @ Q[at] @ B[at]
                U = skew_tril(papers_u(W, d[at]))
                if scheme == "normalized":
                    B[at] = B[at] @ papers_truncated_cayley(rate / 2 * U / U.norm())
                else:
                    B[at] = B[at] @ papers_cayley(beta / (2 * k) * U)
                h = -gamma * d[at] + (W.diag() + lam * inverses[other].trace()) / k
                n = d[at] * torch.exp(beta * h / d[at]) if scheme == "exact" else d[at] + beta * h
                logs.append(n.log())
            d = [(log - log.mean()).exp() for log in logs]
            alpha = alpha * (sum(log.mean() for log in logs) / 2).exp()
            S = update(
                S,
                gradient_outer_product(G),
                lr=beta,
                decay=gamma,
                damping=lam,
                positive="exp" if scheme == "exact" else "truncated_exp",
                turning=turning,
            )
            close(S.scale, alpha)
            for factor, b, e in zip(S.factors, B, d, strict=True):
                close(factor.basis, b)  # type: ignore[union-attr]
                close(factor.eigs, e)


class TestFixedPoints:
    """Learning comes to rest where it should: at the curvature itself, or at its best
    approximation.
    """

    @pytest.mark.parametrize("rotation", [bounded, partial(bounded, pairwise=True), moore_penrose])
    def test_matrix_that_equals_its_curvature_stays(self, rotation: Rotation) -> None:
        for S in (random_full(5), random_kronecker([3, 4])):
            new = update(S, Dense(S.dense()), lr=0.3, turning=Turning(rotation))
            close(new.dense(), S.dense())

    def test_kronecker_learns_a_kronecker_product(self) -> None:
        H = random_kronecker([3, 4]).dense()
        S = Kronecker.identity([3, 4])
        for _ in range(600):
            S = update(S, Dense(H), lr=0.2)
        close(S.dense(), H)
