"""Learning a Kronecker product from gradient outer products, against structured baselines.

A matrix S = α S₁ ⊗ S₂ with a 9 × 9 and an 11 × 11 factor learns from gradients g ~ N(0, Σ), with a
constant step size β and γ = 1. Σ is a 99 × 99 matrix that is no Kronecker product, so that no
scheme can reach it, and what counts is whether all come equally close. The paper speaks of an
"unstructured fixed point": in the first family Σ is a random matrix without structure. In the
second, 70 % of its trace belong to a Kronecker product and 30 % to such a matrix, so that there is
something to find. The default scheme learns the whole 99 × 99 matrix. All schemes start at the same
Kronecker product; the paper's does not mend its bases.

Baselines: the projection of the default step onto the nearest Kronecker product (Van Loan and
Pitsianis, 1993), which needs the whole matrix; the structured Cholesky scheme of Lin et al. (2024),
C ← C Expm(−β/2 (Cᵀ G K Kᵀ Gᵀ C / m − γ I)) and likewise for K, exact and truncated; and averages of
each factor, decomposed at every step (KL-Shampoo).

The projection seeks another matrix than all schemes that learn factors: the Kronecker product
nearest to Σ in the Frobenius norm, which is one of the two distances shown, where theirs is the
likeliest one, nearest in the Kullback–Leibler divergence. The last table compares these two
matrices themselves, learned by no scheme, for more and less structure in Σ: that is how far the
verdicts against the projection can go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Generator, Tensor

from eigenstep.core.curvature import Dense
from eigenstep.core.matrices import Full, Kronecker

from ..baselines import eigen, van_loan
from ..baselines.cholesky import Cholesky
from ..results import Panel, Result, Table, Verdict
from .matching import (
    FIXED_POINT,
    ITERATES,
    METRICS,
    Scheme,
    Settings,
    cholesky_schemes,
    compare,
    final_distances,
    our_scheme,
    paper_schemes,
    random_covariances,
)
from .matching import run as match

QUICK = Settings(sizes=(9, 11), seeds=4, steps=1500, lr=0.002)
FULL = Settings(sizes=(9, 11), seeds=10, steps=5000, lr=0.001)
SHARES = (0.0, 0.3, 0.5, 0.7, 0.9)
"""Shares of structure in Σ for which the two matrices that schemes seek are compared."""


def schemes(factors: list[Tensor], lr: float, gap: float) -> dict[str, Scheme]:
    """Return all schemes but the default one, at factors of shape seeds × n × n."""
    ones = torch.ones(len(factors[0]), dtype=factors[0].dtype, device=factors[0].device)
    spectral = Kronecker(ones, tuple(Full.from_dense(factor) for factor in factors)).normalized()
    return {
        **paper_schemes(spectral, lr, gap),
        **our_scheme(spectral, lr),
        "projection": Scheme(spectral, partial(van_loan.update, lr=lr)),
        **cholesky_schemes(Cholesky.from_dense(*factors), lr),
        "eigendecomposition": Scheme(spectral, partial(eigen.update, lr=lr)),
    }


def run(settings: Settings, *, seed: int, device: torch.device) -> Result:
    """Compare the schemes."""
    generator = Generator().manual_seed(seed)

    def product(condition: float) -> tuple[Tensor, list[Tensor]]:
        factors = [
            random_covariances(n, settings.seeds, condition, generator).to(device)
            for n in settings.sizes
        ]
        return Cholesky.from_dense(*factors).dense(), factors

    structured, _ = product(30)
    unstructured = random_covariances(
        math.prod(settings.sizes), settings.seeds, 1000, generator
    ).to(device)
    start, factors = product(3)
    families = {
        "no structure": unstructured,
        "70 % structure": 0.7 * structured + 0.3 * unstructured,
    }
    panels: list[Panel] = []
    tables: list[Table] = []
    verdicts: list[Verdict] = []
    compared = schemes(factors, settings.lr, settings.gap)
    for family, covariance in families.items():
        measured = tuple(
            replace(panel, title=f"{panel.title}, {family}")
            for panel in match(compared, start, covariance, settings, generator)
        )
        panels += measured
        tables.append(final_distances(measured, f"Σ with {family}"))
        verdicts += _verdicts(measured, family)
    mixtures = {share: share * structured + (1 - share) * unstructured for share in SHARES}
    tables.append(sought(mixtures, settings.sizes))
    return Result(panels, verdicts, tables)


def likeliest(covariance: Tensor, sizes: tuple[int, ...]) -> Kronecker:
    """Return the Kronecker product under which Gaussian gradients are likeliest.

    That is where learning factors comes to rest: here by averaging with Σ itself, without noise and
    in large steps.
    """
    S = van_loan.nearest_kronecker(covariance, sizes)
    for _ in range(80):
        S = eigen.update(S, Dense(covariance, semidefinite=True), lr=0.5)
    return S


def divergence(estimate: Tensor, truth: Tensor) -> Tensor:
    """Return the divergence of the truth from an estimate, as centered Gaussians."""
    ratio = torch.linalg.solve(estimate, truth)
    return (
        torch.diagonal(ratio, dim1=-2, dim2=-1).sum(-1)
        - len(truth[0])
        - torch.linalg.slogdet(ratio).logabsdet
    ) / 2


def sought(covariances: dict[float, Tensor], sizes: tuple[int, ...]) -> Table:
    """Compare the likeliest Kronecker product with the nearest one, for each share of structure."""
    distances = {**METRICS, "Kullback–Leibler": divergence}
    rows = []
    for share, covariance in covariances.items():
        likely = likeliest(covariance, sizes).dense()
        nearest = van_loan.nearest_kronecker(covariance, sizes).dense()
        row = [f"{share:.0%}"]
        for distance in distances.values():
            ratio = distance(likely, covariance) / distance(nearest, covariance)
            row.append(f"{float(ratio.log().mean().exp()):.3g}")
        rows.append(row)
    title = (
        "Distance to Σ of the likeliest Kronecker product, divided by that of the projection "
        "of Σ, geometric means"
    )
    return Table(title, ["structure in Σ", *distances], rows)


def _verdicts(panels: Sequence[Panel], family: str) -> list[Verdict]:
    as_fast = "It converges as fast as {}."
    as_close = "It matches the unstructured iterates of the default scheme as closely as {}."
    rivals = {
        "projection": "the impractical projection",
        "Cholesky": "the structured Cholesky scheme",
    }
    return [
        compare(name, rival, panels, f"{title}, {family}", claim.format(text), limit=1.1)
        for name in ("paper, exact maps", "paper, truncated maps", "ours")
        for title, claim in ((FIXED_POINT, as_fast), (ITERATES, as_close))
        for rival, text in rivals.items()
    ]
