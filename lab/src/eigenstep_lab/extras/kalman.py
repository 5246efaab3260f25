"""Kalman filtering as Bayesian inference step by step, with covariances in spectral form.

The state follows ``x' = F x + noise`` and is seen through ``y = C x + noise``. Both halves of a
step of the filter are updates of a matrix that is held as its eigenvectors and eigenvalues; what is
decomposed is the noise of a measurement::

    predict:   P <- P + 1 (F P F^T + Q - P)          average with beta = 1, gamma = 1
    correct:   S <- S + beta C^T R^-1 C              sum with gamma = 0, S = P^-1
               m <- m + beta S^-1 C^T R^-1 (y - C m)

With exact averages and ``beta = 1`` this is the textbook filter. The paper's update agrees with it
to first order in what changes in a step; ``substeps`` splits each correction into short ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from eigenstep.core.checks import (
    check_beside,
    check_finite,
    check_real,
    check_size,
    check_symmetric,
    describe,
)
from eigenstep.core.curvature import Dense, OuterProducts
from eigenstep.core.matrices import Full
from eigenstep.inference.gaussian import average


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
            raise TypeError(
                "precision must be Full, such as Full.from_dense(matrix), got "
                f"{describe(self.precision)}"
            )
        if self.mean.ndim != 1 or self.mean.shape != self.precision.eigs.shape:
            wanted = tuple(self.precision.eigs.shape)
            raise ValueError(
                f"mean must have shape {wanted} to fit precision, got {tuple(self.mean.shape)}"
            )
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
    """Return the belief about the next state; arguments as for ``kalman_filter``."""
    _check_matrix(transition, "transition", state, len(state.mean))
    _check_matrix(noise, "noise", state, len(state.mean))
    check_symmetric(noise, "noise")
    covariance = _invert(state.precision)
    moved = transition @ covariance.dense() @ transition.mT + noise
    new = average(covariance, Dense((moved + moved.mT) / 2), lr=1.0, exact=exact)
    return State(transition @ state.mean, _invert(new))


def correct(
    state: State,
    measurement: Tensor,
    observation: Tensor,
    noise: Tensor,
    *,
    exact: bool = True,
    substeps: int = 1,
) -> State:
    """Return the belief after a measurement; other arguments as for ``kalman_filter``."""
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
        transition_noise: covariance ``Q`` of the random part of a transition, ``(n, n)``; may be
            singular or zero.
        observation: ``C``, shape ``(k, n)``.
        observation_noise: covariance ``R`` of a measurement, ``(k, k)``, positive definite.
        exact: the textbook filter up to rounding, or the paper's update, which is first order in
            its changes.
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
            state = correct(
                state, measurement, observation, observation_noise, exact=exact, substeps=substeps
            )
        states.append(state)
    return states


def _invert(matrix: Full) -> Full:
    """Return the inverse matrix: in spectral form, that of its eigenvalues."""
    return replace(matrix, eigs=matrix.eigs.reciprocal())


def _check_matrix(
    matrix: Tensor, name: str, state: State, rows: int, columns: int | None = None
) -> None:
    check_finite(matrix, name)
    check_beside(matrix, name, state.mean, "the state")
    want = (rows, len(state.mean) if columns is None else columns)
    if matrix.shape != want:
        raise ValueError(f"{name} must have shape {want}, got {tuple(matrix.shape)}")
