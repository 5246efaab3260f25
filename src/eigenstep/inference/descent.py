"""Natural gradient steps until the evidence lower bound is as close to its maximum as was asked.

Estimates of gradient and curvature are noisy, so that each step is computed from two halves of its
points. Half the sum of the two natural gradients is the step; half their difference has the noise
of the step, and nothing else. Where there is more noise than signal in a step, the next one takes
twice as many points. Where successive steps point back at each other for another reason than noise,
they were too long, and the next one takes half the step size.

Half the squared length of a natural gradient is what a full step gains, in nats, where the
objective is quadratic. The search stops when neither steps nor their noise promise more than what
was asked for, twice in a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.checks import check_function, check_number, check_size
from ..core.matrices import SPD
from ..core.progress import bar
from ..core.result import RUNNING, Ending, Result
from .estimates import Estimate, combine
from .gaussian import (
    Gaussian,
    NotPositiveDefinite,
    Parameters,
    average,
    longest_step,
    tangent_vector,
)
from .models import NotFinite, Target

SHORTEST = 1e-10
"""A search for the step size gives up below this."""
SAFETY = 2.0
"""Where a posterior is not Gaussian, up to this many times more is left to gain than promised."""
ROUNDING = 1e-6
"""Without random points, a gap in nats up to this that no longer falls is put down to rounding."""


class Iterate(NamedTuple):
    """What is kept of each Gaussian on the way."""

    elbo: float
    """The evidence lower bound in nats, as estimated from the points of this step."""
    error: float
    """Its standard error."""
    gap: float
    """How many nats the bound is expected to be below its maximum; noise counts as a gap."""
    lr: float
    """The step size that led away from here."""
    points: int
    """How many points the step was computed from."""
    ngrad: int
    """Gradients computed so far."""
    nfev: int
    """Values without gradients computed so far."""


@dataclass(frozen=True, kw_only=True)
class FitResult(Result):
    """What came out, beside how it went (``eigenstep.core.result.Result``).

    The ``reason`` is "tol" (the gap is small enough), "rounding" (it cannot get smaller),
    "max_iter", "noise" (it needs more points than are allowed), "stuck" (no step helps),
    "nonfinite" or "callback". A Hessian counts as one gradient for each parameter, ``nfev`` values
    without a gradient. The ``history`` has an ``Iterate`` for each step.

    Attributes:
        posterior: the Gaussian, with ``sample``, ``log_prob``, ``covariance`` and ``std``.
        elbo: evidence lower bound in nats, from fresh random numbers.
        elbo_error: its standard error.
        log_evidence: with ``samples=0``, Laplace's estimate of the log evidence; otherwise the
            ``elbo``.
    """

    posterior: Gaussian
    elbo: float
    elbo_error: float
    log_evidence: float

    @property
    def mean(self) -> Parameters:
        """Mean of the posterior."""
        return self.posterior.mean

    @property
    def precision(self) -> SPD | dict[str, SPD]:
        """Inverse covariance of the posterior, in spectral form."""
        return self.posterior.precision


@dataclass(frozen=True)
class Problem:
    """What to fit a Gaussian to.

    Attributes:
        look: estimates what is known at a Gaussian, from this many lots of points.
        bound: the evidence lower bound of a Gaussian and its standard error.
        counts: what has been computed so far.
        points: how many points a lot has; 0 if nothing is random.
    """

    look: Callable[[Gaussian, int], Estimate]
    bound: Callable[[Gaussian], tuple[float, float]]
    counts: Target
    points: int


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How far to step, and when to stop; ``eigenstep.inference.fit_gaussian`` explains each."""

    max_points: int
    max_iter: int
    tol: float = 1e-3
    lr: float | Callable[[int], float] | None = None
    exact: bool = True
    callback: Callable[[FitResult], object] | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        """Raise unless all rules are possible."""
        if self.lr is not None and not callable(self.lr):
            check_number(self.lr, "lr", 0.0, 1.0)
        check_number(self.tol, "tol", 0.0)
        check_size(self.max_iter, "max_iter")
        if self.callback is not None:
            check_function(self.callback, "callback")


