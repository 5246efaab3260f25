"""Ensemble Kalman inversion: the posterior of an inverse problem from runs of a forward model, without its derivatives.

The model ``y = G(w) + noise`` has a Gaussian prior. Points drawn from the present Gaussian go through ``G``. The
line that fits the outputs best, ``G(w) ~ mean(G) + J (w - mean)``, stands for the model, and gives the gradient and the
Gauss-Newton curvature ``J^T R^-1 J``. The rest is the step of :func:`~eigenstep.inference.fit.fit_gaussian`: exact for
linear models, and in general a Gaussian that matches the model as seen from a cloud of its own size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ..core.checks import check_beside, check_finite, check_function, check_size
from ..core.curvature import OuterProducts
from ..core.matrices import Full
from .descent import Result, descend
from .estimates import Estimate, check_samples, elbo_of, objective
from .gaussian import ONLY, Gaussian
from .target import NotFinite, Target


def ensemble_inversion(
    forward: Callable[[Tensor], Tensor],
    data: Tensor,
    noise: Tensor,
    prior_mean: Tensor,
    prior_precision: float,
    *,
    members: int | None = None,
    max_members: int = 100_000,
    lr: float | Callable[[int], float] | None = None,
    tol: float = 1e-3,
    max_iter: int = 200,
    exact: bool = True,
    seed: int = 0,
    elbo_samples: int = 1000,
    vectorize: bool = True,
    callback: Callable[[Result], object] | None = None,
    progress: bool = False,
) -> Result:
    """Fit a Gaussian to the posterior of an inverse problem by runs of its forward model alone.

    Args:
        forward: ``G``, from parameters of shape ``(n,)`` to outputs of shape ``(k,)``.
        data: what was measured, shape ``(k,)``.
        noise: covariance of the measurement, shape ``(k, k)``.
        prior_mean: mean of the parameters before, shape ``(n,)``; the search starts there.
        prior_precision: inverse variance of every parameter before.
        members: points in an ensemble, an even number of more than twice the parameters, so that the line through
            them is determined; by default 4 for each parameter. A step takes two ensembles, whose size doubles whenever
            noise outweighs what is left to learn.
        max_members: the most members of both ensembles; a fit that would need more ends there without success.
        lr: step size, as in :func:`~eigenstep.inference.fit.fit_gaussian`.
        tol: stop when the expected gap is at most this many nats.
        max_iter: stop after this many steps.
        exact: average precision matrices exactly, or to first order, as the paper does.
        seed: of all random numbers.
        elbo_samples: how many points the ``elbo`` of the result is estimated from.
        vectorize: whether ``torch.func.vmap`` may run the model for all points at once.
        callback: called with the result so far at each step; the search stops if it returns ``True``.
        progress: show a progress bar.

    Returns:
        The posterior; ``nfev`` counts runs of the model.
    """
    check_function(forward, "forward")
    q = Gaussian.start(prior_mean, prior_precision)
    if prior_mean.ndim != 1:
        raise ValueError(f"prior_mean must be a vector, got shape {tuple(prior_mean.shape)}")
    check_finite(data, "data")
    check_beside(data, "data", prior_mean, "prior_mean")
    root = Full.from_dense(noise)
    if data.shape != root.eigs.shape:
        raise ValueError(f"data must have shape {tuple(root.eigs.shape)} to fit noise, got {tuple(data.shape)}")
    members = 4 * q.size if members is None else members
    check_samples(members, 2 * q.size + 2)
    check_samples(elbo_samples, 4)
    check_size(max_members, "max_members")
    generator = torch.Generator(prior_mean.device).manual_seed(seed)
    constant = -0.5 * (
        root.logdet() + len(data) * math.log(2 * math.pi) - q.size * math.log(prior_precision / (2 * math.pi))
    )

    def misfit(w: Tensor) -> Tensor:
        return root.matmul(forward(w) - data, -0.5)

    def log_joint(w: Any) -> Tensor:
        return constant - 0.5 * misfit(w).square().sum() - 0.5 * prior_precision * (w - prior_mean).square().sum()

    target = Target(log_joint, vectorize)

    def look(at: Gaussian, lots: int) -> Estimate:
        half = at.deviations(lots * members // 2, generator)[ONLY]
        deviations = torch.cat([half, -half])
        with torch.no_grad():
            points = at.means[ONLY] + deviations
            outputs = vmap(misfit)(points) if vectorize else torch.stack([misfit(w) for w in points])
        target.nfev += len(points)
        if not torch.isfinite(outputs).all():
            raise NotFinite("the forward model returned NaN or infinite numbers")
        jacobian = torch.linalg.lstsq(deviations, outputs).solution.mT
        offset = at.means[ONLY] - prior_mean
        gradient = jacobian.mT @ outputs.mean(0) + prior_precision * offset
        square = 0.5 * (points - prior_mean).square().sum(1)
        values = 0.5 * outputs.square().sum(1) + prior_precision * square - constant
        value, error, _ = objective(at, {ONLY: deviations}, values)
        return Estimate(value, error, value, {ONLY: gradient}, {ONLY: OuterProducts(jacobian)}, prior_precision)

    return descend(
        look,
        target,
        q,
        points=members,
        max_points=max_members,
        lr=lr,
        tol=tol,
        max_iter=max_iter,
        exact=exact,
        final=lambda at: elbo_of(target, at, elbo_samples, seed + 1),
        callback=callback,
        progress=progress,
    )
