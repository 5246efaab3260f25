"""Inverse problems without derivatives.

Ensemble Kalman inversion finds the posterior of an inverse problem from runs of a forward model,
without its derivatives. The model ``y = G(w) + noise`` has a Gaussian prior. Points drawn from the
present Gaussian go through ``G``. The line that fits the outputs best, ``G(w) ~ mean(G) + J (w -
mean)``, stands for the model, and gives the gradient and the Gauss-Newton curvature ``J^T R^-1 J``.
The rest is the step of ``fit_gaussian``: exact for linear models, and in general a Gaussian that
matches the model as seen from a cloud of its own size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from eigenstep.core.checks import (
    check_beside,
    check_finite,
    check_function,
    check_number,
    check_real,
    check_symmetric,
    check_wide,
)
from eigenstep.core.curvature import OuterProducts
from eigenstep.core.matrices import Full
from eigenstep.inference.descent import FitResult, Problem, Rules, descend
from eigenstep.inference.estimates import Estimate, check_samples, elbo_of, objective
from eigenstep.inference.gaussian import ONLY, Gaussian
from eigenstep.inference.models import NotFinite, Target

Forward = Callable[[Tensor], Tensor]
MAX_MEMBERS = 100_000
"""Members of both ensembles beyond which a fit ends without success."""
ELBO_SAMPLES = 1000
"""Points from which the ``elbo`` of a result is estimated."""


def ensemble_inversion(
    forward: Forward,
    data: Tensor,
    noise: Tensor,
    prior_mean: Tensor,
    prior_precision: float,
    *,
    members: int | None = None,
    seed: int = 0,
    vectorize: bool = True,
    **options: Any,
) -> FitResult:
    """Fit a Gaussian to the posterior of an inverse problem by runs of its forward model alone.

    Args:
        forward: ``G``, from parameters of shape ``(n,)`` to outputs of shape ``(k,)``.
        data: what was measured, shape ``(k,)``.
        noise: covariance of the measurement, shape ``(k, k)``.
        prior_mean: mean of the parameters before, shape ``(n,)``; the search starts there.
        prior_precision: inverse variance of every parameter before.
        members: points in an ensemble, an even number of more than twice the parameters, so that
            the line through them is determined; by default 4 for each parameter. A step takes two
            ensembles, whose size doubles whenever noise outweighs what is left to learn.
        seed: of all random numbers.
        vectorize: whether ``torch.func.vmap`` may run the model for all points at once.
        **options: ``lr``, ``tol``, ``max_iter`` (200 by default), ``exact``, ``callback`` and
            ``progress``, as in ``eigenstep.inference.fit.fit_gaussian``.

    Returns:
        The posterior; ``nfev`` counts runs of the model.
    """
    check_function(forward, "forward")
    problem = InverseProblem(forward, data, noise, prior_mean, prior_precision, vectorize)
    q = Gaussian.start(prior_mean, prior_precision)
    members = 4 * q.size if members is None else members
    check_samples(members, 2 * q.size + 2)
    generator = torch.Generator(prior_mean.device).manual_seed(seed)
    target = Target(problem.log_joint, vectorize)

    def look(at: Gaussian, lots: int) -> Estimate:
        half = at.deviations(lots * members // 2, generator)[ONLY]
        target.nfev += 2 * len(half)
        return problem.estimate(at, torch.cat([half, -half]))

    fitted = Problem(look, lambda at: elbo_of(target, at, ELBO_SAMPLES, seed + 1), target, members)
    return descend(fitted, q, Rules(max_points=MAX_MEMBERS, **{"max_iter": 200, **options}))


class InverseProblem:
    """Data, their noise and a prior, with the forward model that is to explain them."""

    def __init__(
        self,
        forward: Forward,
        data: Tensor,
        noise: Tensor,
        mean: Tensor,
        precision: float,
        vectorize: bool,
    ) -> None:
        """Check what belongs together; the arguments are those of ``ensemble_inversion``."""
        check_wide(mean, "prior_mean")
        check_finite(mean, "prior_mean")
        if mean.ndim != 1:
            raise ValueError(f"prior_mean must be a vector, got shape {tuple(mean.shape)}")
        check_number(precision, "prior_precision", 0.0)
        if precision == 0:
            raise ValueError("prior_precision must be positive and finite, got 0")
        check_finite(data, "data")
        check_beside(data, "data", mean, "prior_mean")
        check_symmetric(noise, "noise")
        check_beside(noise, "noise", data, "data")
        if data.shape != noise.shape[:1] or noise.ndim != 2:
            raise ValueError(
                f"data must have shape {tuple(noise.shape[:1])} to fit noise, got "
                f"{tuple(data.shape)}"
            )
        self.forward = forward
        self.data = data
        self.vectorize = vectorize
        self.noise = Full.from_dense(noise)
        self.prior_mean = mean
        self.prior_precision = precision
        units = len(data) * math.log(2 * math.pi) - len(mean) * math.log(precision / (2 * math.pi))
        self.constant = -0.5 * (self.noise.logdet() + units)

    def misfit(self, w: Tensor) -> Tensor:
        """Return outputs minus data, in units of the noise."""
        output = self.forward(w)
        check_real(output, "what forward returns")
        if output.shape != self.data.shape:
            wanted = f"shape {tuple(self.data.shape)}, like data"
            raise ValueError(
                f"forward must return outputs of {wanted}, got shape {tuple(output.shape)}"
            )
        return self.noise.matmul(output - self.data, -0.5)

    def log_joint(self, w: Any) -> Tensor:
        """Return the log density of data and parameters."""
        prior = self.prior_precision * (w - self.prior_mean).square().sum()
        return self.constant - 0.5 * self.misfit(w).square().sum() - 0.5 * prior

    def estimate(self, at: Gaussian, deviations: Tensor) -> Estimate:
        """Run the model around the mean of a Gaussian, and fit a line to its outputs."""
        with torch.no_grad():
            points = at.means[ONLY] + deviations
            outputs = (
                vmap(self.misfit)(points)
                if self.vectorize
                else torch.stack([self.misfit(w) for w in points])
            )
        if not torch.isfinite(outputs).all():
            raise NotFinite("the forward model returned NaN or infinite numbers")
        jacobian = torch.linalg.lstsq(deviations, outputs).solution.mT
        offset = at.means[ONLY] - self.prior_mean
        gradient = jacobian.mT @ outputs.mean(0) + self.prior_precision * offset
        square = 0.5 * (points - self.prior_mean).square().sum(1)
        values = 0.5 * outputs.square().sum(1) + self.prior_precision * square - self.constant
        value, error, _ = objective(at, {ONLY: deviations}, values)
        return Estimate(
            value,
            error,
            value,
            {ONLY: gradient},
            {ONLY: OuterProducts(jacobian)},
            self.prior_precision,
        )