def descend(problem: Problem, q: Gaussian, rules: Rules) -> FitResult:
    """Take steps from ``q`` until the expected gap is at most ``rules.tol``."""
    descent = NaturalGradient(problem, q, rules)
    ending = None
    with bar(rules.max_iter) if rules.progress else nullcontext() as show:
        while ending is None:
            ending = descent.measure() or descent.judge()
            if show and descent.history:
                at = descent.history[-1]
                text = f"ELBO {at.elbo:.6g}, expected gap {at.gap:.2e}"
                show(len(descent.history) - 1, text)
            ending = ending or descent.advance()
    return descent.result(ending, problem.bound(descent.q))


class NaturalGradient:
    """The present Gaussian and what is known there; rules for step size and number of points.

    With a fixed ``lr``, each step takes one lot of points.
    """

    def __init__(self, problem: Problem, q: Gaussian, rules: Rules) -> None:
        """Look at the start."""
        self.problem = problem
        self.q = q
        self.rules = rules
        self.halves = 2 if rules.lr is None and problem.points else 1
        self.lots = 1
        try:
            self.parts = self._look_at(q)
        except NotFinite as error:
            raise ValueError(
                f"log_joint must be finite around the start: {error}. Start elsewhere or with a "
                "larger precision0, and transform bounded parameters to unbounded ones"
            ) from error
        self.estimate = combine(self.parts)
        self.longest_beta = 0.5 if problem.points else 1.0
        self.beta = self.longest_beta
        self.factor = 1.0
        self.direction = torch.zeros(())
        self.noisy = False
        self.left = [math.inf]
        self.history: list[Iterate] = []

    def measure(self) -> Ending | None:
        """Take down how much signal and noise there is, and choose the size of the step."""
        self.estimate = combine(self.parts)
        before = self.direction
        self.direction, longest = self._direction(self.estimate)
        gain = half_square(self.direction)
        if not math.isfinite(gain):
            message = "the natural gradient, or its curvature, is too large for the number format"
            return Ending("nonfinite", message)
        noise = 0.0
        if self.halves == 2:
            noise = half_square(self._direction(self.parts[0])[0] - self.direction)
        self.noisy = gain < 2 * noise  # the gain is that of signal and noise together
        if not self.noisy and (self.direction * before).sum() < 0:
            self.factor = 0.5
        self.beta = min(longest, self._wanted_step())
        self.left.append(max(gain, noise))
        self.history.append(
            Iterate(
                elbo=-self.estimate.value,
                error=self.estimate.error,
                # Chance may hide a gap once, but hardly ever twice in a row.
                gap=SAFETY * max(self.left[-2:]) if self.problem.points else gain,
                lr=self.beta,
                points=self.problem.points * self.halves * self.lots,
                ngrad=self.problem.counts.ngrad,
                nfev=self.problem.counts.nfev,
            )
        )
        return None

    def judge(self) -> Ending | None:
        """Tell whether the descent is over."""
        at = self.history[-1]
        gap = f"gap of {at.gap:.3g} nats"
        if at.gap <= self.rules.tol:
            return Ending("tol", f"the expected {gap} is at most tol", success=True)
        if at.points == 0 and self.left[-2] <= at.gap <= ROUNDING:
            return Ending("rounding", f"the {gap} is due to rounding", success=True)
        if len(self.history) > (limit := self.rules.max_iter):
            message = f"max_iter={limit} steps are done, the expected gap is {at.gap:.3g} nats"
            return Ending("max_iter", message)
        if self.noisy and 2 * at.points > (limit := self.rules.max_points):
            message = f"the {gap} is mostly noise, and more than {limit} points are not allowed"
            return Ending("noise", message)
        callback = self.rules.callback
        if callback is not None and callback(self.result(RUNNING, (at.elbo, at.error))) is True:
            return Ending("callback", "the callback asked to stop")
        return None

    def advance(self) -> Ending | None:
        """Take a step, or prepare for a shorter one."""
        self.lots *= 2 if self.noisy else 1
        trouble = ""
        try:
            new = step(self.q, self.estimate, self.beta, self.rules.exact)
            parts = self._look_at(new)
            if self.rules.lr is None and _is_worse(combine(parts), self.estimate):
                trouble = "the objective rises"
                new = self.q
                # What is known here may have been good luck.
                parts = self._look_at(new) if self.problem.points else self.parts
            self.q = new
            self.parts = parts
        except (NotFinite, NotPositiveDefinite) as error:
            trouble = str(error)
        if trouble and self.rules.lr is not None:
            return Ending("stuck", f"no step of size {self.beta:.3g} is possible: {trouble}")
        if trouble and self.beta < SHORTEST:
            return Ending("stuck", f"no step helps, however short: {trouble}")
        self.factor = 0.5 if trouble else 2.0
        return None

    def result(self, ending: Ending, bound: tuple[float, float]) -> FitResult:
        """Return what came out so far, given the evidence lower bound and its standard error."""
        return FitResult(
            **vars(ending),
            nit=max(len(self.history) - 1, 0),
            nfev=self.problem.counts.nfev,
            ngrad=self.problem.counts.ngrad,
            history=self.history,
            posterior=self.q,
            elbo=bound[0],
            elbo_error=bound[1],
            log_evidence=bound[0] if self.problem.points else -self.estimate.value,
        )

    def _look_at(self, q: Gaussian) -> list[Estimate]:
        return [self.problem.look(q, self.lots) for _ in range(self.halves)]

    def _direction(self, estimate: Estimate) -> tuple[Tensor, float]:
        return natural_gradient(self.q, estimate, self.rules.exact)

    def _wanted_step(self) -> float:
        lr = self.rules.lr
        if lr is None:
            return min(self.longest_beta, self.factor * self.beta)
        at = len(self.history)
        beta = lr(at) if callable(lr) else lr
        if isinstance(beta, (int, float)) and not 0 < beta <= 1:
            raise ValueError(f"lr must be above 0 and at most 1, got {beta} at step {at}")
        check_number(beta, f"lr({at})", 0.0, 1.0)
        return beta


