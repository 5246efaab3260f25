"""``eigenstep.update`` against its transcription: structures, kinds of curvature, rotations, maps
and options.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from eigenstep import Dense, Diagonal, Full, Identity, Kronecker, OuterProducts, project, update
from eigenstep.core import step
from eigenstep.core.step import Turning, learn

from . import formulas
from .dense_update import assert_equal, curvature_matrix, read
from .dense_update import update as dense_update

STEPS = 6
SIZES = {
    "full": (4,),
    "diagonal": (4,),
    "one factor": (3,),
    "two factors": (3, 4),
    "three factors": (2, 3, 2),
    "mixed": (3, 2, 2),
}
ROTATIONS: dict[str, Callable[..., Any]] = {
    "bounded": lambda d, A: formulas.bounded(A),
    "pairwise": lambda d, A: formulas.bounded(A, pairwise=True),
    "moore_penrose": lambda d, A: formulas.moore_penrose(d, A, 1e-6),
    "normalized": lambda d, A: formulas.normalized(d, A, 0.1, 0.5),
}
MAPS: dict[str, Callable[..., Any]] = {
    "cayley": formulas.cayley,
    "truncated_cayley": lambda N: formulas.truncated_cayley(N, 0.6),
}
POSITIVE: dict[str, Callable[..., Any]] = {
    "exp": lambda d, h: d * np.exp(h / d),
    "truncated_exp": lambda d, h: d + h,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"decay": 0.0},
    "half decay": {"decay": 0.5},
    "damping": {"damping": 0.3},
    "other rate of the basis": {"rate": 0.4},
    "still basis": {"rate": 0.0},
    "rayleigh": {"rayleigh": True},
    "two sweeps": {"sweeps": 2},
    "three sweeps, rayleigh": {"sweeps": 3, "rayleigh": True, "damping": 0.1},
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape))


def full(n: int, seed: int) -> Full:
    eigs = torch.linspace(0.5, 2.5, n, dtype=torch.float64) + 0.1 * seed
    return Full(torch.linalg.qr(random(n, n, seed=seed))[0], eigs)


def matrix(structure: str) -> Full | Diagonal | Kronecker:
    sizes = SIZES[structure]
    if structure == "full":
        return full(4, 1)
    if structure == "diagonal":
        return Diagonal(full(4, 1).eigs)
    factors = [full(n, seed) for seed, n in enumerate(sizes)]
    if structure == "mixed":
        factors[1:] = [Identity.identity(2, dtype=torch.float64), Diagonal(factors[2].eigs)]
    return Kronecker(torch.tensor(0.7, dtype=torch.float64), tuple(factors)).normalized()


def curvature(kind: str, sizes: tuple[int, ...], seed: int) -> Dense | OuterProducts:
    vectors = random(3, *sizes, seed=seed)
    if kind == "gradient":
        return OuterProducts(vectors[:1])
    if kind == "vectors":
        return OuterProducts(vectors, torch.tensor([0.5, 0.2, 0.3]).double(), semidefinite=True)
    if kind == "signed":
        return OuterProducts(vectors, torch.tensor([0.5, -0.2, 0.3]).double(), shift=-0.4)
    root = random(int(np.prod(sizes)), int(np.prod(sizes)), seed=seed)
    return (
        Dense((root + root.T) / 2)
        if kind == "indefinite"
        else Dense(root @ root.T / len(root), semidefinite=True)
    )


def assert_same(
    structure: str,
    kind: str = "gradient",
    positive: str = "exp",
    memory: bool = False,
    rotation: str = "bounded",
    map: str = "cayley",
    decay: float = 1.0,
    damping: float = 0.0,
    **turning: Any,
) -> None:
    S = matrix(structure).with_residual() if memory else matrix(structure)
    expected = read(S)
    rates = {"lr": 0.2, "decay": decay, "damping": damping}
    for seed in range(STEPS):
        new = curvature(kind, SIZES[structure], seed)
        expected = dense_update(
            expected,
            curvature_matrix(expected, new),
            generator=ROTATIONS[rotation],
            orthogonal=MAPS[map],
            positive=POSITIVE[positive],
            **rates,
            **turning,
        )
        S = update(S, new, positive=positive, turning=Turning(rotation, map, **turning), **rates)
        assert_equal(S, expected)


@pytest.mark.parametrize("kind", ["gradient", "vectors", "signed", "indefinite", "definite"])
@pytest.mark.parametrize("structure", SIZES)
def test_structure(structure: str, kind: str) -> None:
    assert_same(structure, kind)


@pytest.mark.parametrize("structure", ["full", "two factors"])
@pytest.mark.parametrize("positive", POSITIVE)
@pytest.mark.parametrize(("rotation", "map_"), list(itertools.product(ROTATIONS, MAPS)))
def test_every_way_to_turn(structure: str, rotation: str, map_: str, positive: str) -> None:
    assert_same(structure, "vectors", positive, rotation=rotation, map=map_)


@pytest.mark.parametrize(
    ("structure", "memory"), [("full", False), ("mixed", False), ("full", True), ("mixed", True)]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_option(name: str, structure: str, memory: bool) -> None:
    assert_same(structure, "vectors", memory=memory, **OPTIONS[name])


@pytest.mark.parametrize("structure", ["full", "two factors", "mixed"])
def test_batches(structure: str) -> None:
    """A batch is as many matrices side by side, each with its own weights, shift and damping."""
    S = matrix(structure)
    vectors = random(2, 3, *SIZES[structure], seed=3)
    weights = random(2, 3, seed=4).square()
    shift = random(3, seed=5).square()
    damping = random(3, seed=6).square()
    batch = stack(S, 3)
    for _ in range(2):
        batch = update(batch, OuterProducts(vectors, weights, shift, True), lr=0.3, damping=damping)
    for at in range(3):
        single = S
        for _ in range(2):
            new = OuterProducts(vectors[:, at], weights[:, at], float(shift[at]), True)
            single = update(single, new, lr=0.3, damping=float(damping[at]))
        assert abs(batch.dense()[at] - single.dense()).max() < 1e-12


def stack(S: Any, count: int) -> Any:
    if isinstance(S, Kronecker):
        return Kronecker(S.scale.expand(count), tuple(stack(factor, count) for factor in S.factors))
    if isinstance(S, Full):
        return Full(S.basis.expand(count, *S.basis.shape), S.eigs.expand(count, -1))
    return type(S)(S.eigs.expand(count, -1))


@pytest.mark.parametrize("kind", ["vectors", "indefinite"])
@pytest.mark.parametrize("structure", SIZES)
def test_projection(structure: str, kind: str) -> None:
    S = matrix(structure)
    copy = read(S)
    new = curvature(kind, SIZES[structure], 9)
    basis = copy.basis()
    H = basis.T @ curvature_matrix(copy, new) @ basis / (copy.alpha or 1.0)
    for at, (piece, found) in enumerate(zip(copy.pieces, project(S, new), strict=True)):
        W = formulas.factor_curvature(H, [p.d for p in copy.pieces], at)
        if piece.B is None:
            W = np.full(len(W), np.diag(W).mean()) if piece.tied else np.diag(W)
        assert found.shape == W.shape
        assert abs(found.numpy() - W).max() < 1e-12 * abs(W).max()


def bent(n: int) -> Full:
    """Return a matrix whose basis is not quite orthogonal."""
    S = full(n, 1)
    return Full(S.basis + 1e-3 * random(n, n, seed=8), S.eigs)


def test_still_basis_is_left_alone() -> None:
    S = bent(4)
    assert torch.equal(
        update(S, curvature("vectors", (4,), 0), lr=0.2, turning=Turning(rate=0.0)).basis, S.basis
    )


@pytest.mark.parametrize("mend", [True, False])
def test_basis_is_mended_if_wanted(mend: bool) -> None:
    S = bent(4)
    new = curvature("vectors", (4,), 0)
    A = 0.8 * np.diag(S.eigs.numpy()) + 0.2 * project(S, new)[0].numpy()
    turned = S.basis.numpy() @ formulas.cayley(formulas.bounded(A))
    found = update(S, new, lr=0.2, turning=Turning(mend=mend)).basis.numpy()
    assert abs(found - (formulas.newton_schulz(turned) if mend else turned)).max() < 1e-14


def test_half_precision_basis_beside_wide_eigenvalues() -> None:
    S = full(4, 1)
    new = curvature("vectors", (4,), 0)
    found = update(Full(S.basis.bfloat16(), S.eigs), new, lr=0.2)
    assert (found.basis.dtype, found.eigs.dtype) == (torch.bfloat16, torch.float64)
    assert (found.dense() - update(S, new, lr=0.2).dense()).abs().max() < 0.05


def test_defaults_of_the_step() -> None:
    """One rate for eigenvalues and basis, the past decays by it, no damping, the exact maps."""
    d = full(4, 1).eigs
    W = random(4, 4) + random(4, 4).mT
    found = learn(d, W, rate=0.2)
    A = 0.8 * np.diag(d.numpy()) + 0.2 * W.numpy()
    assert found.turn is not None
    assert abs(found.turn.numpy() - formulas.cayley(formulas.bounded(A))).max() < 1e-14
    assert abs(found.eigs.numpy() - d.numpy() * np.exp(np.diag(A) / d.numpy() - 1)).max() < 1e-13


@pytest.mark.parametrize("structure", ["full", "two factors"])
@pytest.mark.parametrize("beta_bar", [0.1, 0.5, 1.9])
def test_the_papers_scheme_does_not_mend_its_bases(beta_bar: float, structure: str) -> None:
    """Its truncated Cayley map as it is; with a Newton-Schulz step the longest rotations would end
    elsewhere.
    """
    turning = Turning(
        partial(step.normalized, rate=beta_bar, gap=0.01),
        partial(step.truncated_cayley, cap=None),
        mend=False,
    )
    learn_once = partial(update, lr=0.05, positive="truncated_exp")
    own = {
        "generator": lambda d, A: formulas.normalized(d, A, 0.01, beta_bar),
        "orthogonal": lambda N: formulas.truncated_cayley(N, None),
        "positive": POSITIVE["truncated_exp"],
    }
    S = mended = matrix(structure)
    expected = read(S)
    for seed in range(20):
        new = OuterProducts(random(1, *SIZES[structure], seed=seed))
        H = curvature_matrix(expected, new)
        expected = dense_update(expected, H, lr=0.05, mend=False, **own)
        S = learn_once(S, new, turning=turning)
        mended = learn_once(mended, new, turning=replace(turning, mend=True))
        assert_equal(S, expected)
    if beta_bar == 1.9:
        with pytest.raises(AssertionError):
            assert_equal(mended, expected, tolerance=1e-2)
