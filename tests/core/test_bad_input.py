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

NAN, INF = math.nan, math.inf


def eye(n: int, **options: Any) -> torch.Tensor:
    return torch.eye(n, **options)


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, **options)


def skewed() -> torch.Tensor:
    return torch.tensor([[1.0, 0.5], [0.0, 1.0]])


FULL = Full.identity(3, dtype=torch.float64)
DIAGONAL = Diagonal.identity(3, dtype=torch.float64)
KRONECKER = Kronecker.identity([2, 3], dtype=torch.float64)

Case = tuple[Callable[[], object], type[Exception], list[str]]
"""What is done, the error it must raise, and what the message must contain."""

MATRICES: dict[str, Case] = {
    "eigs are a list": (lambda: Diagonal([1.0, 2.0]), TypeError, ["eigs", "tensor", "list"]),  # type: ignore[arg-type]
    "eigs are integers": (
        lambda: Diagonal(torch.ones(3, dtype=torch.int64)),
        TypeError,
        ["eigs", "int64"],
    ),
    "eigs are complex": (
        lambda: Diagonal(torch.ones(3, dtype=torch.complex64)),
        TypeError,
        ["eigs", "complex64"],
    ),
    "eigs are half precision": (
        lambda: Diagonal(ones(3, dtype=torch.bfloat16)),
        TypeError,
        ["eigs", "bfloat16"],
    ),
    "eigs are a scalar": (
        lambda: Diagonal(torch.tensor(1.0)),
        ValueError,
        ["eigs", "(*batch, n)", "()"],
    ),
    "eigs are empty": (lambda: Diagonal(ones(2, 0)), ValueError, ["eigs", "n >= 1", "(2, 0)"]),
    "basis is a list": (lambda: Full([[1.0]], ones(1)), TypeError, ["basis", "tensor", "list"]),  # type: ignore[arg-type]
    "basis is too small": (
        lambda: Full(eye(2), ones(3)),
        ValueError,
        ["basis", "(3, 3)", "(2, 2)"],
    ),
    "basis lacks the batch": (
        lambda: Full(eye(3), ones(2, 3)),
        ValueError,
        ["basis", "(2, 3, 3)", "(3, 3)"],
    ),
    "basis of another format": (
        lambda: Full(eye(3).float(), ones(3)),
        TypeError,
        ["basis", "float64", "float32"],
    ),
    "basis elsewhere": (
        lambda: Full(eye(3, device="meta"), ones(3)),
        ValueError,
        ["basis", "meta", "cpu"],
    ),
    "residual of another shape": (
        lambda: Full(eye(3), ones(3), eye(2)),
        ValueError,
        ["residual", "(3, 3)", "(2, 2)"],
    ),
    "residual of another format": (
        lambda: Full(eye(3), ones(3), eye(3).half()),
        TypeError,
        ["residual", "float64", "float16"],
    ),
    "residual elsewhere": (
        lambda: Full(eye(2), ones(2), eye(2, device="meta")),
        ValueError,
        ["residual", "meta", "cpu"],
    ),
    "identity of size zero": (lambda: Full.identity(0), ValueError, ["size", "0"]),
    "identity of negative size": (lambda: Diagonal.identity(-2), ValueError, ["size", "-2"]),
    "identity of fractional size": (
        lambda: Full.identity(2.5),
        TypeError,
        ["size", "integer", "float"],
    ),  # type: ignore[arg-type]
    "no factors": (
        lambda: Kronecker(torch.tensor(1.0), ()),
        ValueError,
        ["factors", "at least one"],
    ),
    "scale is a number": (lambda: Kronecker(1.0, (FULL,)), TypeError, ["scale", "tensor", "float"]),  # type: ignore[arg-type]
    "scale of another format": (
        lambda: Kronecker(torch.tensor(1.0).float(), (FULL,)),
        TypeError,
        ["factors[0]", "float64", "float32"],
    ),
    "scale elsewhere": (
        lambda: Kronecker(torch.ones((), device="meta"), (FULL,)),
        ValueError,
        ["factors[0]", "cpu", "meta"],
    ),
    "factor is a tensor": (
        lambda: Kronecker(torch.tensor(1.0), (FULL, eye(2))),  # type: ignore[arg-type]
        TypeError,
        ["factors[1]", "Full, Diagonal or Identity", "Tensor"],
    ),
    "factor with other batch": (
        lambda: Kronecker(torch.tensor(1.0), (FULL, Full.identity(2, (4,)))),
        ValueError,
        ["factors[1]", "(4,)", "()"],
    ),
    "no sizes": (lambda: Kronecker.identity([]), ValueError, ["sizes", "at least one"]),
    "size zero": (lambda: Kronecker.identity([2, 0]), ValueError, ["sizes[1]", "at least 1", "0"]),
    "size as text": (lambda: Kronecker.identity(["2"]), TypeError, ["sizes", "integer", "str"]),  # type: ignore[list-item]
    "too few kinds": (
        lambda: Kronecker.identity([2, 3], kinds=["full"]),
        ValueError,
        ["kinds", "2", "full"],
    ),
    "unknown kind": (
        lambda: Kronecker.identity([2], kinds=["round"]),
        ValueError,
        ["kinds", "diagonal", "round"],
    ),
}

