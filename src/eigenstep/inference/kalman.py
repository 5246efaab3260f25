"""Kalman filtering as Bayesian inference step by step, with covariances in spectral form.

The state follows ``x' = F x + noise`` and is seen through ``y = C x + noise``. Both halves of a step of the filter are
updates of a matrix that is held as its eigenvectors and eigenvalues; what is decomposed is the noise of a measurement::

    predict:   P <- P + 1 (F P F^T + Q - P)          average with beta = 1, gamma = 1
    correct:   S <- S + beta C^T R^-1 C              sum with gamma = 0, S = P^-1
               m <- m + beta S^-1 C^T R^-1 (y - C m)

With exact averages and ``beta = 1`` this is the textbook filter. The paper's update agrees with it to first order in
what changes in a step; ``substeps`` splits each correction into short ones.

Ensemble Kalman inversion finds the posterior of an inverse problem from runs of a forward model, without its
derivatives. The model ``y = G(w) + noise`` has a Gaussian prior. Points drawn from the present Gaussian go through
``G``. The line that fits the outputs best, ``G(w) ~ mean(G) + J (w - mean)``, stands for the model, and gives the
gradient and the Gauss-Newton curvature ``J^T R^-1 J``. The rest is the step of ``fit_gaussian``: exact for linear
models, and in general a Gaussian that matches the model as seen from a cloud of its own size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ..core.checks import (
    check_beside,
    check_finite,
    check_function,
    check_number,
    check_real,
    check_size,
    check_symmetric,
    check_wide,
    describe,
)
from ..core.curvature import Dense, OuterProducts
from ..core.matrices import Full
from .descent import FitResult, Problem, descend
from .estimates import Estimate, check_samples, elbo_of, objective
from .gaussian import ONLY, Gaussian, average
from .models import NotFinite, Target


@dataclass(frozen=True)
class State:
    """A Gaussian over the state.

    Attributes:
        mean: shape ``(n,)``.
        precision: inverse covariance.
    """

    mean: Tensor
    precision: Full

    def __post_init__(self) -> None:
        """Check that mean and precision belong together."""
        check_finite(self.mean, "mean")
        if not isinstance(self.precision, Full):
            raise TypeError(f"precision must be Full, such as Full.from_dense(matrix), got {describe(self.precision)}")
        if self.mean.ndim != 1 or self.mean.shape != self.precision.eigs.shape:
            wanted = tuple(self.precision.eigs.shape)
            raise ValueError(f"mean must have shape {wanted} to fit precision, got {tuple(self.mean.shape)}")
        check_beside(self.precision.eigs, "precision", self.mean, "mean")

    @classmethod
    def from_covariance(cls, mean: Tensor, covariance: Tensor) -> State:
        """Return the Gaussian with a given covariance matrix."""
        check_symmetric(covariance, "covariance")
        return cls(mean, _invert(Full.from_dense(covariance)))

    def covariance(self) -> Tensor:
        """Return the covariance as an ordinary matrix."""
        return self.precision.dense(-1)


def predict(state: State, transition: Tensor, noise: Tensor, *, exact: bool = True) -> State:
    """Return the belief about the next state before it is measured; arguments as for ``kalman_filter``."""
    _check_matrix(transition, "transition", state, len(state.mean))
    _check_matrix(noise, "noise", state, len(state.mean))
    check_symmetric(noise, "noise")
    covariance = _invert(state.precision)
    moved = transition @ covariance.dense() @ transition.mT + noise
    new = average(covariance, Dense((moved + moved.mT) / 2), lr=1.0, exact=exact)
    return State(transition @ state.mean, _invert(new))


def correct(
    state: State, measurement: Tensor, observation: Tensor, noise: Tensor, *, exact: bool = True, substeps: int = 1
) -> State:
    """Return the belief about a state after it was measured as ``y``; other arguments as for ``kalman_filter``."""
    check_finite(measurement, "measurement")
    if measurement.ndim != 1:
        raise ValueError(f"measurement must be a vector, got shape {tuple(measurement.shape)}")
    check_beside(measurement, "measurement", state.mean, "the state")
    _check_matrix(observation, "observation", state, len(measurement))
    _check_matrix(noise, "noise", state, len(measurement), len(measurement))
    check_size(substeps, "substeps")
    whiten = Full.from_dense(noise)
    rows = whiten.matmul(observation.mT, -0.5).mT  # R^-1/2 C
    seen = whiten.matmul(measurement, -0.5)
    lr = 1 / substeps
    for _ in range(substeps):
        S = average(state.precision, OuterProducts(rows), lr=lr, decay=0.0, exact=exact)
        state = State(state.mean + lr * S.solve(rows.mT @ (seen - rows @ state.mean)), S)
    return state


def kalman_filter(
    state: State,
    measurements: Tensor,
    *,
    transition: Tensor,
    transition_noise: Tensor,
    observation: Tensor,
    observation_noise: Tensor,
    exact: bool = True,
    substeps: int = 1,
) -> list[State]:
    """Return the belief after each measurement.

    Args:
        state: the belief about the state before the first transition.
        measurements: shape ``(T, k)``; a row of NaN means that nothing was measured.
        transition: ``F``, shape ``(n, n)``.
        transition_noise: covariance ``Q`` of the random part of a transition, ``(n, n)``; may be singular or zero.
        observation: ``C``, shape ``(k, n)``.
        observation_noise: covariance ``R`` of a measurement, ``(k, k)``, positive definite.
        exact: the textbook filter up to rounding, or the paper's update, which is first order in its changes.
        substeps: how many steps of size ``1 / substeps`` each measurement is taken in.
    """
    check_real(measurements, "measurements")
    if measurements.ndim != 2:
        raise ValueError(f"measurements must have shape (T, k), got {tuple(measurements.shape)}")
    missing = measurements.isnan().all(1)
    check_finite(measurements[~missing], "every measurement")
    states = []
    for measurement, nothing in zip(measurements, missing.tolist(), strict=True):
        state = predict(state, transition, transition_noise, exact=exact)
        if not nothing:
            state = correct(state, measurement, observation, observation_noise, exact=exact, substeps=substeps)
        states.append(state)
    return states


def _invert(matrix: Full) -> Full:
    """Return the inverse matrix: in spectral form, that of its eigenvalues."""
    return replace(matrix, eigs=matrix.eigs.reciprocal())


def _check_matrix(matrix: Tensor, name: str, state: State, rows: int, columns: int | None = None) -> None:
    check_finite(matrix, name)
    check_beside(matrix, name, state.mean, "the state")
    want = (rows, len(state.mean) if columns is None else columns)
    if matrix.shape != want:
        raise ValueError(f"{name} must have shape {want}, got {tuple(matrix.shape)}")


Forward = Callable[[Tensor], Tensor]


def ensemble_inversion(
    forward: Forward,
    data: Tensor,
    noise: Tensor,
    prior_mean: Tensor,
    prior_precision: float,
    *,
    members: int | None = None,
    max_members: int = 100_000,
    seed: int = 0,
    elbo_samples: int = 1000,
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
        members: points in an ensemble, an even number of more than twice the parameters, so that the line through
            them is determined; by default 4 for each parameter. A step takes two ensembles, whose size doubles whenever
            noise outweighs what is left to learn.
        max_members: the most members of both ensembles; a fit that would need more ends there without success.
        seed: of all random numbers.
        elbo_samples: how many points the ``elbo`` of the result is estimated from.
        vectorize: whether ``torch.func.vmap`` may run the model for all points at once.
        **options: ``lr``, ``tol``, ``max_iter`` (200 by default), ``exact``, ``callback`` and ``progress``, as in
            ``eigenstep.inference.fit.fit_gaussian``.

    Returns:
        The posterior; ``nfev`` counts runs of the model.
    """
    check_function(forward, "forward")
    problem = InverseProblem(forward, data, noise, prior_mean, prior_precision, vectorize)
    q = Gaussian.start(prior_mean, prior_precision)
    members = 4 * q.size if members is None else members
    check_samples(members, 2 * q.size + 2)
    check_samples(elbo_samples, 4)
    check_size(max_members, "max_members")
    generator = torch.Generator(prior_mean.device).manual_seed(seed)
    target = Target(problem.log_joint, vectorize)

    def look(at: Gaussian, lots: int) -> Estimate:
        half = at.deviations(lots * members // 2, generator)[ONLY]
        target.nfev += 2 * len(half)
        return problem.estimate(at, torch.cat([half, -half]))

    fitted = Problem(look, lambda at: elbo_of(target, at, elbo_samples, seed + 1), target, members)
    return descend(fitted, q, max_points=max_members, **{"max_iter": 200, **options})


class InverseProblem:
    """Data, their noise and a prior, with the forward model that is to explain them."""

    def __init__(
        self, forward: Forward, data: Tensor, noise: Tensor, mean: Tensor, precision: float, vectorize: bool
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
            raise ValueError(f"data must have shape {tuple(noise.shape[:1])} to fit noise, got {tuple(data.shape)}")
        self.forward, self.data, self.vectorize = forward, data, vectorize
        self.noise, self.prior_mean, self.prior_precision = Full.from_dense(noise), mean, precision
        units = len(data) * math.log(2 * math.pi) - len(mean) * math.log(precision / (2 * math.pi))
        self.constant = -0.5 * (self.noise.logdet() + units)

    def misfit(self, w: Tensor) -> Tensor:
        """Return outputs minus data, in units of the noise."""
        output = self.forward(w)
        check_real(output, "what forward returns")
        if output.shape != self.data.shape:
            wanted = f"shape {tuple(self.data.shape)}, like data"
            raise ValueError(f"forward must return outputs of {wanted}, got shape {tuple(output.shape)}")
        return self.noise.matmul(output - self.data, -0.5)

    def log_joint(self, w: Any) -> Tensor:
        """Return the log density of data and parameters."""
        prior = self.prior_precision * (w - self.prior_mean).square().sum()
        return self.constant - 0.5 * self.misfit(w).square().sum() - 0.5 * prior

    def estimate(self, at: Gaussian, deviations: Tensor) -> Estimate:
        """Run the model at points around the mean of a Gaussian, and fit a line to what comes out."""
        with torch.no_grad():
            points = at.means[ONLY] + deviations
            outputs = vmap(self.misfit)(points) if self.vectorize else torch.stack([self.misfit(w) for w in points])
        if not torch.isfinite(outputs).all():
            raise NotFinite("the forward model returned NaN or infinite numbers")
        jacobian = torch.linalg.lstsq(deviations, outputs).solution.mT
        offset = at.means[ONLY] - self.prior_mean
        gradient = jacobian.mT @ outputs.mean(0) + self.prior_precision * offset
        square = 0.5 * (points - self.prior_mean).square().sum(1)
        values = 0.5 * outputs.square().sum(1) + self.prior_precision * square - self.constant
        value, error, _ = objective(at, {ONLY: deviations}, values)
        return Estimate(value, error, value, {ONLY: gradient}, {ONLY: OuterProducts(jacobian)}, self.prior_precision)
