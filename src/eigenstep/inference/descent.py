"""Natural gradient steps until the evidence lower bound is as close to its maximum as was asked for.

Estimates of gradient and curvature are noisy, so that each step is computed from two halves of its points. Half the
sum of the two natural gradients is the step; half their difference has the noise of the step, and nothing else. Where
there is more noise than signal in a step, the next one takes twice as many points. Where successive steps point back
at each other for another reason than noise, they were too long, and the next one takes half the step size.

Half the squared length of a natural gradient is what a full step gains, in nats, where the objective is quadratic. The
search stops when neither steps nor their noise promise more than what was asked for, twice in a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.checks import check_function, check_number, check_size
from ..core.matrices import SPD
from ..core.progress import bar
from .estimates import Estimate, combine
from .gaussian import Gaussian, Parameters
from .steps import NotPositiveDefinite, average, longest_step, tangent_vector
from .target import NotFinite, Target

Estimator = Callable[[Gaussian, int], Estimate]
"""Estimates gradient and curvature at a Gaussian from this many lots of points."""
SHORTEST = 1e-10
"""A search for the step size gives up below this."""
SAFETY = 2.0
"""Where a posterior is not Gaussian, up to this many times more is left to gain than where it is."""
ROUNDING = 1e-6
"""Without random points, a gap in nats that is no larger and no longer falls is put down to rounding."""


class Iterate(NamedTuple):
    """What is kept of each Gaussian on the way.

    Attributes:
        elbo: the evidence lower bound in nats, as estimated from the points of this step.
        error: its standard error.
        gap: how many nats the bound is expected to be below its maximum, with noise counted as a gap.
        lr: the step size that led away from here.
        points: how many points the step was computed from.
        ngrad: gradients computed so far.
        nfev: values without gradients computed so far.
    """

    elbo: float
    error: float
    gap: float
    lr: float
    points: int
    ngrad: int
    nfev: int


@dataclass(frozen=True)
class Result:
    """What came out.

    Attributes:
        posterior: the Gaussian, with ``sample``, ``log_prob``, ``covariance`` and ``std``.
        elbo: evidence lower bound in nats, from fresh random numbers.
        elbo_error: its standard error.
        log_evidence: with ``samples=0``, Laplace's estimate of the log evidence; otherwise the ``elbo``.
        ngrad: how many gradients were computed; a Hessian counts as one for each parameter.
        nfev: how many values were computed without a gradient.
        nit: number of steps.
        message: why the search ended.
        success: whether the gap reached ``tol``.
        history: what is known of each step.
    """

    posterior: Gaussian
    elbo: float
    elbo_error: float
    log_evidence: float
    ngrad: int
    nfev: int
    nit: int
    message: str
    success: bool
    history: list[Iterate] = field(repr=False)

    @property
    def mean(self) -> Parameters:
        """Mean of the posterior."""
        return self.posterior.mean

    @property
    def precision(self) -> SPD | dict[str, SPD]:
        """Inverse covariance of the posterior, in spectral form."""
        return self.posterior.precision


def descend(
    look: Estimator,
    counts: Target,
    q: Gaussian,
    *,
    points: int,
    max_points: int,
    lr: float | Callable[[int], float] | None,
    tol: float,
    max_iter: int,
    exact: bool,
    final: Callable[[Gaussian], tuple[float, float]],
    callback: Callable[[Result], object] | None,
    progress: bool,
) -> Result:
    """Take steps from ``q`` until the expected gap is at most ``tol``.

    Args:
        look: estimates gradient and curvature at a Gaussian.
        counts: what has been computed so far.
        q: where to start.
        points: how many points a lot has; 0 if nothing is random.
        max_points: the most points of a step.
        lr: the step size, ``None`` for the automatic one; with a step size of the user, each step takes one lot.
        tol: the gap in nats at which to stop.
        max_iter: the number of steps at which to stop.
        exact: kind of the average.
        final: returns the bound and its standard error for the last Gaussian.
        callback: called with the result so far.
        progress: whether to show a bar.
    """
    _check_options(lr, tol, max_iter, callback)
    automatic = lr is None
    halves, lots = 2 if automatic and points else 1, 1

    def look_at(at: Gaussian) -> list[Estimate]:
        return [look(at, lots) for _ in range(halves)]

    try:
        parts = look_at(q)
    except NotFinite as error:
        raise ValueError(
            f"log_joint must be finite around the start: {error}. Start elsewhere or with a larger precision0, and "
            "transform bounded parameters to unbounded ones"
        ) from error
    longest_beta = 0.5 if points else 1.0
    beta, factor = longest_beta, 1.0
    history: list[Iterate] = []
    left = [math.inf]
    direction, message, success = torch.zeros(()), "", False

    def result(bound: float, error: float) -> Result:
        evidence = bound if points else -found.value
        totals = counts.ngrad, counts.nfev, len(history) - 1
        return Result(q, bound, error, evidence, *totals, message or "still running", success, history)

    with bar(max_iter, progress) as show:
        while not message:
            found = combine(parts)
            before = direction
            direction, longest = natural_gradient(q, found, exact)
            gain = half_square(direction)
            if not math.isfinite(gain):
                message = "the natural gradient is not finite: the curvature is too large for the number format"
                break
            noise = half_square(natural_gradient(q, parts[0], exact)[0] - direction) if halves == 2 else 0.0
            noisy = gain < 2 * noise  # The gain is that of signal and noise together.
            if not noisy and (direction * before).sum() < 0:
                factor = 0.5
            beta = min(longest, min(longest_beta, factor * beta) if lr is None else _chosen(lr, len(history)))
            if not 0 < beta <= 1:
                raise ValueError(f"lr must be above 0 and at most 1, got {beta} at step {len(history)}")
            left.append(max(gain, noise))
            # Chance may hide a gap once, but hardly ever twice in a row.
            gap = SAFETY * max(left[-2:]) if points else gain
            total = points * halves * lots
            history.append(Iterate(-found.value, found.error, gap, beta, total, counts.ngrad, counts.nfev))
            show(len(history) - 1, f"ELBO {-found.value:.6g}, expected gap {gap:.2e}")
            if gap <= tol:
                message, success = f"the expected gap of {gap:.3g} nats is at most tol", True
            elif points == 0 and left[-2] <= gain <= ROUNDING:
                message, success = f"the gap of {gap:.3g} nats is due to rounding", True
            elif len(history) > max_iter:
                message = f"max_iter={max_iter} steps are done, the expected gap is {gap:.3g} nats"
            elif noisy and 2 * total > max_points:
                message = (
                    f"the gap of {gap:.3g} nats is mostly noise, and more than {max_points} points are not allowed"
                )
            elif callback is not None and callback(result(-found.value, found.error)) is True:
                message = "the callback asked to stop"
            else:
                lots *= 2 if noisy else 1
                factor, reason = 2.0, ""
                try:
                    new = step(q, found, beta, exact)
                    there = look_at(new)
                    if automatic and not _acceptable(found, combine(there)):
                        reason = "the objective rises"
                        # What is known here may have been good luck.
                        there, new = look_at(q) if points else parts, q
                    q, parts = new, there
                except (NotFinite, NotPositiveDefinite) as error:
                    reason = str(error)
                if reason and not automatic:
                    message = f"no step of size {beta:.3g} is possible: {reason}"
                elif reason and beta < SHORTEST:
                    message = f"no step helps, however short: {reason}"
                elif reason:
                    factor = 0.5
    return result(*final(q))


def half_square(direction: Tensor) -> float:
    """Return half the squared length: what a full step along a natural gradient gains in nats."""
    return 0.5 * direction.square().sum().item()


def step(q: Gaussian, found: Estimate, lr: float, exact: bool = True) -> Gaussian:
    """Return the Gaussian after one natural gradient step.

    Args:
        q: the Gaussian before.
        found: gradient and curvature there.
        lr: the paper's beta.
        exact: whether precision matrices are averaged exactly or to first order.
    """
    means, precisions = {}, {}
    for name, S in q.precisions.items():
        new = average(S, found.curvatures[name], lr=lr, damping=found.damping, exact=exact)
        precisions[name] = new
        means[name] = q.means[name] - lr * new.solve(found.gradients[name]).reshape(q.means[name].shape)
    return Gaussian(means, precisions)


def natural_gradient(q: Gaussian, found: Estimate, exact: bool = True) -> tuple[Tensor, float]:
    """Return the natural gradient in orthonormal coordinates, and the longest step that is safe.

    Half its squared length is what a full step is expected to gain, in nats.
    """
    parts, longest = [], 1.0
    for name, S in q.precisions.items():
        tangent, low, high = tangent_vector(S, found.curvatures[name], found.damping)
        parts += [tangent, -S.matmul(found.gradients[name], -0.5).flatten()]
        longest = min(longest, longest_step(low, high, exact))
    return torch.cat(parts), longest


def _acceptable(before: Estimate, after: Estimate) -> bool:
    """Tell whether the objective fell, or rose by no more than what noise and rounding explain."""
    rounding = 1e-12 * (1 + abs(before.objective))
    return after.objective - before.objective <= 2 * math.hypot(before.error, after.error) + rounding


def _chosen(lr: float | Callable[[int], float], at: int) -> float:
    return lr(at) if callable(lr) else lr


def _check_options(lr: object, tol: float, max_iter: int, callback: object) -> None:
    if lr is not None and not callable(lr):
        check_number(lr, "lr", 0.0, 1.0)
    check_number(tol, "tol", 0.0)
    check_size(max_iter, "max_iter")
    if callback is not None:
        check_function(callback, "callback")