def half_square(direction: Tensor) -> float:
    """Return half the squared length: what a full step along a natural gradient gains in nats."""
    return 0.5 * direction.square().sum().item()


def step(q: Gaussian, estimate: Estimate, lr: float, exact: bool = True) -> Gaussian:
    """Return the Gaussian after one natural gradient step."""
    means = {}
    precisions = {}
    for name, S in q.precisions.items():
        curvature = estimate.curvatures[name]
        precisions[name] = average(S, curvature, lr=lr, damping=estimate.damping, exact=exact)
        change = precisions[name].solve(estimate.gradients[name])
        means[name] = q.means[name] - lr * change.reshape(q.means[name].shape)
    return Gaussian(means, precisions)


def natural_gradient(q: Gaussian, estimate: Estimate, exact: bool = True) -> tuple[Tensor, float]:
    """Return the natural gradient in orthonormal coordinates, and the longest step that is safe."""
    parts = []
    longest = 1.0
    for name, S in q.precisions.items():
        tangent, low, high = tangent_vector(S, estimate.curvatures[name], estimate.damping)
        parts += [tangent, -S.matmul(estimate.gradients[name], -0.5).flatten()]
        longest = min(longest, longest_step(low, high, exact))
    return torch.cat(parts), longest


def _is_worse(after: Estimate, before: Estimate) -> bool:
    """Tell whether the objective rose by more than what noise and rounding explain."""
    rounding = 1e-12 * (1 + abs(before.objective))
    noise = 2 * math.hypot(before.error, after.error)
    return not after.objective - before.objective <= noise + rounding
