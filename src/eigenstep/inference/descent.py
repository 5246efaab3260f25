"""Natural gradient steps until the evidence lower bound is as close to its maximum as was asked
for.

Estimates of gradient and curvature are noisy, so that each step is computed from two halves of its
points. Half the sum of the two natural gradients is the step; half their difference has the noise
of the step, and nothing else. Where there is more noise than signal in a step, the next one takes
twice as many points. Where successive steps point back at each other for another reason than noise,
they were too long, and the next one takes half the step size.

Half the squared length of a natural gradient is what a full step gains, in nats, where the
objective is quadratic. The search stops when neither steps nor their noise promise more than what
was asked for, twice in a row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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

# What is known at a Gaussian, from this many lots of points
Estimator = Callable[[Gaussian, int], Estimate]
SHORTEST = 1e-10  # A search for the step size gives up below this
# Where a posterior is not Gaussian, up to this many times more is left to gain than where it is
SAFETY = 2.0
# Without random points, a gap in nats that is no larger and no longer falls is put down to rounding
ROUNDING = 1e-6


class Iterate(NamedTuple):
    """What is kept of each Gaussian on the way."""

    elbo: float  # the evidence lower bound in nats, as estimated from the points of this step
    error: float  # its standard error
    # how many nats the bound is expected to be below its maximum, with noise counted as a gap
    gap: float
    lr: float  # the step size that led away from here
    points: int  # how many points the step was computed from
    ngrad: int  # gradients computed so far
    nfev: int  # values without gradients computed so far


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
    """What to fit a Gaussian to."""

    look: Estimator
    # The evidence lower bound of a Gaussian and its standard error
    bound: Callable[[Gaussian], tuple[float, float]]
    counts: Target  # what has been computed so far
    points: int  # how many points a lot has; 0 if nothing is random


def descend(
    problem: Problem,
    q: Gaussian,
    *,
    max_points: int,
    max_iter: int,
    lr: float | Callable[[int], float] | None = None,
    tol: float = 1e-3,
    exact: bool = True,
    callback: Callable[[FitResult], object] | None = None,
    progress: bool = False,
) -> FitResult:
    """Take steps from ``q`` until the expected gap is at most ``tol``; with ``lr``, each takes one
    lot of points.
    """
    if lr is not None and not callable(lr):
        check_number(lr, "lr", 0.0, 1.0)
    check_number(tol, "tol", 0.0)
    check_size(max_iter, "max_iter")
    if callback is not None:
        check_function(callback, "callback")
    descent = Descent(problem, q, lr, exact)
    with bar(max_iter, progress) as show:
        while True:
            ending = descent.measure()
            if ending is None:
                last = descent.history[-1]
                show(len(descent.history) - 1, f"ELBO {last.elbo:.6g}, expected gap {last.gap:.2e}")
                ending = descent.judge(tol, max_iter, max_points)
            if ending is None and callback is not None:
                found = descent.result(RUNNING, descent.history[-1][:2])
                ending = (
                    Ending("callback", "the callback asked to stop")
                    if callback(found) is True
                    else None
                )
            ending = ending or descent.advance()
            if ending is not None:
                return descent.result(ending, problem.bound(descent.q))


class Descent:
    """The present Gaussian, what is known there, and the rules for step size and number
    of points.
    """

    def __init__(
        self, problem: Problem, q: Gaussian, lr: float | Callable[[int], float] | None, exact: bool
    ) -> None:
        """Look at the start."""
        self.problem, self.q, self.lr, self.exact = problem, q, lr, exact
        self.halves, self.lots = 2 if lr is None and problem.points else 1, 1
        try:
            self.parts = self._look_at(q)
        except NotFinite as error:
            raise ValueError(
                f"log_joint must be finite around the start: {error}. Start elsewhere or with a "
                "larger precision0, and "
                "transform bounded parameters to unbounded ones"
            ) from error
        self.found = combine(self.parts)
        self.longest_beta = 0.5 if problem.points else 1.0
        self.beta, self.factor = self.longest_beta, 1.0
        self.direction, self.noisy = torch.zeros(()), False
        self.left = [math.inf]
        self.history: list[Iterate] = []

    def measure(self) -> Ending | None:
        """Take down how much signal and noise there is, and choose the size of the step."""
        self.found, before = combine(self.parts), self.direction
        self.direction, longest = natural_gradient(self.q, self.found, self.exact)
        gain, noise = half_square(self.direction), 0.0
        if not math.isfinite(gain):
            return Ending(
                "nonfinite",
                "the natural gradient, or its curvature, is too large for the number format",
            )
        if self.halves == 2:
            noise = half_square(
                natural_gradient(self.q, self.parts[0], self.exact)[0] - self.direction
            )
        self.noisy = gain < 2 * noise  # The gain is that of signal and noise together.
        if not self.noisy and (self.direction * before).sum() < 0:
            self.factor = 0.5
        self.beta = min(longest, self._wanted_step())
        self.left.append(max(gain, noise))
        points, counts = self.problem.points, self.problem.counts
        # Chance may hide a gap once, but hardly ever twice in a row.
        gap = SAFETY * max(self.left[-2:]) if points else gain
        seen = -self.found.value, self.found.error, gap, self.beta, points * self.halves * self.lots
        self.history.append(Iterate(*seen, counts.ngrad, counts.nfev))
        return None

    def judge(self, tol: float, max_iter: int, max_points: int) -> Ending | None:
        """Tell whether the descent is over."""
        gap, points = self.history[-1].gap, self.history[-1].points
        if gap <= tol:
            return Ending("tol", f"the expected gap of {gap:.3g} nats is at most tol", success=True)
        if points == 0 and self.left[-2] <= gap <= ROUNDING:
            return Ending("rounding", f"the gap of {gap:.3g} nats is due to rounding", success=True)
        if len(self.history) > max_iter:
            return Ending(
                "max_iter",
                f"max_iter={max_iter} steps are done, the expected gap is {gap:.3g} nats",
            )
        if self.noisy and 2 * points > max_points:
            why = (
                f"the gap of {gap:.3g} nats is mostly noise, and more than {max_points} "
                "points are not allowed"
            )
            return Ending("noise", why)
        return None

    def advance(self) -> Ending | None:
        """Take a step, or prepare for a shorter one."""
        self.lots *= 2 if self.noisy else 1
        self.factor, trouble = 2.0, ""
        try:
            new = step(self.q, self.found, self.beta, self.exact)
            there = self._look_at(new)
            if self.lr is None and _is_worse(combine(there), self.found):
                trouble = "the objective rises"
                # What is known here may have been good luck.
                there, new = self._look_at(self.q) if self.problem.points else self.parts, self.q
            self.q, self.parts = new, there
        except (NotFinite, NotPositiveDefinite) as error:
            trouble = str(error)
        if trouble and self.lr is not None:
            return Ending("stuck", f"no step of size {self.beta:.3g} is possible: {trouble}")
        if trouble and self.beta < SHORTEST:
            return Ending("stuck", f"no step helps, however short: {trouble}")
        self.factor = 0.5 if trouble else self.factor
        return None

    def result(self, ending: Ending, bound: tuple[float, float]) -> FitResult:
        """Return what came out so far, given the evidence lower bound and its standard error."""
        counts: Any = {
            "nfev": self.problem.counts.nfev,
            "ngrad": self.problem.counts.ngrad,
            "history": self.history,
        }
        evidence = bound[0] if self.problem.points else -self.found.value
        found: Any = {
            "posterior": self.q,
            "elbo": bound[0],
            "elbo_error": bound[1],
            "log_evidence": evidence,
        }
        return FitResult(**vars(ending), nit=max(len(self.history) - 1, 0), **counts, **found)

    def _look_at(self, at: Gaussian) -> list[Estimate]:
        return [self.problem.look(at, self.lots) for _ in range(self.halves)]

    def _wanted_step(self) -> float:
        if self.lr is None:
            return min(self.longest_beta, self.factor * self.beta)
        at = len(self.history)
        beta = self.lr(at) if callable(self.lr) else self.lr
        if isinstance(beta, (int, float)) and not 0 < beta <= 1:
            raise ValueError(f"lr must be above 0 and at most 1, got {beta} at step {at}")
        check_number(beta, f"lr({at})", 0.0, 1.0)
        return beta


def half_square(direction: Tensor) -> float:
    """Return half the squared length: what a full step along a natural gradient gains in nats."""
    return 0.5 * direction.square().sum().item()


def step(q: Gaussian, found: Estimate, lr: float, exact: bool = True) -> Gaussian:
    """Return the Gaussian after one natural gradient step."""
    means, precisions = {}, {}
    for name, S in q.precisions.items():
        new = average(S, found.curvatures[name], lr=lr, damping=found.damping, exact=exact)
        precisions[name] = new
        means[name] = q.means[name] - lr * new.solve(found.gradients[name]).reshape(
            q.means[name].shape
        )
    return Gaussian(means, precisions)


def natural_gradient(q: Gaussian, found: Estimate, exact: bool = True) -> tuple[Tensor, float]:
    """Return the natural gradient in orthonormal coordinates, and the longest step that is safe."""
    parts, longest = [], 1.0
    for name, S in q.precisions.items():
        tangent, low, high = tangent_vector(S, found.curvatures[name], found.damping)
        parts += [tangent, -S.matmul(found.gradients[name], -0.5).flatten()]
        longest = min(longest, longest_step(low, high, exact))
    return torch.cat(parts), longest


def _is_worse(after: Estimate, before: Estimate) -> bool:
    """Tell whether the objective rose by more than what noise and rounding explain."""
    rounding = 1e-12 * (1 + abs(before.objective))
    return (
        not after.objective - before.objective
        <= 2 * math.hypot(before.error, after.error) + rounding
    )