DENSE: dict[str, Case] = {
    "not symmetric": (
        lambda: Full.from_dense(skewed()),
        ValueError,
        ["matrix", "symmetric", "0.5"],
    ),
    "not square": (lambda: Full.from_dense(ones(2, 3)), ValueError, ["matrix", "square", "(2, 3)"]),
    "a vector": (lambda: Full.from_dense(ones(3)), ValueError, ["matrix", "square", "(3,)"]),
    "empty": (
        lambda: Full.from_dense(ones(0, 0)),
        ValueError,
        ["matrix", "at least one row", "(0, 0)"],
    ),
    "NaN": (lambda: Full.from_dense(eye(2) * NAN), ValueError, ["matrix", "finite", "NaN"]),
    "not positive": (
        lambda: Full.from_dense(-eye(2)),
        ValueError,
        ["matrix", "positive definite", "-1"],
    ),
    "singular": (
        lambda: Full.from_dense(torch.zeros(2, 2)),
        ValueError,
        ["matrix", "positive definite", "0"],
    ),
    "diagonal not positive": (
        lambda: Diagonal.from_dense(-eye(2)),
        ValueError,
        ["matrix", "positive definite", "-1"],
    ),
    "integers": (
        lambda: Full.from_dense(eye(2).long()),
        TypeError,
        ["matrix", "floating-point", "int64"],
    ),
    "half precision": (
        lambda: Full.from_dense(eye(2).half()),
        TypeError,
        ["matrix", "float32 or float64", "float16"],
    ),
    "Kronecker sizes": (
        lambda: nearest_kronecker(eye(6), [2, 2]),
        ValueError,
        ["sizes", "(2, 2)", "4", "(6, 6)"],
    ),
    "Kronecker indefinite": (
        lambda: nearest_kronecker(torch.diag(torch.tensor([1.0, 1, 1, -2])), [2, 2]),
        ValueError,
        ["matrix", "positive definite"],
    ),
    "Kronecker negative": (
        lambda: nearest_kronecker(-eye(4), [2, 2]),
        ValueError,
        ["matrix", "positive definite"],
    ),
}

EVENTS: dict[str, Case] = {
    "wrong size": (lambda: FULL.matmul(ones(4)), ValueError, ["x", "(..., 3", "(4,)"]),
    "too few axes": (lambda: KRONECKER.matmul(ones(6)), ValueError, ["x", "2, 3", "(6,)"]),
    "wrong batch": (
        lambda: Full.identity(3, (2,)).solve(ones(5, 3)),
        ValueError,
        ["x", "2, 3", "(5, 3)"],
    ),
    "integers": (
        lambda: DIAGONAL.solve(torch.ones(3, dtype=torch.int32)),
        TypeError,
        ["x", "int32"],
    ),
    "a list": (lambda: DIAGONAL.solve([1.0, 2, 3]), TypeError, ["x", "list"]),  # type: ignore[arg-type]
    "elsewhere": (lambda: FULL.matmul(ones(3, device="meta")), ValueError, ["x", "meta", "cpu"]),
}

