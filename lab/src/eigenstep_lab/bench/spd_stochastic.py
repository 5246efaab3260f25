"""The same problems seen through minibatches: how fast does each scheme come down to the noise?

Nearness: every iteration sees some of the x_i. Log-det: ``Q`` is the covariance of x_i, of which
every iteration sees the mean of a few, so the gradient is never exact and a fixed step size leads
to a floor of noise. The floor of reference is that of retraction RGD with the smallest step size; a
scheme has arrived when its gap, averaged over ten iterations, is at most twice that. All x_i agree
on the solution of nearness, so its noise dies out; there the goal is a gap of 1e-3.

Every scheme's settings are tuned on seeds of their own, for the fewest iterations to arrive, then
run on others.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Generator, Tensor

from eigenstep.core.step import symmetrize
from eigenstep.manifold import minimize_spd

from ..baselines import rgd
from ..problems.spd import MINIBATCHES, SAMPLES, Problem
from ..results import Verdict

MINIBATCH, WINDOW = 100, 10


CONDITION = 10.0
TARGET = 1e-3
"""The gap that counts as arrived on nearness, which has no floor."""


class _Arrived(Exception):
    """Every seed has arrived."""


class _Watch:
    """Draws the minibatches, takes down the gaps, averaged over the last ten, and stops when all
    have arrived.
    """

    def __init__(self, problem: Problem, seed: int, target: float) -> None:
        self.problem, self.draws, self.target = problem, Generator().manual_seed(seed), target
        self.latest: deque[Tensor] = deque(maxlen=WINDOW)
        self.gaps: list[Tensor] = []

    def _pick(self, S: Tensor) -> Tensor:
        """Take down the gap, and draw a fresh minibatch."""
        self.latest.append(self.problem.gap(S.detach()))
        self.gaps.append(torch.stack(list(self.latest)).mean(0))
        if torch.stack(self.gaps).amin(0).max() <= self.target:
            raise _Arrived
        return torch.randint(SAMPLES, (MINIBATCH,), generator=self.draws)

    def loss(self, S: Tensor) -> Tensor:
        """Return the sum of the losses of all seeds on a fresh minibatch."""
        total: Tensor = self.problem.value(S, self._pick(S)).sum()
        return total

    def gradient(self, S: Tensor) -> Tensor:
        """Return the gradient of the loss on a fresh minibatch."""
        gradient: Tensor = self.problem.gradient(S, self._pick(S))
        return gradient


Scheme = Callable[..., None]


def ours(
    watch: _Watch, start: Tensor, steps: int, lr: float, retraction: str, momentum: float = 0.0
) -> None:
    """Descend with our solver."""
    rate = lr * (1 - momentum)
    minimize_spd(
        watch.loss,
        start,
        lr=rate,
        momentum=momentum,
        retraction=retraction,
        max_iter=steps,
        gtol=0.0,
    )


def retraction_descent(watch: _Watch, S: Tensor, steps: int, lr: float) -> None:
    """Descend with the second-order retraction."""
    for _ in range(steps):
        S = rgd.retraction_step(S, watch.gradient(S), lr)
    watch.loss(S)


def cholesky_descent(watch: _Watch, start: Tensor, steps: int, lr: float) -> None:
    """Descend in a Cholesky factor."""
    C = torch.linalg.cholesky(start)
    for _ in range(steps):
        C = rgd.cholesky_step(C, watch.gradient(symmetrize(C @ C.mT)), lr)
    watch.loss(symmetrize(C @ C.mT))


SCHEMES: Mapping[str, tuple[Scheme, Mapping[str, tuple[float, ...]]]] = {
    "ours, geodesic": (partial(ours, retraction="geodesic"), {}),
    "ours, spectral": (partial(ours, retraction="spectral"), {}),
    "ours, geodesic with momentum": (
        partial(ours, retraction="geodesic"),
        {"momentum": (0.5, 0.8)},
    ),
    "retraction RGD": (retraction_descent, {}),
    "Cholesky RGD": (cholesky_descent, {}),
}
"""Each scheme, and what is tuned beside its step size."""
BASELINES = ("retraction RGD", "Cholesky RGD")
RATES = {
    "log-det": (0.02, 0.024, 0.028, 0.034, 0.04),
    "nearness": (0.006, 0.0085, 0.012, 0.017, 0.024, 0.034, 0.048, 0.068),
}
"""Step sizes that are tried for every scheme."""
TUNING_SEED, FINAL_SEED = 10_000, 20_000


def descend(
    scheme: Scheme, problem: Problem, seed: int, steps: int, target: float, **settings: float
) -> Tensor:
    """Return the gaps, averaged over ten iterations, until all seeds have arrived: shape
    (iterations, seeds).
    """
    watch = _Watch(problem, seed, target)
    start = torch.eye(problem.size, dtype=torch.float64).expand_as(problem.Q).contiguous()
    # Errors come from step sizes that are too large: numbers that are not finite any more.
    with contextlib.suppress(_Arrived, ValueError, RuntimeError, FloatingPointError):
        scheme(watch, start, steps, **settings)
    return torch.stack(watch.gaps).nan_to_num(math.inf)


def arrivals(gaps: Tensor, target: float) -> list[float]:
    """Return after how many iterations each seed has arrived, infinite if never."""
    there = gaps <= target
    first = torch.where(there.any(0), there.double().argmax(0).double(), math.inf)
    return [float(value) for value in first]


def measure(name: str, size: int, seeds: int, steps: int) -> dict[str, Any]:
    """Tune every scheme on a problem, and return the figures of its best settings."""
    make = MINIBATCHES[name]
    tuning = make(size, CONDITION, TUNING_SEED, (6,))
    target = _target(name, tuning, steps)
    problem = make(size, CONDITION, FINAL_SEED, (seeds,))
    schemes = {}
    for scheme, (descent, extra) in SCHEMES.items():
        tried = []
        for values in product(RATES[name], *extra.values()):
            settings = dict(zip(("lr", *extra), values, strict=True))
            gaps = descend(descent, tuning, TUNING_SEED, steps, target, **settings)
            score = statistics.mean(arrivals(gaps, target)), gaps[-1].mean().item()
            tried.append((score, settings))
        settings = min(tried, key=lambda entry: entry[0])[1]
        gaps = descend(descent, problem, FINAL_SEED, steps, target, **settings)
        schemes[scheme] = {
            "settings": settings,
            "arrivals": arrivals(gaps, target),
            "curve": [gap.median().item() for gap in gaps],
        }
    return {"target": target, "schemes": schemes}


def _target(name: str, problem: Problem, steps: int) -> float:
    """Return the gap that counts as arrived."""
    if name != "log-det":
        return TARGET
    gaps = descend(retraction_descent, problem, TUNING_SEED, steps, 0.0, lr=min(RATES[name]))
    return 2 * gaps[-steps // 4 :].mean().item()


def verdicts(result: Mapping[str, Any]) -> Iterator[Verdict]:
    """Compare each of our tuned schemes with the faster of the tuned baselines, by medians over
    seeds.
    """
    claim = "minibatches: no more iterations than the better tuned baseline"
    for name, found in result.items():
        medians = {
            scheme: statistics.median(run["arrivals"]) for scheme, run in found["schemes"].items()
        }
        baseline = min(medians[scheme] for scheme in BASELINES)
        for scheme, median in medians.items():
            if scheme not in BASELINES:
                value = median if math.isfinite(median) else math.nan
                yield Verdict(claim, scheme, f"{name}: median iterations", value, baseline)
