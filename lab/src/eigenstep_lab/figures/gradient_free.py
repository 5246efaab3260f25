"""Gradient-free optimization by natural evolution strategies, on the paper's five test functions.

A Gaussian with mean μ and inverse covariance S is sampled, and learns from the order of the
function values alone: the curvature of S is the REINFORCE estimate with rank-based utilities u, Σ u
(S δ δᵀ S − S) with deviations δ = w − μ, with γ = 0 and root p = 1, so that μ ← μ + Σ u δ. All
schemes use the same learning rate (xNES's own), the same population (twice its default) and the
same random numbers, and start at distance 3 from the minimum with standard deviation 1. The paper
spares evaluations by techniques of the works that it cites, without saying which. Rows "mixed" use
importance mixing: samples of the generation before are kept where the distribution still has them,
at least a tenth is new, and only new ones are evaluated and counted. It spares more than half of
the evaluations, but makes searches on the most rugged function fail. Rows "DX" use the rules of
DX-NES (Fukushima et al., 2011): mirrored samples, which weigh more if they are far while the search
moves, and learning rates that depend on its phase; "xNES, DX" is DX-NES itself.

Baselines: plain NES (Wierstra et al., 2008) learns the covariance itself; xNES (Glasmachers et al.,
2010) learns a root A of it by A ← A Expm(η/2 M); Cholesky NES (Lin et al., 2021) learns a
triangular factor of S. The paper's scheme is the core's update with exact maps; ours replaces its
rotation by pairwise Jacobi angles, which need no threshold for equal eigenvalues. Shown is ℓ(μ),
against evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from eigenstep.core.matrices import Full
from eigenstep.core.sources import reinforce
from eigenstep.core.step import Turning
from eigenstep.core.update import update
from eigenstep.search.sampling import default_population

from ..baselines.nes import NES, CholeskyNES, ExponentialNES, PlainNES, Population, Rate
from ..baselines.rates import DistanceRates, FixedRates, Rule
from ..console import track
from ..problems.functions import FUNCTIONS, Function
from ..results import Curve, Panel, Result, Table, Verdict
from .matching import median

FLOOR = 1e-3
"""How far below the target there is nothing to see any more, as a fraction of it."""
MIXED, DISTANCE = "mixed", "DX"
"""Techniques that spare evaluations: importance mixing, and the rules of DX-NES."""
SPARING = ("paper", "xNES")
"""Schemes that have rows with these techniques."""
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
FULL = Settings(dimension=10, seeds=30, generations=3000)


@dataclass(frozen=True)
class SpectralNES:
    """Natural evolution strategy with the inverse covariance in spectral form.

    Attributes:
        mean: ``mu``, shape ``(*batch, d)``.
        precision: ``S``, one matrix per search.
        turning: How its basis turns.
    """

    mean: Tensor
    precision: Full
    turning: Turning

    def sample(self, z: Tensor) -> Tensor:
        """Return ``mu + B d^(-1/2) z``."""
        return self.mean + self._deviation(z)

    def whiten(self, x: Tensor) -> Tensor:
        """Return ``d^(1/2) B^T (x - mu)``."""
        return self.precision.rotate(x - self.mean) * self.precision.eigs.sqrt()

    def log_volume(self) -> Tensor:
        """Return the logarithm of the product of ``d^(-1/2)``."""
        return -self.precision.eigs.log().sum(-1) / 2

    def update(
        self, z: Tensor, utilities: Tensor, *, lr: Rate, lr_size: Rate | None = None
    ) -> SpectralNES:
        """Return the distribution after one step; see ``eigenstep_lab.baselines.nes.NES``."""
        deviation = self._deviation(z)
        mean = self.mean + (utilities[..., None] * deviation).sum(0)
        # Losses are negative utilities, of which `reinforce` takes the mean; rates may differ
        # between searches.
        curvature = reinforce(self.precision, deviation, -len(z) * lr * utilities)
        size = (utilities * (z.square().mean(-1) - 1)).sum(0)
        extra = 0.0 if lr_size is None else (lr_size - lr) * size
        curvature = replace(curvature, shift=curvature.shift - extra)
        precision = update(
            self.precision,
            curvature,
            lr=1.0,
            decay=0.0,
            turning=self.turning,
        )
        assert isinstance(precision, Full)
        return replace(self, mean=mean, precision=precision)

    def _deviation(self, z: Tensor) -> Tensor:
        return self.precision.unrotate(z * self.precision.eigs.rsqrt())


def strategies(mean: Tensor) -> dict[str, NES]:
    """Return all schemes at their start: a search for each mean, with covariance I."""
    seeds, d = mean.shape
    identity = torch.eye(d, dtype=mean.dtype, device=mean.device).expand(seeds, d, d)
    precision = Full.identity(d, (seeds,), dtype=mean.dtype, device=mean.device)
    return {
        "paper": SpectralNES(mean, precision, Turning("moore_penrose", mend=False)),
        "ours": SpectralNES(mean, precision, Turning("pairwise")),
        "NES": PlainNES(mean, identity),
        "xNES": ExponentialNES(mean, identity),
        "Cholesky NES": CholeskyNES(mean, identity),
    }


def run(settings: Settings, *, seed: int, device: torch.device) -> Result:
    """Search with all schemes on all functions."""
    sparing = [f"{name}, {technique}" for technique in (MIXED, DISTANCE) for name in SPARING]
    names = [*strategies(torch.zeros(1, 2)), *sparing]
    curves: dict[str, dict[str, Curve]] = {function: {} for function in FUNCTIONS}
    hits: dict[str, dict[str, Tensor]] = {function: {} for function in FUNCTIONS}
    jobs = [(function, name) for function in FUNCTIONS for name in names]
    for function, name in track(jobs, "Searching"):
        start = _start(FUNCTIONS[function], settings, seed).to(device)
        scheme, _, technique = name.partition(", ")
        strategy = strategies(start)[scheme]
        curve, hit = search(strategy, FUNCTIONS[function], settings, seed, technique)
        curves[function][name] = curve
        hits[function][name] = hit
    panels = [
        Panel(function, "function evaluations", "ℓ(μ)", drawn) for function, drawn in curves.items()
    ]
    verdicts: list[Verdict] = []
    for name in ("paper", "ours"):
        verdicts += [_as_fast(name, function, reached) for function, reached in hits.items()]
        verdicts.append(_as_reliable(name, list(hits.values()), settings))
    return Result(panels, verdicts, [_table(hits, settings)], columns=3)


def _start(function: Function, settings: Settings, seed: int) -> Tensor:
    generator = Generator().manual_seed(seed)
    shape = (settings.seeds, settings.dimension)
    direction = torch.randn(shape, generator=generator, dtype=torch.float64)
    length = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    return function.coordinate + 3 * direction / length


def search(
    strategy: NES, function: Function, settings: Settings, seed: int, technique: str
) -> tuple[Curve, Tensor]:
    """Search until all seeds have reached the target, or it is clear that the others will not.

    Args:
        strategy: where to start, one search for each seed.
        function: what to minimize.
        settings: how long, and so on.
        seed: decides the samples.
        technique: MIXED, DISTANCE, or "" for none.

    Returns:
        The curve of ℓ(μ), and for each seed the evaluations until the target, infinite if it was
        not reached.
    """
    generator = Generator().manual_seed(seed + 1)
    half = (default_population(settings.dimension), settings.seeds, settings.dimension)
    refresh = settings.refresh if technique == MIXED else 1.0
    rule: Rule = (
        DistanceRates(torch.zeros_like(strategy.mean)) if technique == DISTANCE else FixedRates()
    )
    hit = torch.full((settings.seeds,), math.inf, dtype=torch.float64)
    at = [0.0]
    values = [function(strategy.mean).cpu()]

    def normal() -> Tensor:
        z = torch.randn((2, *half), generator=generator, dtype=torch.float64).to(
            strategy.mean.device
        )
        return torch.cat((z[0], -z[0] if technique == DISTANCE else z[1]))

    samples = Population.first(strategy, normal)
    evaluations = torch.zeros_like(hit)
    for generation in range(1, settings.generations + 1):
        # Searches far below the target, or stuck, stay where they are: samples as near as rounding
        # say nothing.
        width = (strategy.log_volume() / settings.dimension).exp()
        going = (function(strategy.mean) >= FLOOR * settings.target) & (
            width > 1e-10 * strategy.mean.abs().amax(-1)
        )
        z = strategy.whiten(samples.points)
        rule, step = rule.next(z, function(samples.points))
        strategy = strategy.update(z, going * step.utilities, lr=step.lr, lr_size=step.lr_size)
        value = function(strategy.mean).cpu()
        evaluations = evaluations + samples.new.sum(0).cpu()
        hit = torch.where((value < settings.target) & hit.isinf(), evaluations, hit)
        # Searches that take three times as long as the median one are stuck in a local minimum.
        done = not hit.isinf().any() or float(evaluations.mean()) > 3 * median(hit)
        samples = samples if done else samples.mixed(strategy, refresh, normal, generator)
        if generation % 10 == 0 or done:
            at.append(float(evaluations.mean()))
            values.append(value.clamp_min(FLOOR * settings.target))
        if done:
            break
    return Curve.of(at, torch.stack(values)), hit


def _as_fast(name: str, function: str, hits: dict[str, Tensor]) -> Verdict:
    rivals = [median(hits[rival]) for rival in ("xNES", "Cholesky NES")]
    ratio = median(hits[name]) / (sum(rivals) / len(rivals))
    quantity = (
        f"{function}: median evaluations to the target, divided by the mean of both baselines'"
    )
    return Verdict(CLAIM, name, quantity, ratio, limit=1.15)


def _as_reliable(name: str, hits: Sequence[dict[str, Tensor]], settings: Settings) -> Verdict:
    def share(scheme: str) -> float:
        return sum(float(reached[scheme].isfinite().sum()) for reached in hits) / (
            settings.seeds * len(hits)
        )

    difference = share(name) - max(share("xNES"), share("Cholesky NES"))
    quantity = "share of successful searches, minus that of the better baseline"
    return Verdict(CLAIM, name, quantity, difference, limit=-0.1, at_least=True)


def _table(hits: dict[str, dict[str, Tensor]], settings: Settings) -> Table:
    names = list(next(iter(hits.values())))
    rows = []
    for function, reached in hits.items():
        cells = [
            f"{median(reached[n]):.0f} ({int(reached[n].isfinite().sum())}/{settings.seeds})"
            for n in names
        ]
        rows.append([function, FUNCTIONS[function].summary, *cells])
    title = f"Median evaluations until ℓ(μ) < {settings.target:g} (successful searches)"
    return Table(title, ["function", "what makes it hard", *names], rows)