CURVATURES: dict[str, Case] = {
    "vectors are a list": (lambda: OuterProducts([[1.0]]), TypeError, ["vectors", "list"]),  # type: ignore[arg-type]
    "vectors are integers": (
        lambda: OuterProducts(torch.ones(1, 3, dtype=torch.int64)),
        TypeError,
        ["vectors", "int64"],
    ),
    "vectors with NaN": (
        lambda: OuterProducts(ones(1, 3) * NAN),
        ValueError,
        ["vectors", "finite"],
    ),
    "vectors with inf": (
        lambda: OuterProducts(ones(1, 3) * INF),
        ValueError,
        ["vectors", "finite"],
    ),
    "one vector": (
        lambda: OuterProducts(ones(3)),
        ValueError,
        ["vectors", "(K, *batch, *sizes)", "(3,)"],
    ),
    "too many weights": (
        lambda: OuterProducts(ones(2, 3), ones(3)),
        ValueError,
        ["weights", "(2, 3)", "(3,)"],
    ),
    "one weight": (
        lambda: OuterProducts(ones(2, 3), torch.tensor(1.0)),
        ValueError,
        ["weights", "(2, 3)", "()"],
    ),
    "weights with NaN": (
        lambda: OuterProducts(ones(2, 3), ones(2) * NAN),
        ValueError,
        ["weights", "finite"],
    ),
    "weights elsewhere": (
        lambda: OuterProducts(ones(2, 3), ones(2, device="meta")),
        ValueError,
        ["weights", "meta", "cpu"],
    ),
    "shift is NaN": (
        lambda: OuterProducts(ones(2, 3), shift=NAN),
        ValueError,
        ["shift", "finite", "nan"],
    ),
    "shift is a NaN tensor": (
        lambda: OuterProducts(ones(2, 3), shift=torch.tensor(NAN)),
        ValueError,
        ["shift", "finite"],
    ),
    "shift is text": (
        lambda: OuterProducts(ones(2, 3), shift="1"),
        TypeError,
        ["shift", "number", "str"],
    ),  # type: ignore[arg-type]
    "not symmetric": (lambda: Dense(skewed()), ValueError, ["matrix", "symmetric", "0.5"]),
    "not square": (lambda: Dense(ones(2, 3)), ValueError, ["matrix", "square", "(2, 3)"]),
    "NaN": (lambda: Dense(ones(2, 2) * NAN), ValueError, ["matrix", "finite"]),
    "inf": (lambda: Dense(ones(2, 2) * INF), ValueError, ["matrix", "finite"]),
    "integers": (
        lambda: Dense(torch.ones(2, 2, dtype=torch.int64)),
        TypeError,
        ["matrix", "int64"],
    ),
    "an array": (lambda: Dense([[1.0]]), TypeError, ["matrix", "list"]),  # type: ignore[arg-type]
}


def outer(*shape: int, **options: Any) -> OuterProducts:
    return OuterProducts(ones(*shape, **options))


