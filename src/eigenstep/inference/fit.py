"""Fit a Gaussian to a posterior by natural gradients: Eq. 4 to 6 of the paper with gamma = 1.

With ``l = -log_joint``, one step is::

    S    <- (1 - beta) S + beta E_q[Hessian of l]       the one spectral update
    mean <- mean - beta S^-1 E_q[gradient of l]

At the mean alone (``samples=0``) and with ``beta = 1`` this is Newton's method, and its end
Laplace's approximation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_function, check_size, choose
from .descent import FitResult, Problem, Rules, descend
from .estimates import FROM_MODEL, SOURCES, Estimate, check_samples, combine, elbo_of, estimate
from .gaussian import Gaussian, Parameters
from .models import Target

POINTS = {"reparametrization": 2, "gradient-outer-product": 8, "reinforce": 32}
"""By default this many points for each parameter."""
LEAST = {"reparametrization": 2, "reinforce": 4}
"""The fewest points that curvature can be estimated from."""
AT_ONCE = 64
"""At most this many points are evaluated together, or ``samples`` if that is more."""


def fit_gaussian(  # noqa: PLR0913
    log_joint: Callable[[Any], Tensor],
    mean0: Parameters,
    precision0: object = "full",
    *,
    curvature: str | Callable[[Any], Any] = "hessian",
    samples: int | None = None,
    max_samples: int = 100_000,
    lr: float | Callable[[int], float] | None = None,
    tol: float | None = None,
    max_iter: int = 1000,
    exact: bool = True,
    seed: int = 0,
    elbo_samples: int = 1000,
    vectorize: bool = True,
    callback: Callable[[FitResult], object] | None = None,
    progress: bool = False,
) -> FitResult:
    """Fit a Gaussian to the posterior of a model: maximize the evidence lower bound.

    Args:
        log_joint: log density of data and parameters, up to a constant, as a function of the
            parameters: a tensor, or a dictionary of them, like ``mean0``. It must be finite
            everywhere, so transform bounded parameters. It may be random, as with minibatches (pass
            ``lr``): what its method ``draw``, if any, returns is used for one step.
        mean0: where to start, a tensor of any shape or a dictionary; its number format is used
            (float64 is best).
        precision0: "full", "diagonal" or "kronecker" for an inverse covariance of this structure
            that starts at the identity, a positive number for a multiple of it (full), a matrix
            (``Full``, ``Diagonal``, ``Kronecker``), or a dictionary of these. At least the
            precision of the prior: the first points are drawn from it.
        curvature: where the Hessian comes from:

            - "hessian": automatic differentiation;
            - "gauss-newton": without second derivatives; ``log_joint`` must be ``Supervised``, or
              have such a method;
            - "reparametrization": from gradients at random points; needs many of them, but no
              second derivative;
            - "reinforce": from values at random points, without any derivative;
            - "gradient-outer-product": ``E_q[g g^T]``, biased unless the posterior is Gaussian;
            - "empirical-fisher": sum over examples of their gradients' outer products, biased as
              well;
            - a function of the parameters that returns ``Dense`` or ``OuterProducts``.
        samples: how many points are drawn from the Gaussian, an even number; 0 evaluates all at the
            mean instead (the paper's delta approximation), which gives Laplace's approximation. The
            first step takes twice as many, and the number doubles whenever noise outweighs what is
            left to learn. Default: 8 for "hessian" and the like, for each parameter 2 for
            "reparametrization", 8 for "gradient-outer-product" and 32 for "reinforce".
        max_samples: the most points of a step; a fit that would need more ends there without
            success.
        lr: the paper's beta-2, as everywhere, and the step size of the mean as well: a number or a
            function of the number of the step, which then takes ``samples`` points. By default it
            is 1 for ``samples=0`` and 1/2 otherwise, and less where steps overshoot.
        tol: stop when the bound is expected to be within this many nats of its maximum, with noise
            counted as a gap. Default: 1e-3, and what rounding allows for ``samples=0``.
        max_iter: stop after this many steps.
        exact: average precision matrices exactly, or to first order in ``lr``, as the paper does.
        seed: of all random numbers.
        elbo_samples: how many points the ``elbo`` of the result is estimated from.
        vectorize: whether ``torch.func.vmap`` may evaluate ``log_joint`` at all points at once.
        callback: called with the result so far at each step; the search stops if it returns
            ``True``.
        progress: show a progress bar; needs the package ``rich``.

    Returns:
        The posterior and how the search went; see ``FitResult``.
    """
    check_function(log_joint, "log_joint")
    q = Gaussian.start(mean0, precision0)
    choose(curvature, SOURCES, "curvature")
    method = FROM_MODEL.get(str(curvature))
    if method and not hasattr(log_joint, method):
        raise TypeError(
            f'curvature="{curvature}" needs a log_joint that knows its model, such as '
            f"eigenstep.inference.Supervised, with a method {method}"
        )
    if samples is None:
        samples = max(POINTS.get(str(curvature), 0) * q.size, 8)
    check_samples(samples, LEAST.get(str(curvature), 0))
    check_samples(elbo_samples, 4)
    check_size(max_samples, "max_samples")
    target = Target(log_joint, vectorize)
    generator = torch.Generator(q.device).manual_seed(seed)

    def look(at: Gaussian, lots: int) -> Estimate:
        # Few points at once waste time, many take much memory.
        sizes = (32, 16, 8, 4, 2)
        joined = next((n for n in sizes if lots % n == 0 and n * samples <= AT_ONCE), 1)
        count = joined * samples
        parts = (estimate(target, at, curvature, count, generator) for _ in range(lots // joined))
        return combine(list(parts))

    def bound(at: Gaussian) -> tuple[float, float]:
        return elbo_of(target, at, elbo_samples, seed + 1)

    if tol is None:
        tol = 1e-3 if samples else 1e-20
    rules = Rules(
        max_points=max_samples,
        max_iter=max_iter,
        tol=tol,
        lr=lr,
        exact=exact,
        callback=callback,
        progress=progress,
    )
    return descend(Problem(look, bound, target, samples), q, rules)


def laplace(
    log_joint: Callable[[Any], Tensor],
    mean0: Parameters,
    precision0: object = "full",
    **options: Any,
) -> FitResult:
    """Return Laplace's approximation: ``fit_gaussian`` at the mean alone (``samples=0``)."""
    return fit_gaussian(log_joint, mean0, precision0, samples=0, **options)
