"""What users may get wrong: each mistake gets an error that names the argument, what came and what
was expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eigenstep.core import sources
from eigenstep.core.curvature import Dense, OuterProducts, project
from eigenstep.core.matrices import Diagonal, Full, Identity, Kronecker
from eigenstep.core.step import Turning, truncated_exp
from eigenstep.core.update import update
from eigenstep_lab.baselines.van_loan import nearest_kronecker

from .cases import random_full, random_kronecker, random_spd

NAN = math.nan
INF = math.inf


def eye(n: int, **options: Any) -> torch.Tensor:
    return torch.eye(n, **options)


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, **options)


def skewed() -> torch.Tensor:
    return torch.tensor([[1.0, 0.5], [0.0, 1.0]])


FULL = Full.identity(3, dtype=torch.float64)
DIAGONAL = Diagonal.identity(3, dtype=torch.float64)
KRONECKER = Kronecker.identity([2, 3], dtype=torch.float64)

Case = tuple[Callable[[], object], type[Exception], str]
"""What is done, the error it must raise, and what the message must contain."""

MATRICES: list[Case] = [
    (lambda: Diagonal([1.0, 2.0]), TypeError, "eigs | tensor | list"),
    (lambda: Diagonal(torch.ones(3, dtype=torch.int64)), TypeError, "eigs | int64"),
    (lambda: Diagonal(ones(3, dtype=torch.bfloat16)), TypeError, "eigs | bfloat16"),
    (lambda: Diagonal(ones(2, 0)), ValueError, "eigs | n >= 1 | (2, 0)"),
    (lambda: Full([[1.0]], ones(1)), TypeError, "basis | tensor | list"),
    (lambda: Full(eye(2), ones(3)), ValueError, "basis | (3, 3) | (2, 2)"),
    (lambda: Full(eye(3).float(), ones(3)), TypeError, "basis | float64 | float32"),
    (lambda: Full(eye(3, device="meta"), ones(3)), ValueError, "basis | meta | cpu"),
    (lambda: Full(eye(3), ones(3), eye(2)), ValueError, "residual | (3, 3) | (2, 2)"),
    (lambda: Full.identity(0), ValueError, "size | 0"),
    (lambda: Full.identity(2.5), TypeError, "size | integer | float"),
    (lambda: Kronecker(torch.tensor(1.0), ()), ValueError, "factors | at least one"),
    (lambda: Kronecker(1.0, (FULL,)), TypeError, "scale | tensor | float"),
    (
        lambda: Kronecker(torch.tensor(1.0).float(), (FULL,)),
        TypeError,
        "factors[0] | float64 | float32",
    ),
    (
        lambda: Kronecker(torch.ones((), device="meta"), (FULL,)),
        ValueError,
        "factors[0] | cpu | meta",
    ),
    (
        lambda: Kronecker(torch.tensor(1.0), (FULL, eye(2))),
        TypeError,
        "factors[1] | Full, Diagonal or Identity | Tensor",
    ),
    (
        lambda: Kronecker(torch.tensor(1.0), (FULL, Full.identity(2, (4,)))),
        ValueError,
        "factors[1] | (4,) | ()",
    ),
    (lambda: Kronecker.identity([]), ValueError, "sizes | at least one"),
    (lambda: Kronecker.identity([2, 0]), ValueError, "sizes[1] | at least 1 | 0"),
    (lambda: Kronecker.identity([2, 3], kinds=["full"]), ValueError, "kinds | 2 | full"),
    (lambda: Kronecker.identity([2], kinds=["round"]), ValueError, "kinds | diagonal | round"),
]

DENSE: list[Case] = [
    (lambda: Full.from_dense(skewed()), ValueError, "matrix | symmetric | 0.5"),
    (lambda: Full.from_dense(ones(2, 3)), ValueError, "matrix | square | (2, 3)"),
    (lambda: Full.from_dense(-eye(2)), ValueError, "matrix | positive definite | -1"),
    (lambda: Diagonal.from_dense(-eye(2)), ValueError, "matrix | positive definite | -1"),
    (lambda: nearest_kronecker(eye(6), [2, 2]), ValueError, "sizes | (2, 2) | 4 | (6, 6)"),
    (lambda: nearest_kronecker(-eye(4), [2, 2]), ValueError, "matrix | positive definite"),
]

EVENTS: list[Case] = [
    (lambda: FULL.matmul(ones(4)), ValueError, "x | (..., 3 | (4,)"),
    (lambda: KRONECKER.matmul(ones(6)), ValueError, "x | 2, 3 | (6,)"),
    (lambda: DIAGONAL.solve([1.0, 2, 3]), TypeError, "x | list"),
    (lambda: FULL.matmul(ones(3, device="meta")), ValueError, "x | meta | cpu"),
]

CURVATURES: list[Case] = [
    (lambda: OuterProducts([[1.0]]), TypeError, "vectors | list"),
    (lambda: OuterProducts(ones(1, 3) * NAN), ValueError, "vectors | finite"),
    (lambda: OuterProducts(ones(3)), ValueError, "vectors | (K, *batch, *sizes) | (3,)"),
    (lambda: OuterProducts(ones(2, 3), ones(3)), ValueError, "weights | (2, 3) | (3,)"),
    (lambda: OuterProducts(ones(2, 3), ones(2, device="meta")), ValueError, "weights | meta | cpu"),
    (lambda: OuterProducts(ones(2, 3), shift=NAN), ValueError, "shift | finite | nan"),
    (lambda: OuterProducts(ones(2, 3), shift="1"), TypeError, "shift | number | str"),
    (lambda: Dense(skewed()), ValueError, "matrix | symmetric | 0.5"),
]


def outer(*shape: int, **options: Any) -> OuterProducts:
    return OuterProducts(ones(*shape, **options))


PROJECTIONS: list[Case] = [
    (
        lambda: update(FULL, eye(3), lr=0.1),
        TypeError,
        "curvature | OuterProducts or Dense | Tensor",
    ),
    (
        lambda: update(eye(3), outer(1, 3), lr=0.1),
        TypeError,
        "S | Full, Diagonal or Kronecker | Tensor",
    ),
    (lambda: project(FULL, outer(1, 4)), ValueError, "curvature.vectors | 3 | (1, 4)"),
    (lambda: project(FULL, outer(1, 2, 3)), ValueError, "curvature.vectors | (K, | (1, 2, 3)"),
    (
        lambda: project(FULL, outer(1, 3, device="meta")),
        ValueError,
        "curvature.vectors | meta | cpu",
    ),
    (
        lambda: project(FULL, OuterProducts(ones(2, 3), ones(2, 3))),
        ValueError,
        "curvature.weights | (K, | (2, 3)",
    ),
    (
        lambda: project(FULL, OuterProducts(ones(2, 3), shift=ones(2))),
        ValueError,
        "curvature.shift | () | (2,)",
    ),
    (lambda: project(FULL, Dense(eye(4))), ValueError, "curvature.matrix | (3, 3) | (4, 4)"),
    (
        lambda: project(FULL, Dense(eye(3, device="meta"))),
        ValueError,
        "curvature.matrix | meta | cpu",
    ),
]


def step(**options: Any) -> object:
    return update(FULL, outer(1, 3), **{"lr": 0.1, **options})


OPTIONS: list[Case] = [
    (lambda: step(lr=-0.1), ValueError, "lr | at least 0 | -0.1"),
    (lambda: step(lr=NAN), ValueError, "lr | finite | nan"),
    (lambda: step(lr="0.1"), TypeError, "lr | number | str"),
    (lambda: Turning(rate=-1.0), ValueError, "rate | at least 0 | -1.0"),
    (lambda: step(decay=1.5), ValueError, "decay | between 0.0 and 1.0 | 1.5"),
    (lambda: step(damping=-1e-3), ValueError, "damping | at least 0 | -0.001"),
    (
        lambda: Turning(rotation="bound"),
        ValueError,
        "rotation | moore_penrose | function | 'bound'",
    ),
    (lambda: Turning(map="caley"), ValueError, "map | truncated_cayley | 'caley'"),
    (lambda: Turning(rotation=3), TypeError, "rotation | function | int"),
    (lambda: step(positive=truncated_exp, lr=1.5), ValueError, "truncated_exp | lr * decay | 1.5"),
    (
        lambda: step(positive=truncated_exp, turning=Turning(rayleigh=True, rate=0.5)),
        ValueError,
        "truncated_exp | rayleigh | rate=0.5",
    ),
]

INDEFINITE: dict[str, Callable[[], Dense | OuterProducts]] = {
    "a matrix": lambda: Dense(-eye(3)),
    "a matrix that happens to be definite": lambda: Dense(eye(3)),
    "weights": lambda: OuterProducts(ones(2, 3), -ones(2)),
    "a negative shift": lambda: OuterProducts(ones(2, 3), shift=-1.0),
    "a hessian": lambda: sources.hessian(lambda w: -w.square().sum(), ones(3)),
    "reinforce": lambda: sources.reinforce(FULL, ones(2, 3), ones(2)),
    "reparametrization": lambda: sources.reparametrization(FULL, ones(2, 3), ones(2, 3)),
    "an SPD gradient": lambda: sources.spd_gradient(FULL, eye(3)),
}

SOURCES: list[Case] = [
    (lambda: sources.gradient_outer_product(ones(3) * NAN), ValueError, "gradient | finite"),
    (lambda: sources.per_example_gradients(ones(0, 3)), ValueError, "gradients | at least one"),
    (
        lambda: sources.gauss_newton(
            lambda p, x: p * x, lambda f, t: (f - t).sum(), ones(2), ones(3, 2), ones(4, 2)
        ),
        ValueError,
        "targets | 3 | 4",
    ),
    (
        lambda: sources.sampled_fisher(
            lambda p, x: p * x,
            lambda f: torch.distributions.Normal(f, 1.0),
            ones(2),
            ones(3, 2),
            draws=0,
        ),
        ValueError,
        "draws | at least 1 | 0",
    ),
    (lambda: sources.reinforce(FULL, ones(2, 4), ones(2)), ValueError, "deviations | 3 | (2, 4)"),
    (lambda: sources.reinforce(FULL, ones(2, 3), ones(3)), ValueError, "values | (2, 3) | (3,)"),
    (
        lambda: sources.reparametrization(FULL, ones(2, 3), ones(3, 3)),
        ValueError,
        "gradients | (2, 3) | (3, 3)",
    ),
    (lambda: sources.spd_gradient(FULL, eye(2)), ValueError, "gradient | (3, 3) | (2, 2)"),
]

SWEEPS: list[Case] = [
    (lambda: Turning(sweeps=0), ValueError, "sweeps | at least 1"),
    (lambda: Turning(sweeps=True), TypeError, "sweeps | integer | bool"),
    (lambda: Turning(dtype=torch.int8), ValueError, "dtype | float32 | int8"),
    (lambda: step(turning="bounded"), TypeError, "turning | Turning | str"),
]


def damped(*damping: float) -> object:
    new = OuterProducts(ones(1, 2, 3))
    return update(Full.identity(3, (2,)), new, lr=0.1, damping=torch.tensor(damping))


DAMPING: list[Case] = [
    (lambda: damped(1.0, 1.0, 1.0), ValueError, "damping | a number | (2,) | (3,)"),
    (lambda: damped(1.0, -1.0), ValueError, "damping | at least 0.0 | -1"),
    (lambda: damped(1.0, NAN), ValueError, "damping | finite"),
    (
        lambda: step(damping=torch.ones((), dtype=torch.float32)),
        TypeError,
        "damping | float64 | float32",
    ),
]

ALL = [
    *MATRICES,
    *DENSE,
    *EVENTS,
    *CURVATURES,
    *PROJECTIONS,
    *OPTIONS,
    *SOURCES,
    *SWEEPS,
    *DAMPING,
]


@pytest.mark.parametrize(("act", "error", "words"), ALL, ids=[case[2] for case in ALL])
def test_error_names_argument_and_expectation(
    act: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        act()
    assert type(caught.value) is error
    for word in words.split(" | "):
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(caught.value)), (
            f"no {word!r} in: {caught.value}"
        )


@pytest.mark.parametrize("name", INDEFINITE)
def test_truncated_map_refuses_curvature_that_may_be_indefinite(name: str) -> None:
    curvature = INDEFINITE[name]()
    with pytest.raises(
        ValueError, match="truncated_exp needs curvature without negative eigenvalues"
    ):
        update(FULL, curvature, lr=0.1, positive=truncated_exp)
    assert (update(FULL, curvature, lr=0.1).spectrum > 0).all()


def test_promised_semidefinite_matrix_is_accepted() -> None:
    new = update(FULL, Dense(random_spd(3), semidefinite=True), lr=0.1, positive=truncated_exp)
    assert (new.spectrum > 0).all()


def test_nothing_is_changed_in_place() -> None:
    """Neither a good nor a refused update touches its arguments."""
    S = random_kronecker([2, 3]).with_residual()
    g = torch.randn(1, 2, 3)
    before = [S.scale.clone(), g.clone(), *(factor.eigs.clone() for factor in S.factors)]
    bases = [factor.basis.clone() for factor in S.factors if isinstance(factor, Full)]
    update(S, OuterProducts(g), lr=0.5)
    with pytest.raises(ValueError, match="decay"):
        update(S, OuterProducts(g), lr=0.5, decay=2.0)
    after = [S.scale, g, *(factor.eigs for factor in S.factors)]
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))
    assert all(
        a.equal(f.basis) for a, f in zip(bases, S.factors, strict=True) if isinstance(f, Full)
    )


def test_matrices_are_frozen() -> None:
    for S, field in (
        (random_full(2), "eigs"),
        (Identity.identity(2), "eigs"),
        (KRONECKER, "scale"),
    ):
        with pytest.raises(AttributeError):
            setattr(S, field, torch.ones(2))