PROJECTIONS: dict[str, Case] = {
    "a tensor as curvature": (
        lambda: update(FULL, eye(3), lr=0.1),  # type: ignore[arg-type]
        TypeError,
        ["curvature", "OuterProducts or Dense", "Tensor"],
    ),
    "a tensor as matrix": (
        lambda: update(eye(3), outer(1, 3), lr=0.1),  # type: ignore[type-var]
        TypeError,
        ["S", "Full, Diagonal or Kronecker", "Tensor"],
    ),
    "vectors of wrong size": (
        lambda: project(FULL, outer(1, 4)),
        ValueError,
        ["curvature.vectors", "3", "(1, 4)"],
    ),
    "vectors with an axis too many": (
        lambda: project(FULL, outer(1, 2, 3)),
        ValueError,
        ["curvature.vectors", "(K,", "(1, 2, 3)"],
    ),
    "vectors without count": (
        lambda: project(KRONECKER, outer(2, 3)),
        ValueError,
        ["curvature.vectors", "(K,", "(2, 3)"],
    ),
    "vectors elsewhere": (
        lambda: project(FULL, outer(1, 3, device="meta")),
        ValueError,
        ["curvature.vectors", "meta", "cpu"],
    ),
    "weights with too many axes": (
        lambda: project(FULL, OuterProducts(ones(2, 3), ones(2, 3))),
        ValueError,
        ["curvature.weights", "(K,", "(2, 3)"],
    ),
    "shift of another batch": (
        lambda: project(FULL, OuterProducts(ones(2, 3), shift=ones(2))),
        ValueError,
        ["curvature.shift", "()", "(2,)"],
    ),
    "dense of wrong size": (
        lambda: project(FULL, Dense(eye(4))),
        ValueError,
        ["curvature.matrix", "(3, 3)", "(4, 4)"],
    ),
    "dense elsewhere": (
        lambda: project(FULL, Dense(eye(3, device="meta"))),
        ValueError,
        ["curvature.matrix", "meta", "cpu"],
    ),
}


def step(**options: Any) -> object:
    return update(FULL, outer(1, 3), **{"lr": 0.1, **options})


OPTIONS: dict[str, Case] = {
    "negative lr": (lambda: step(lr=-0.1), ValueError, ["lr", "at least 0", "-0.1"]),
    "NaN lr": (lambda: step(lr=NAN), ValueError, ["lr", "finite", "nan"]),
    "infinite lr": (lambda: step(lr=INF), ValueError, ["lr", "finite", "inf"]),
    "lr as text": (lambda: step(lr="0.1"), TypeError, ["lr", "number", "str"]),
    "lr as bool": (lambda: step(lr=True), TypeError, ["lr", "number", "bool"]),
    "lr left out": (lambda: update(FULL, outer(1, 3)), TypeError, ["lr"]),  # type: ignore[call-arg]
    "negative rate of the basis": (
        lambda: Turning(rate=-1.0),
        ValueError,
        ["rate", "at least 0", "-1.0"],
    ),
    "decay above one": (
        lambda: step(decay=1.5),
        ValueError,
        ["decay", "between 0.0 and 1.0", "1.5"],
    ),
    "decay below zero": (
        lambda: step(decay=-0.5),
        ValueError,
        ["decay", "between 0.0 and 1.0", "-0.5"],
    ),
    "negative damping": (
        lambda: step(damping=-1e-3),
        ValueError,
        ["damping", "at least 0", "-0.001"],
    ),
    "infinite damping": (lambda: step(damping=INF), ValueError, ["damping", "finite", "inf"]),
    "unknown rotation": (
        lambda: Turning(rotation="bound"),
        ValueError,
        ["rotation", "moore_penrose", "function", "'bound'"],
    ),
    "unknown map": (
        lambda: Turning(map="caley"),
        ValueError,
        ["map", "truncated_cayley", "'caley'"],
    ),
    "unknown positive map": (
        lambda: step(positive="log"),
        ValueError,
        ["positive", "truncated_exp", "'log'"],
    ),
    "rotation that is no function": (
        lambda: Turning(rotation=3),
        TypeError,
        ["rotation", "function", "int"],
    ),
    "truncated with long steps": (
        lambda: step(positive=truncated_exp, lr=1.5),
        ValueError,
        ["truncated_exp", "lr * decay", "1.5"],
    ),
    "truncated rayleigh with two rates": (
        lambda: step(positive=truncated_exp, turning=Turning(rayleigh=True, rate=0.5)),
        ValueError,
        ["truncated_exp", "rayleigh", "rate=0.5"],
    ),
}

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

