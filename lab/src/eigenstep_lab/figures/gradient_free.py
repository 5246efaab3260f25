"""Gradient-free optimization by natural evolution strategies, on the paper's five test functions.

A Gaussian with mean μ and inverse covariance S is sampled, and learns from the order of the function values alone: the
curvature of S is the REINFORCE estimate with rank-based utilities u, Σ u (S δ δᵀ S − S) with deviations δ = w − μ, with
γ = 0 and root p = 1, so that μ ← μ + Σ u δ. All schemes use the same learning rate (xNES's own), the same population
(twice its default) and the same random numbers, and start at distance 3 from the minimum with standard deviation 1.
Rows "mixed" use importance mixing, as the works that the paper cites do: samples of the generation before are kept
where the distribution still has them, at least a tenth is new, and only new ones are evaluated and counted. It spares
more than half of the evaluations, but makes searches on the most rugged function fail.

Baselines: plain NES (Wierstra et al., 2008) learns the covariance itself; xNES (Glasmachers et al., 2010) learns a root
A of it by A ← A Expm(η/2 M); Cholesky NES (Lin et al., 2021) learns a triangular factor of S. The paper's scheme is the
core's update with exact maps; ours replaces its rotation by pairwise Jacobi angles, which need no threshold for equal
eigenvalues. Shown is ℓ(μ), against evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Generator, Tensor

from eigenstep.core.generators import Rotation, bounded, moore_penrose
from eigenstep.core.matrices import Full
from eigenstep.core.sources import reinforce
from eigenstep.core.step import update
from eigenstep.search.sampling import default_population

from ..baselines.nes import NES, CholeskyNES, ExponentialNES, PlainNES, Population, rank_utilities
from ..baselines.paper_nes import default_lr
from ..console import track
from ..problems.functions import FUNCTIONS, Function
from ..results import Curve, Panel, Result, Table, Verdict

FLOOR = 1e-3
"""How far below the target there is nothing to see any more, as a fraction of it."""
MIXED, SUFFIX = ("paper", "xNES"), ", mixed"
"""Which schemes have a second row, with importance mixing, and how it is called."""
CLAIM = "It performs similarly to existing natural evolution strategies."


@dataclass(frozen=True)
class Settings:
    """Numbers of the experiment.

    Attributes:
        dimension: Of the search space.
        seeds: How many searches, each from another start.
        generations: Longest search.
        target: A search has succeeded when ℓ(μ) falls below this.
        refresh: Least share of new samples in a generation of the rows with importance mixing.
    """

    dimension: int
    seeds: int
    generations: int
    target: float = 1e-6
    refresh: float = 0.1


QUICK = Settings(dimension=5, seeds=30, generations=1000)
FULL = Settings(dimension=10, seeds=50, generations=3000)


@dataclass(frozen=True)
class SpectralNES:
    """Natural evolution strategy with the inverse covariance in spectral form.

    Attributes:
        mean: ``mu``, shape ``(*batch, d)``.
        precision: ``S``, one matrix per search.
        rotation: How its basis turns.
        mended: Whether a Newton–Schulz step follows each turn; the paper has none.
    """

    mean: Tensor
    precision: Full
    rotation: Rotation
    mended: bool = True

    def sample(self, z: Tensor) -> Tensor:
        """Return ``mu + B d^(-1/2) z``."""
        return self.mean + self._deviation(z)

    def whiten(self, x: Tensor) -> Tensor:
        """Return ``d^(1/2) B^T (x - mu)``."""
        return self.precision.rotate(x - self.mean) * self.precision.eigs.sqrt()

    def log_volume(self) -> Tensor:
        """Return the logarithm of the product of ``d^(-1/2)``."""
        return -self.precision.eigs.log().sum(-1) / 2

    def update(self, z: Tensor, utilities: Tensor, *, lr: float, lr_mean: float = 1.0) -> SpectralNES:
        """Return the distribution after one step; see ``eigenstep_lab.baselines.nes.NES``."""
        deviation = self._deviation(z)
        mean = self.mean + lr_mean * (utilities[..., None] * deviation).sum(0)
        # Losses are negative utilities, of which `reinforce` takes the mean.
        curvature = reinforce(self.precision, deviation, -len(z) * utilities)
        precision = update(
            self.precision, curvature, lr=lr, decay=0.0, rotation=self.rotation, reorthonormalized=self.mended
        )
        assert isinstance(precision, Full)
        return replace(self, mean=mean, precision=precision)

    def _deviation(self, z: Tensor) -> Tensor:
        return self.precision.unrotate(z * self.precision.eigs.rsqrt())


def strategies(mean: Tensor) -> dict[str, NES]:
    """Return all schemes at their start: one search for each mean, with the identity as covariance."""
    seeds, d = mean.shape
    identity = torch.eye(d, dtype=mean.dtype, device=mean.device).expand(seeds, d, d)
    precision = Full.identity(d, (seeds,), dtype=mean.dtype, device=mean.device)
    return {
        "paper": SpectralNES(mean, precision, moore_penrose, mended=False),
        "ours": SpectralNES(mean, precision, partial(bounded, pairwise=True)),
        "NES": PlainNES(mean, identity),
        "xNES": ExponentialNES(mean, identity),
        "Cholesky NES": CholeskyNES(mean, identity),
    }


def run(settings: Settings, *, seed: int, device: torch.device) -> Result:
    """Search with all schemes on all functions."""
    panels = []
    hits: dict[str, dict[str, Tensor]] = {}
    names = [*strategies(torch.zeros(1, 2)), *(f"{name}{SUFFIX}" for name in MIXED)]
    jobs = [(function, name) for function in FUNCTIONS for name in names]
    curves: dict[str, dict[str, Curve]] = {function: {} for function in FUNCTIONS}
    for function, name in track(jobs, "Searching"):
        start = _start(FUNCTIONS[function], settings, seed).to(device)
        refresh = settings.refresh if name.endswith(SUFFIX) else 1.0
        strategy = strategies(start)[name.removesuffix(SUFFIX)]
        curve, hit = search(strategy, FUNCTIONS[function], settings, seed, refresh)
        curves[function][name] = curve
        hits.setdefault(function, {})[name] = hit
    for function, drawn in curves.items():
        panels.append(Panel(function, "function evaluations", "ℓ(μ)", drawn))
    verdicts = [
        verdict
        for name in ("paper", "ours")
        for verdict in (
            *(_as_fast(name, function, found) for function, found in hits.items()),
            _as_reliable(name, list(hits.values()), settings),
        )
    ]
    return Result(panels, verdicts, [_table(hits, settings)], columns=3)


def _start(function: Function, settings: Settings, seed: int) -> Tensor:
    generator = Generator().manual_seed(seed)
    direction = torch.randn(settings.seeds, settings.dimension, generator=generator, dtype=torch.float64)
    return function.coordinate + 3 * direction / torch.linalg.vector_norm(direction, dim=-1, keepdim=True)


def search(strategy: NES, function: Function, settings: Settings, seed: int, refresh: float) -> tuple[Curve, Tensor]:
    """Search until all seeds have reached the target, or it is clear that the others will not.

    Args:
        strategy: where to start, one search for each seed.
        function: what to minimize.
        settings: how long, and so on.
        seed: decides the samples.
        refresh: least share of new samples in a generation; 1 for no importance mixing.

    Returns:
        The curve of ℓ(μ), and for each seed the evaluations until the target, infinite if it was not reached.
    """
    generator = Generator().manual_seed(seed + 1)
    population, lr = 2 * default_population(settings.dimension), default_lr(settings.dimension)
    shape = (population, settings.seeds, settings.dimension)
    hit = torch.full((settings.seeds,), math.inf, dtype=torch.float64)
    at, values = [0.0], [function(strategy.mean).cpu()]

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(strategy.mean.device)

    samples, evaluations = Population.first(strategy, normal), torch.zeros_like(hit)
    for generation in range(1, settings.generations + 1):
        # Searches far below the target stay where they are: samples nearer to the mean than its rounding say nothing.
        going = function(strategy.mean) >= FLOOR * settings.target
        utilities = going * rank_utilities(function(samples.points))
        strategy = strategy.update(strategy.whiten(samples.points), utilities, lr=lr)
        value = function(strategy.mean).cpu()
        evaluations = evaluations + samples.new.sum(0).cpu()
        hit = torch.where((value < settings.target) & hit.isinf(), evaluations, hit)
        # Searches that take three times as long as the median one are stuck in a local minimum.
        done = not hit.isinf().any() or float(evaluations.mean()) > 3 * _median(hit)
        samples = samples if done else samples.mixed(strategy, refresh, normal, generator)
        if generation % 10 == 0 or done:
            at.append(float(evaluations.mean()))
            values.append(value.clamp_min(FLOOR * settings.target))
        if done:
            break
    return Curve.of(at, torch.stack(values)), hit


def _median(hit: Tensor) -> float:
    return float(hit.quantile(0.5, interpolation="lower"))


def _as_fast(name: str, function: str, hits: dict[str, Tensor]) -> Verdict:
    rivals = [_median(hits[rival]) for rival in ("xNES", "Cholesky NES")]
    ratio = _median(hits[name]) / (sum(rivals) / len(rivals))
    quantity = f"{function}: median evaluations to the target, divided by the mean of both baselines'"
    return Verdict(CLAIM, name, quantity, ratio, limit=1.15)


def _as_reliable(name: str, hits: Sequence[dict[str, Tensor]], settings: Settings) -> Verdict:
    def share(scheme: str) -> float:
        return sum(float(found[scheme].isfinite().sum()) for found in hits) / (settings.seeds * len(hits))

    difference = share(name) - max(share("xNES"), share("Cholesky NES"))
    quantity = "share of successful searches, minus that of the better baseline"
    return Verdict(CLAIM, name, quantity, difference, limit=-0.1, at_least=True)


def _table(hits: dict[str, dict[str, Tensor]], settings: Settings) -> Table:
    names = list(next(iter(hits.values())))
    rows = []
    for function, found in hits.items():
        cells = [f"{_median(found[n]):.0f} ({int(found[n].isfinite().sum())}/{settings.seeds})" for n in names]
        rows.append([function, FUNCTIONS[function].summary, *cells])
    title = f"Median evaluations until ℓ(μ) < {settings.target:g} (successful searches)"
    return Table(title, ["function", "what makes it hard", *names], rows)
