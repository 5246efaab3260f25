"""Fit a Gaussian to a posterior by natural gradients: Eq. 4 to 6 of the paper with gamma = 1.

With ``l = -log_joint``, one step is::

    S    <- (1 - beta) S + beta E_q[Hessian of l]       the one spectral update
    mean <- mean - beta S^-1 E_q[gradient of l]

At the mean alone (``samples=0``) and with ``beta = 1`` this is Newton's method, and its end Laplace's approximation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_function, check_number, check_size
from ..spd import SPD
from .estimates import FROM_MODEL, SOURCES, Estimate, NotFinite, Target, check_samples, elbo_of, estimate
from .gaussian import Gaussian, Parameters
from .steps import NotPositiveDefinite, average, longest_step, tangent_vector

Estimator = Callable[[Gaussian], Estimate]
SHORTEST = 1e-10
"""A search for the step size gives up below this."""
SAFETY = 3.0
"""What remains of the noise is random, too: it is rarely this many times larger than expected."""
WINDOW = 20
"""The gap is estimated from this many steps."""
ROUNDING = 1e-6
"""Without random points, a gap in nats that is no larger and no longer falls is put down to rounding."""


class Iterate(NamedTuple):
    """What is kept of each Gaussian on the way.

    Attributes:
        elbo: the evidence lower bound in nats, as estimated from the points of this step.
        error: its standard error.
        gap: how many nats the bound is expected to be below its maximum.
        lr: the step size that led away from here.
        ngrad: gradients computed so far.
        nfev: values without gradients computed so far.
    """

    elbo: float
    error: float
    gap: float
    lr: float
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


def fit_gaussian(
    log_joint: Callable[[Any], Tensor],
    mean0: Parameters,
    precision0: object = "full",
    *,
    curvature: str | Callable[[Any], Any] = "hessian",
    samples: int | None = None,
    lr: float | Callable[[int], float] | None = None,
    tol: float | None = None,
    max_iter: int = 1000,
    exact: bool = True,
    seed: int = 0,
    elbo_samples: int = 1000,
    vectorize: bool = True,
    callback: Callable[[Result], object] | None = None,
    progress: bool = False,
) -> Result:
    """Fit a Gaussian to the posterior of a model: maximize the evidence lower bound.

    Args:
        log_joint: log density of data and parameters, up to a constant, as a function of the parameters: a tensor, or a
            dictionary of them, like ``mean0``. It must be finite everywhere, so transform bounded parameters. It may
            be random, such as :meth:`Supervised.minibatches <eigenstep.inference.models.Supervised.minibatches>`: if
            it has a method ``draw``, what that returns is used for one step. Then pass ``lr``.
        mean0: where to start, a tensor of any shape or a dictionary; its number format is used throughout (float64 is
            best).
        precision0: "full", "diagonal" or "kronecker" for an inverse covariance of this structure that starts at the
            identity, a positive number for a multiple of it (full), a matrix (``Full``, ``Diagonal``,
            ``Kronecker``), or a dictionary of these. Start with the precision of the prior or larger: the first points
            are drawn from it.
        curvature: where the Hessian comes from:

            - "hessian": automatic differentiation;
            - "gauss-newton": without the second derivative of the model; ``log_joint`` must be
              :class:`~eigenstep.inference.models.Supervised` or have a method ``gauss_newton``;
            - "reparametrization": from gradients at random points; needs many of them, but no second derivative;
            - "reinforce": from values at random points, without any derivative;
            - "gradient-outer-product": ``E_q[g g^T]``, biased unless the posterior is Gaussian;
            - "empirical-fisher": sum over examples of their gradients' outer products, biased as well;
            - a function of the parameters that returns ``Dense`` or ``OuterProducts``.
        samples: how many points are drawn from the Gaussian at each step, an even number; 0 evaluates all at the mean
            instead (the paper's delta approximation), which gives Laplace's approximation. Default: 16 for
            "hessian" and the like, for each parameter 4 for "reparametrization", 16 for "gradient-outer-product" and 64
            for "reinforce".
        lr: the paper's beta: a number for all steps or a function of the number of the step. By default it starts at 1
            for ``samples=0`` and at 1/2 otherwise, falls like 1/t from the moment when noise dominates, and is halved
            after steps that clearly made the objective worse.
        tol: stop when the bound is expected to be within this many nats of its maximum. Default: 1e-3, and what
            rounding allows for ``samples=0``.
        max_iter: stop after this many steps.
        exact: average precision matrices exactly, or to first order in ``lr``, as the paper does.
        seed: of all random numbers.
        elbo_samples: how many points the ``elbo`` of the result is estimated from.
        vectorize: whether ``torch.func.vmap`` may evaluate ``log_joint`` at all points at once.
        callback: called with the result so far at each step; the search stops if it returns ``True``.
        progress: show a progress bar; needs the package ``rich``.

    Returns:
        The posterior and how the search went; see :class:`Result`.
    """
    check_function(log_joint, "log_joint")
    q = Gaussian.start(mean0, precision0)
    _check_source(curvature, log_joint)
    if samples is None:
        samples = {"reparametrization": 4, "gradient-outer-product": 16, "reinforce": 64}.get(
            str(curvature), 0
        ) * q.size
        samples = samples or 16
    check_samples(samples, {"reinforce": 4, "reparametrization": 2}.get(str(curvature), 0))
    check_samples(elbo_samples, 4)
    target = Target(log_joint, vectorize)
    generator = torch.Generator(q.device).manual_seed(seed)

    def look(at: Gaussian) -> Estimate:
        return estimate(target, at, curvature, samples, generator)

    tol = (1e-3 if samples else 1e-20) if tol is None else tol
    return search(
        look,
        target,
        q,
        lr=lr,
        start=0.5 if samples else 1.0,
        tol=tol,
        max_iter=max_iter,
        exact=exact,
        final=lambda at: elbo_of(target, at, elbo_samples, seed + 1),
        callback=callback,
        progress=progress,
    )


def laplace(
    log_joint: Callable[[Any], Tensor], mean0: Parameters, precision0: object = "full", **options: Any
) -> Result:
    """Return Laplace's approximation: Newton's method, and the inverse Hessian at its end as the covariance.

    This is :func:`fit_gaussian` with ``samples=0``, whose other options it takes.

    Args:
        log_joint: log density of data and parameters.
        mean0: where Newton's method starts.
        precision0: structure of the result, or a first guess of it.
        options: as for :func:`fit_gaussian`.
    """
    return fit_gaussian(log_joint, mean0, precision0, samples=0, **options)


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


def expected_gap(directions: Sequence[Tensor], beta: float) -> float:
    """Return how many nats the bound may be below its maximum, given the last natural gradients.

    Where they are noise, steps average the last ``1 / beta`` of them, which divides their square by as many. What they
    have in common is no noise, and still to be gained; the mean of ``n`` squares less the square of their mean tells
    the two apart.

    Args:
        directions: natural gradients, the last one last.
        beta: the present step size.
    """
    stacked = torch.stack(list(directions))
    squares, count = 0.5 * stacked.square().sum(1), len(stacked)
    if count == 1:
        return squares.item()
    common = (count * 0.5 * stacked.mean(0).square().sum() - squares.mean()) / (count - 1)
    return max(SAFETY * beta * squares.median().item(), common.item())


class StepSize:
    """The default step size: ``1 / (1 / start + flips)``, with a search where a step made things worse.

    Successive steps point back at each other once noise dominates; counting that (Kesten, 1958) makes the step size
    fall like 1/t from then on, which averages the noise away, and leaves it alone before.
    """

    def __init__(self, start: float) -> None:
        """Begin with the step size ``start``."""
        self.start, self.flips, self.limit = start, 0, 1.0
        self._before: Tensor | None = None

    def see(self, direction: Tensor) -> None:
        """Count whether the direction points back."""
        if self._before is not None and direction @ self._before < 0:
            self.flips += 1
        self._before = direction

    def __call__(self, _: int) -> float:
        """Return the present step size."""
        return min(self.limit, 1 / (1 / self.start + self.flips))


def search(
    look: Estimator,
    counts: Target,
    q: Gaussian,
    *,
    lr: float | Callable[[int], float] | None,
    start: float,
    tol: float,
    max_iter: int,
    exact: bool,
    final: Callable[[Gaussian], tuple[float, float]],
    callback: Callable[[Result], object] | None,
    progress: bool,
) -> Result:
    """Take steps from ``q`` until the expected gap is at most ``tol``; for what is not here, see :func:`fit_gaussian`.

    Args:
        look: estimates gradient and curvature at a Gaussian.
        counts: what has been computed so far.
        q: where to start.
        lr: the step size, ``None`` for the automatic one.
        start: the first automatic step size.
        tol: the gap in nats at which to stop.
        max_iter: the number of steps at which to stop.
        exact: kind of the average.
        final: returns the bound and its standard error for the last Gaussian.
        callback: called with the result so far.
        progress: whether to show a bar.
    """
    _check_options(lr, tol, max_iter, callback)
    automatic = StepSize(start)
    size = automatic if lr is None else lr if callable(lr) else lambda _: lr
    try:
        found = look(q)
    except NotFinite as error:
        raise ValueError(
            f"log_joint must be finite around the start: {error}. Start elsewhere or with a larger precision0, and "
            "transform bounded parameters to unbounded ones"
        ) from error
    history: list[Iterate] = []
    recent: deque[Tensor] = deque(maxlen=WINDOW)
    decrement, message, success = math.inf, "", False

    def result(bound: float, error: float) -> Result:
        evidence = -found.value if found.error == 0 else bound
        totals = counts.ngrad, counts.nfev, len(history) - 1
        return Result(q, bound, error, evidence, *totals, message or "still running", success, history)

    with _bar(max_iter, progress) as show:
        while not message:
            direction, longest = natural_gradient(q, found, exact)
            if not torch.isfinite(direction).all():
                message = "the natural gradient is not finite: the curvature is too large for the number format"
                break
            automatic.see(direction)
            beta = min(size(len(history)), longest)
            if not 0 < beta <= 1:
                raise ValueError(f"lr must be above 0 and at most 1, got {beta} at step {len(history)}")
            before, decrement = decrement, 0.5 * direction.square().sum().item()
            recent.append(direction)
            gap = expected_gap(list(recent), beta) if found.error else decrement
            history.append(Iterate(-found.value, found.error, gap, beta, counts.ngrad, counts.nfev))
            show(history)
            if gap <= tol:
                message, success = f"the expected gap of {gap:.3g} nats is at most tol", True
            elif found.error == 0 and before <= decrement <= ROUNDING:
                message, success = f"the gap of {gap:.3g} nats is due to rounding", True
            elif len(history) > max_iter:
                message = f"max_iter={max_iter} steps are done, the expected gap is {gap:.3g} nats"
            elif callback is not None and callback(result(-found.value, found.error)) is True:
                message = "the callback asked to stop"
            else:
                q, found, message = _advance(look, q, found, beta, exact, automatic if lr is None else None)
    return result(*final(q))


def _advance(
    look: Estimator, q: Gaussian, found: Estimate, beta: float, exact: bool, automatic: StepSize | None
) -> tuple[Gaussian, Estimate, str]:
    """Take a step; with an automatic step size, a shorter one as long as it makes things worse beyond doubt."""
    while beta > SHORTEST:
        try:
            new = step(q, found, beta, exact)
            there = look(new)
        except (NotFinite, NotPositiveDefinite) as error:
            if automatic is None:
                return q, found, f"no step of size {beta:.3g} is possible: {error}"
            reason = str(error)
        else:
            if automatic is None or _acceptable(found, there):
                if automatic is not None:
                    automatic.limit = min(1.0, 2 * beta)
                return new, there, ""
            reason = f"the objective rises from {found.objective:.9g} to {there.objective:.9g}"
        beta /= 2
    return q, found, f"no step helps, however short: {reason}"


def _acceptable(before: Estimate, after: Estimate) -> bool:
    """Tell whether the objective fell, or rose by no more than what noise and rounding explain."""
    rounding = 1e-12 * (1 + abs(before.objective))
    return after.objective - before.objective <= 4 * (before.error + after.error) + rounding


def _check_source(curvature: object, log_joint: object) -> None:
    if callable(curvature):
        return
    if curvature not in SOURCES:
        raise ValueError(f"curvature must be one of {', '.join(SOURCES)} or a function, got {curvature!r}")
    method = FROM_MODEL.get(str(curvature))
    if method and not hasattr(log_joint, method):
        raise TypeError(
            f'curvature="{curvature}" needs a log_joint that knows its model, such as '
            f"eigenstep.inference.Supervised, with a method {method}"
        )


def _check_options(lr: object, tol: float, max_iter: int, callback: object) -> None:
    if lr is not None and not callable(lr):
        check_number(lr, "lr", 0.0, 1.0)
    check_number(tol, "tol", 0.0)
    check_size(max_iter, "max_iter")
    if callback is not None:
        check_function(callback, "callback")


class _Bar:
    """A progress bar that shows the bound and the gap."""

    def __init__(self, max_iter: int) -> None:
        from ..experiments.console import progress

        self._progress = progress()
        self._task = self._progress.add_task("starting", total=max_iter)

    def __enter__(self) -> Callable[[list[Iterate]], None]:
        self._progress.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _show(self, history: list[Iterate]) -> None:
        text = f"ELBO {history[-1].elbo:.6g}, expected gap {history[-1].gap:.2e}"
        self._progress.update(self._task, completed=len(history) - 1, description=text)


def _bar(max_iter: int, wanted: bool) -> Any:
    return _Bar(max_iter) if wanted else nullcontext(lambda _: None)
