"""What every update keeps, whatever it is given, on hundreds of cases that Hypothesis makes up.

A case is drawn as a few integers and names; its tensors are then random, by a drawn seed.
Eigenvalues spread over thirty orders of magnitude, repeat or nearly repeat; curvature may be zero,
of rank one, indefinite or huge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eigenstep.core.curvature import Curvature, Dense, OuterProducts, project
from eigenstep.core.matrices import SPD, Diagonal, Full, Identity, Kronecker, factors_of, scale_of
from eigenstep.core.step import ROTATIONS, Turning, bounded, cayley, normalized
from eigenstep.core.update import update

from .cases import defect, parts, random_orthogonal

SPECTRA: dict[str, Callable[..., Tensor]] = {
    "thirty orders of magnitude": lambda *shape: 10 ** (30 * torch.rand(*shape) - 15),
    "all equal": lambda *shape: torch.ones(*shape) * 10 ** (30 * torch.rand(()) - 15),
    "nearly equal": lambda *shape: 1 + 1e-13 * torch.randn(*shape),
    "some equal": lambda *shape: torch.where(
        torch.rand(*shape) < 0.5, 1.0, 10 ** (30 * torch.rand(*shape) - 15)
    ),
    "pairs a gap apart": lambda *shape: 1 + 1e-6 * torch.randint(3, shape),
}

OUTER: dict[str, Callable[..., OuterProducts]] = {
    "zero": lambda *shape: OuterProducts(torch.zeros(1, *shape)),
    "none": lambda *shape: OuterProducts(torch.zeros(0, *shape)),
    "rank one": lambda *shape: OuterProducts(torch.randn(1, *shape)),
    "along an axis": lambda *shape: OuterProducts(
        torch.zeros(1, *shape).index_fill(-1, torch.tensor([0]), 1.0)
    ),
    "several": lambda *shape: OuterProducts(torch.randn(5, *shape)),
    "tiny": lambda *shape: OuterProducts(1e-100 * torch.randn(2, *shape)),
    "huge": lambda *shape: OuterProducts(
        10 ** (10 + 130 * torch.rand(())) * torch.randn(2, *shape)
    ),
    "uneven": lambda *shape: OuterProducts(10 ** (30 * torch.rand(2, *shape) - 15)),
}

WEIGHTED: dict[str, Callable[..., OuterProducts]] = {
    "negative": lambda *shape: OuterProducts(torch.randn(3, *shape), -torch.ones(3)),
    "hugely negative": lambda *shape: OuterProducts(
        10 ** (100 * torch.rand(())) * torch.randn(3, *shape), -torch.ones(3)
    ),
    "indefinite": lambda *shape: OuterProducts(torch.randn(4, *shape), torch.randn(4), shift=-0.5),
}


@dataclass
class Factor:
    """One factor of a case."""

    kind: str
    size: int
    spectrum: str
    aligned: bool

    def build(self, batch: tuple[int, ...]) -> Full | Diagonal:
        if self.kind == "identity":
            return Identity.identity(self.size, batch)
        eigs = SPECTRA[self.spectrum](*batch, self.size)
        if self.kind == "diagonal":
            return Diagonal(eigs)
        basis = (
            torch.eye(self.size).expand(*batch, -1, -1)
            if self.aligned
            else random_orthogonal(self.size, batch)
        )
        return Full(basis, eigs)


def factors(
    size: int, kinds: tuple[str, ...] = ("full", "full", "diagonal", "identity")
) -> st.SearchStrategy[Factor]:
    return st.builds(
        Factor,
        st.sampled_from(kinds),
        st.integers(1, size),
        st.sampled_from(sorted(SPECTRA)),
        st.booleans(),
    )


# Full and diagonal matrices up to 40, and products of up to four factors.
structures = st.one_of(
    factors(40, ("full", "full", "diagonal")),
    st.lists(factors(40), min_size=1, max_size=1),
    st.lists(factors(10), min_size=2, max_size=2),
    st.lists(factors(5), min_size=3, max_size=3),
    st.lists(factors(3), min_size=4, max_size=4),
)
batches = st.sampled_from([(), (), (2,), (2, 1)])
seeds = st.integers(0, 2**32 - 1)


def build(structure: Factor | list[Factor], batch: tuple[int, ...]) -> SPD:
    if isinstance(structure, Factor):
        return structure.build(batch)
    scale = 10 ** (30 * torch.rand(batch) - 15)
    return Kronecker(scale, tuple(factor.build(batch) for factor in structure)).normalized()


def check(S: SPD, orthogonality: float = 1e-10) -> None:
    """Assert finite numbers, orthogonal bases, positive eigenvalues, factors of determinant one."""
    for part in parts(S):
        assert torch.isfinite(part).all()
    assert (scale_of(S) > 0).all()
    for factor in factors_of(S):
        assert (factor.eigs > 0).all()
        if isinstance(factor, Full):
            assert defect(factor.basis) <= orthogonality
        if isinstance(factor, Identity):
            assert (factor.eigs - 1).abs().max() <= 1e-12
        if isinstance(S, Kronecker):
            assert factor.eigs.log().sum(-1).abs().max() <= 1e-10


def dense_like(curvature: OuterProducts, S: SPD) -> Dense:
    """Return a dense matrix of the same size as the vectors, and of the same kind of magnitude."""
    flat = curvature.vectors.flatten(1 + len(S.batch_shape)).clamp(-1e100, 1e100)
    return Dense(torch.einsum("k...i,k...j->...ij", flat, flat) - torch.eye(flat.shape[-1]))


@settings(max_examples=500)
@given(
    structure=structures,
    batch=batches,
    seed=seeds,
    kinds=st.lists(st.sampled_from(sorted(OUTER | WEIGHTED)), min_size=1, max_size=4),
    truncated=st.booleans(),
    dense=st.booleans(),
    rotation=st.sampled_from(sorted(ROTATIONS)),
    lr=st.sampled_from([1e-3, 0.05, 0.5, 1.0, 3.0]),
    rate=st.sampled_from([None, None, 0.1, 1.0]),
    decay=st.sampled_from([0.0, 0.5, 1.0]),
    damping=st.sampled_from([0.0, 1e-12, 1.0, 1e10]),
    rayleigh=st.booleans(),
    memory=st.booleans(),
)
def test_the_constraints_are_kept_for_any_curvature(
    structure: Factor | list[Factor],
    batch: tuple[int, ...],
    seed: int,
    kinds: list[str],
    truncated: bool,
    dense: bool,
    rotation: str,
    memory: bool,
    **options: Any,
) -> None:
    """Truncated maps take semidefinite curvature; their series misses orthogonality by 1e-3."""
    torch.manual_seed(seed)
    S = build(structure, batch)
    check(S)
    if memory and isinstance(S, (Full, Kronecker)):
        S = S.with_residual()
    turning = Turning(rotation, rate=options.pop("rate"), rayleigh=options.pop("rayleigh"))
    if truncated and rotation != "moore_penrose":
        rate = None if turning.rayleigh else turning.rate
        turning = replace(turning, map="truncated_cayley", rate=rate)
        kinds = [kind for kind in kinds if kind in OUTER]
        options |= {"positive": "truncated_exp", "lr": min(options["lr"], 1.0)}
        dense = False
    for kind in kinds:
        curvature: Curvature = (OUTER | WEIGHTED)[kind](*batch, *S.sizes)
        if dense and isinstance(curvature, OuterProducts):
            curvature = dense_like(curvature, S)
        S = update(S, curvature, turning=turning, **options)
        check(S, 1e-3 if turning.map else 1e-10)


@settings(max_examples=200)
@given(
    structure=structures,
    batch=batches,
    seed=seeds,
    kinds=st.lists(
        st.sampled_from(sorted((OUTER | WEIGHTED).keys() - {"huge", "hugely negative", "tiny"})),
        max_size=4,
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    rotation=st.sampled_from(sorted(ROTATIONS)),
    lr=st.sampled_from([0.05, 0.5]),
    damping=st.sampled_from([0.0, 1e-6]),
)
def test_low_precision_stays_finite_and_positive(
    structure: Factor | list[Factor],
    batch: tuple[int, ...],
    seed: int,
    kinds: list[str],
    dtype: torch.dtype,
    rotation: str,
    lr: float,
    damping: float,
) -> None:
    torch.manual_seed(seed)
    S = build(structure, batch).to(dtype)
    for kind in kinds:
        curvature = (OUTER | WEIGHTED)[kind](*batch, *S.sizes)
        S = update(S, curvature, lr=lr, damping=damping, turning=Turning(rotation))
        for part in parts(S):
            assert torch.isfinite(part).all()
        for factor in factors_of(S):
            assert (factor.eigs > 0).all()
            if isinstance(factor, Full):
                assert defect(factor.basis.double()) <= 20 * torch.finfo(dtype).eps + 1e-3
        assert (scale_of(S) > 0).all()


@settings(max_examples=300)
@given(
    size=st.integers(1, 40),
    batch=batches,
    seed=seeds,
    spectrum=st.sampled_from(sorted(SPECTRA)),
    kind=st.sampled_from(sorted((OUTER | WEIGHTED).keys())),
    lr=st.sampled_from([1e-6, 1e-3, 0.1, 1.0]),
)
def test_generators_are_skew_and_bounded(
    size: int, batch: tuple[int, ...], seed: int, spectrum: str, kind: str, lr: float
) -> None:
    """Rows of the bounded rotation have a norm of at most 1/sqrt(2), its pairwise entries are at
    most 1/2.
    """
    torch.manual_seed(seed)
    S = Full(random_orthogonal(size, batch), SPECTRA[spectrum](*batch, size))
    (W,) = project(S, (OUTER | WEIGHTED)[kind](*batch, size))
    average = (1 - lr) * torch.diag_embed(S.eigs) + lr * W
    average = (average + average.mT) / 2
    rows = bounded(S.eigs, average)
    pairs = bounded(S.eigs, average, pairwise=True)
    assert torch.linalg.vector_norm(rows, dim=-1).max() <= 0.5**0.5 + 1e-12
    assert pairs.abs().max() <= 0.5 + 1e-12
    for N in (rows, pairs, normalized(S.eigs, average)):
        assert torch.isfinite(N).all()
        assert (N + N.mT).abs().max() <= 1e-15
        assert N.diagonal(dim1=-2, dim2=-1).eq(0).all()
        assert defect(cayley(N)) <= 1e-10


@settings(max_examples=500)
@given(structure=structures, batch=batches, seed=seeds, power=st.floats(-1, 1))
def test_matrices_act_as_powers_of_themselves(
    structure: Factor | list[Factor], batch: tuple[int, ...], seed: int, power: float
) -> None:
    """``S^-p S^p x = x``, and the log-determinant is that of the spectrum, over thirty orders of
    magnitude.
    """
    torch.manual_seed(seed)
    S = build(structure, batch)
    x = torch.randn(*batch, *S.sizes)
    rotated = S.rotate(x)
    assert (S.unrotate(rotated) - x).abs().max() <= 1e-12 * x.abs().max() * 40
    there = S.rotate(S.matmul(x, power))
    scaled = rotated * S.spectrum.pow(power)
    assert (there - scaled).abs().max() <= 1e-12 * scaled.abs().max() * 40
    logs = S.spectrum.log().flatten(len(batch)).sum(-1)
    assert (S.logdet() - logs).abs().max() <= 1e-10 * (1 + S.spectrum.log().abs().sum())
