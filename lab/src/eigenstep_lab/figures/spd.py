"""Minimizing over positive-definite matrices: metric nearness and log-det, 60 × 60.

Metric nearness: ℓ(S) = 1/(2N) Σ ‖S Q xᵢ − xᵢ‖², of which each iteration sees a minibatch of the xᵢ.
Log-det: ℓ(S) = tr(S Q) − log det S. Both have the solution S = Q⁻¹; Q is random with condition
number 10. Shown is how far ℓ is above its least value. The curvature is −2 S ∇ℓ S with γ = 0, which
can be negative definite, so eigenvalues move by the exponential map.

All schemes are Riemannian gradient descent, S ← S − 2β S ∇ℓ S to first order in the step size β,
which is the same for all. Baselines: the second-order retraction S + ξ + ½ ξ S⁻¹ ξ (Boumal et al.,
2014), and steps in a factor of S (Lin et al., 2023). All agree to first order in β only, which must
be small to compare them: with five times this one they part.

The upper panels start at a random matrix with condition number 3. The lower ones start at S = I,
where all eigenvalues are equal: the paper's rotation has to wait until they differ, ours (pairwise
Jacobi angles) turns at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from eigenstep.core.matrices import SPD, Full
from eigenstep.core.sources import spd_gradient
from eigenstep.core.step import Turning, symmetrize
from eigenstep.core.update import update

from ..baselines import rgd
from ..console import track
from ..problems.spd import ALL, LogDet, Nearness, Problem
from ..results import Curve, Panel, Result, Table, Verdict
from .matching import Scheme, median, random_covariances

BASELINES = ("retraction", "Cholesky")
Case = tuple[str, str]
"""A task and where it starts."""


@dataclass(frozen=True)
class Settings:
    """Numbers of the experiment.

    Attributes:
        dimension: Rows of the matrix.
        seeds: How many random problems.
        steps: Number of iterations.
        lr_nearness: Step size β of metric nearness.
        lr_log_det: Step size β of log-det.
        samples: How many xᵢ there are.
        minibatch: How many of them an iteration sees.
        target: A run has arrived when ℓ is this far above its least value.
    """

    dimension: int
    seeds: int
    steps: int
    lr_nearness: float = 0.01
    lr_log_det: float = 0.02
    samples: int = 1000
    minibatch: int = 100
    target: float = 1e-6


QUICK = Settings(dimension=60, seeds=3, steps=1000)
FULL = Settings(dimension=60, seeds=10, steps=1000)


@dataclass(frozen=True)
class Task:
    """A function to minimize, one for each seed.

    Attributes:
        problem: The function.
        lr: Step size.
        minibatch: How many xᵢ an iteration sees; all if None.
    """

    problem: Problem
    lr: float
    minibatch: int | None = None

    def gradient(self, S: Tensor, generator: Generator) -> Tensor:
        """Return the gradient that an iteration sees."""
        picked = ALL
        if self.minibatch:
            count = self.problem.x.shape[-1]
            picked = torch.randint(count, (self.minibatch,), generator=generator).to(S.device)
        gradient: Tensor = self.problem.gradient(S, picked)
        return gradient


def tasks_of(settings: Settings, generator: Generator, device: torch.device) -> dict[str, Task]:
    """Return both problems, with one random matrix ``Q`` for each seed."""
    Q = random_covariances(settings.dimension, settings.seeds, 10, generator).to(device)
    shape = (settings.seeds, settings.dimension, settings.samples)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
    return {
        "Metric nearness": Task(Nearness(Q, x), settings.lr_nearness, settings.minibatch),
        "Log-det": Task(LogDet(Q), settings.lr_log_det),
    }


def schemes(start: Tensor) -> dict[str, Scheme]:
    """Return all schemes at the same matrices, shape seeds × n × n."""
    spectral = Full.from_dense(start)

    def descend(S: Full, gradient: Tensor, lr: float, turning: Turning) -> SPD:
        return update(S, spd_gradient(S, gradient), lr=lr, decay=0.0, turning=turning)

    paper = partial(descend, turning=Turning("moore_penrose", mend=False))
    ours = partial(descend, turning=Turning("pairwise"))
    factor = torch.linalg.cholesky(start)
    return {
        "paper": Scheme(spectral, paper),
        "ours": Scheme(spectral, ours),
        "retraction": Scheme(start, rgd.retraction_step, lambda S: S),
        "Cholesky": Scheme(factor, rgd.cholesky_step, lambda C: C @ C.mT),
    }


def descend(scheme: Scheme, task: Task, settings: Settings, seed: int) -> tuple[Curve, Tensor]:
    """Return the curve of the gap, and for each seed the iterations to the target."""
    draws = Generator().manual_seed(seed)
    state = scheme.start
    gaps = []
    for step in range(settings.steps + 1):
        S = symmetrize(scheme.dense(state))
        gaps.append(task.problem.gap(S).cpu())
        if step < settings.steps:
            state = scheme.step(state, task.gradient(S, draws), task.lr)
    values = torch.stack(gaps)
    reached = values < settings.target
    first = torch.where(reached.any(0), reached.double().argmax(0).double(), math.inf)
    # Far below the target there is only rounding.
    return Curve.of(range(len(values)), values.clamp_min(1e-4 * settings.target)), first


def run(settings: Settings, *, seed: int, device: torch.device) -> Result:
    """Minimize both functions with all schemes from both starts."""
    generator = Generator().manual_seed(seed)
    tasks = tasks_of(settings, generator, device)
    apart = random_covariances(settings.dimension, settings.seeds, 3, generator).to(device)
    starts = {
        "distinct eigenvalues": apart,
        "S = I": torch.eye(settings.dimension).to(apart).expand_as(apart),
    }
    curves: dict[Case, dict[str, Curve]] = {}
    arrivals: dict[Case, dict[str, Tensor]] = {}
    jobs = [
        (task, start, name) for start in starts for task in tasks for name in schemes(starts[start])
    ]
    for task, start, name in track(jobs, "Descending"):
        scheme = schemes(starts[start])[name]
        curve, arrival = descend(scheme, tasks[task], settings, seed + 1)
        curves.setdefault((task, start), {})[name] = curve
        arrivals.setdefault((task, start), {})[name] = arrival
    panels = [
        Panel(f"{task}, start: {start}", "iteration", "ℓ(S) − ℓ(S*)", drawn)
        for (task, start), drawn in curves.items()
    ]
    verdicts = [
        _verdict(name, case, arrived)
        for name in ("paper", "ours")
        for case, arrived in arrivals.items()
    ]
    return Result(panels, verdicts, [_table(arrivals, settings)])


def _verdict(name: str, case: Case, arrivals: Mapping[str, Tensor]) -> Verdict:
    baseline = sum(median(arrivals[rival]) for rival in BASELINES) / len(BASELINES)
    task, start = case
    quantity = (
        f"{task}, start: {start}: iterations to the target, divided by the mean of both "
        "baselines', medians"
    )
    claim = (
        "It performs as well as retraction-based and Cholesky-based Riemannian gradient descent."
    )
    return Verdict(claim, name, quantity, median(arrivals[name]) / baseline, limit=1.15)


def _table(arrivals: Mapping[Case, Mapping[str, Tensor]], settings: Settings) -> Table:
    names = list(next(iter(arrivals.values())))
    rows = [
        [f"{task}, start: {start}", *(f"{median(arrived[name]):.0f}" for name in names)]
        for (task, start), arrived in arrivals.items()
    ]
    title = f"Median iterations until ℓ(S) − ℓ(S*) < {settings.target:g}"
    return Table(title, ["problem", *names], rows)