SOURCES: dict[str, Case] = {
    "gradient with NaN": (
        lambda: sources.gradient_outer_product(ones(3) * NAN),
        ValueError,
        ["gradient", "finite"],
    ),
    "gradient is a number": (
        lambda: sources.gradient_outer_product(2.0),  # type: ignore[arg-type]
        TypeError,
        ["gradient", "float"],
    ),
    "gradients with inf": (
        lambda: sources.per_example_gradients(ones(2, 3) * INF),
        ValueError,
        ["gradients", "finite"],
    ),
    "no examples": (
        lambda: sources.per_example_gradients(ones(0, 3)),
        ValueError,
        ["gradients", "at least one"],
    ),
    "parameters with NaN": (
        lambda: sources.hessian(lambda w: w.sum(), ones(2) * NAN),
        ValueError,
        ["parameters", "finite"],
    ),
    "integer parameters": (
        lambda: sources.hessian(lambda w: w.sum(), eye(2).long()),
        TypeError,
        ["parameters", "int64"],
    ),
    "no inputs": (
        lambda: sources.gauss_newton(
            lambda p, x: p * x, lambda f, t: (f - t).sum(), ones(2), ones(0, 2), ones(0, 2)
        ),
        ValueError,
        ["inputs", "at least one"],
    ),
    "other number of targets": (
        lambda: sources.gauss_newton(
            lambda p, x: p * x, lambda f, t: (f - t).sum(), ones(2), ones(3, 2), ones(4, 2)
        ),
        ValueError,
        ["targets", "3", "4"],
    ),
    "no draws": (
        lambda: sources.sampled_fisher(
            lambda p, x: p * x,
            lambda f: torch.distributions.Normal(f, 1.0),
            ones(2),
            ones(3, 2),
            draws=0,
        ),
        ValueError,
        ["draws", "at least 1", "0"],
    ),
    "deviations of wrong size": (
        lambda: sources.reinforce(FULL, ones(2, 4), ones(2)),
        ValueError,
        ["deviations", "3", "(2, 4)"],
    ),
    "deviations with NaN": (
        lambda: sources.reparametrization(FULL, ones(2, 3) * NAN, ones(2, 3)),
        ValueError,
        ["deviations", "finite"],
    ),
    "values of wrong length": (
        lambda: sources.reinforce(FULL, ones(2, 3), ones(3)),
        ValueError,
        ["values", "(2, 3)", "(3,)"],
    ),
    "values with NaN": (
        lambda: sources.reinforce(FULL, ones(2, 3), ones(2) * NAN),
        ValueError,
        ["values", "finite"],
    ),
    "no samples": (
        lambda: sources.reinforce(FULL, ones(0, 3), ones(0)),
        ValueError,
        ["deviations", "at least one"],
    ),
    "gradients of wrong shape": (
        lambda: sources.reparametrization(FULL, ones(2, 3), ones(3, 3)),
        ValueError,
        ["gradients", "(2, 3)", "(3, 3)"],
    ),
    "SPD gradient not symmetric": (
        lambda: sources.spd_gradient(Full.identity(2), skewed()),
        ValueError,
        ["gradient", "symmetric"],
    ),
    "SPD gradient of wrong size": (
        lambda: sources.spd_gradient(FULL, eye(2)),
        ValueError,
        ["gradient", "(3, 3)", "(2, 2)"],
    ),
}

ALL = {
    f"{group}: {name}": case
    for group, cases in {
        "matrix": MATRICES,
        "from_dense": DENSE,
        "event": EVENTS,
        "curvature": CURVATURES,
        "project": PROJECTIONS,
        "update": OPTIONS,
        "source": SOURCES,
    }.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", ALL)
def test_error_names_argument_and_expectation(name: str) -> None:
    act, error, words = ALL[name]
    with pytest.raises(error) as caught:
        act()
    assert type(caught.value) is error
    for word in words:
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
    S, g = random_kronecker([2, 3]).with_residual(), torch.randn(1, 2, 3)
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
