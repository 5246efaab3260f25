"""The paper's claims about its steps, one test or class of tests each; `test_claims_metric` has the
others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from eigenstep.core.curvature import Dense, OuterProducts, project
from eigenstep.core.matrices import Full
from eigenstep.core.step import (
    Rotation,
    Turning,
    bounded,
    cayley,
    exp,
    moore_penrose,
    truncated_exp,
)
from eigenstep.core.update import update
from eigenstep_lab.orthogonality import inverse_cayley

from .cases import (
    defect,
    random_full,
    random_kronecker,
    random_skew,
    random_spd,
    random_symmetric,
)


def order_of(error: Callable[[float], float], steps: Tensor | None = None) -> float:
    """Return the order ``q`` of an error ``O(step^q)``: the slope of its logarithm."""
    steps = torch.logspace(-2, -4, 5) if steps is None else steps
    logs = torch.tensor([math.log(error(step.item())) for step in steps])
    x = steps.log() - steps.log().mean()
    return float((x * logs).sum() / x.square().sum())


ROTATIONS: dict[str, Rotation] = {
    "moore_penrose": partial(moore_penrose, gap=0.0),
    "bounded by rows": bounded,
    "bounded pairwise": partial(bounded, pairwise=True),
}


class TestClaim2FirstOrderEquality:
    """One step equals ``S <- (1 - beta gamma) S + beta H`` up to an error of second order in
    ``beta``.
    """

    @pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
    @pytest.mark.parametrize("rayleigh", [False, True], ids=["paper's eigenvalues", "rayleigh"])
    @pytest.mark.parametrize("decay", [0.0, 1.0])
    @pytest.mark.parametrize("kind", ["gradient outer product", "indefinite", "negative definite"])
    def test_one_step(self, rotation: Rotation, rayleigh: bool, decay: float, kind: str) -> None:
        S = random_full(6)
        g = torch.randn(6)
        H = {
            "gradient outer product": torch.outer(g, g),
            "indefinite": random_symmetric(6),
            "negative definite": -random_spd(6),
        }[kind]

        def error(lr: float) -> float:
            new = update(
                S,
                Dense(H),
                lr=lr,
                decay=decay,
                turning=Turning(rotation, rayleigh=rayleigh),
            )
            return float((new.dense() - ((1 - lr * decay) * S.dense() + lr * H)).norm())

        assert order_of(error) == pytest.approx(2, abs=0.1)

    @pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
    def test_several_steps(self, rotation: Rotation) -> None:
        """The paper's formal claim is about the iterates of a whole sequence of gradient outer
        products.
        """
        start = random_full(4)
        gradients = torch.randn(5, 4)

        def error(lr: float) -> float:
            S = start
            want = start.dense()
            for g in gradients:
                S = update(S, OuterProducts(g[None]), lr=lr, turning=Turning(rotation))
                want = (1 - lr) * want + lr * torch.outer(g, g)
            return float((S.dense() - want).norm())

        assert order_of(error) == pytest.approx(2, abs=0.1)


class TestClaimApprox1TraceIdentity:
    """``mean(diag(W) / d)`` is the same number for every factor: ``Tr(S^-1 H)`` over the size of
    ``S``.
    """

    def test_any_factors_and_curvature(self) -> None:
        S = random_kronecker([2, 3, 2, 2], ["full", "diagonal", "full", "identity"])
        H = random_symmetric(24)
        want = torch.linalg.solve(S.dense(), H).trace() / 24
        for factor, w in zip(S.factors, project(S, Dense(H)), strict=True):
            diag = w.diag() if isinstance(factor, Full) else w
            assert_close((diag / factor.eigs).mean(), want)


class TestClaimApprox2MergedUpdate:
    """Updating ``alpha d`` in one go, ``alpha n`` with ``n = (1 - gamma beta) d + beta diag(W)``.

    The paper's proof drops a ``beta`` in its last but one line; the claim itself is right.
    """

    @pytest.mark.parametrize("decay", [0.0, 1.0])
    def test_exact_maps_merge_exactly(self, decay: float) -> None:
        lr = 0.05
        S = random_kronecker([3, 4])
        G = torch.randn(3, 4)
        new = update(S, OuterProducts(G[None]), lr=lr, decay=decay)
        for a, b, w in zip(new.factors, S.factors, project(S, OuterProducts(G[None])), strict=True):
            m = (w.diag() - decay * b.eigs) / b.eigs
            assert_close(
                new.scale * a.eigs, S.scale * b.eigs * (lr * m).exp(), rtol=1e-11, atol=1e-11
            )

    @pytest.mark.parametrize("sizes", [[3, 4], [2, 3, 2]])
    @pytest.mark.parametrize("decay", [0.0, 1.0])
    def test_truncated_update_agrees_to_first_order(self, sizes: list[int], decay: float) -> None:
        S = random_kronecker(sizes)
        G = torch.randn(*sizes)
        curvature = OuterProducts(G[None])

        def error(lr: float) -> float:
            exact, cut = (
                update(
                    S,
                    curvature,
                    lr=lr,
                    decay=decay,
                    turning=Turning("moore_penrose"),
                    positive=positive,
                )
                for positive in (exp, truncated_exp)
            )
            return float((exact.dense() - cut.dense()).norm())

        assert order_of(error) == pytest.approx(2, abs=0.1)


class TestLastClaimCayleyMap:
    """The Cayley map is well defined on skew-symmetric matrices and injective, with a closed-form
    inverse.
    """

    @pytest.mark.parametrize("size", [0.0, 1.0, 100.0])
    @pytest.mark.parametrize("n", [1, 8])
    def test_well_defined_with_orthogonal_values(self, n: int, size: float) -> None:
        N = random_skew(n, (50,), size)
        assert torch.linalg.svdvals(torch.eye(n) - N).min() >= 1 - 1e-12
        Q = cayley(N)
        assert defect(Q) < 1e-11
        assert_close(torch.linalg.det(Q), torch.ones(50))
        assert_close(
            Q, (torch.eye(n) + N) @ torch.linalg.inv(torch.eye(n) - N), rtol=1e-9, atol=1e-9
        )

    @pytest.mark.parametrize("size", [1e-6, 1.0, 100.0])
    def test_injective_with_inverse(self, size: float) -> None:
        N = random_skew(5, (50,), size)
        Q = cayley(N)
        assert torch.linalg.svdvals(torch.eye(5) + Q).min() > 0
        back = inverse_cayley(Q)
        assert_close(back, N, rtol=1e-7, atol=1e-9 * size)
        assert torch.pdist(Q.flatten(1)).min() > 0
