"""Estimates of ``E_q[gradient]`` and ``E_q[Hessian]`` of ``l = -log_joint`` (paper, Eq. 6).

Points come in antithetic pairs ``mean + x`` and ``mean - x``. Where an estimate is random even if
``l`` is quadratic, the quadratic that ``q`` stands for is subtracted before and its known curvature
``S`` added after: no bias comes in, and the noise vanishes as ``q`` comes close to a Gaussian
posterior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_function, choose, describe
from ..core.curvature import Curvature, Dense, OuterProducts
from ..core.matrices import SPD, Diagonal, Full
from ..core.sources import gradient_outer_product, reinforce, reparametrization
from ..core.step import symmetrize
from .gaussian import ONLY, Blocks, Gaussian, event, unwrap
from .models import Target, singles

Curvatures = dict[str, Curvature]
"""Curvature of each block."""
FROM_MODEL = {"gauss-newton": "gauss_newton", "empirical-fisher": "empirical_fisher"}
"""Methods of ``log_joint`` that sources ask for curvature."""


@dataclass(frozen=True)
class Estimate:
    """What is known about the objective near a Gaussian.

    Attributes:
        value: ``E_q[l] - entropy``, the negative ELBO; at the mean alone, minus Laplace's log
            evidence.
        error: its standard error, infinite if unknown.
        objective: what steps should decrease: the value, or ``l`` at the mean.
        gradients: ``E_q[gradient]`` of each block, as an event of its precision.
        curvatures: ``E_q[Hessian]`` of each block.
        damping: multiple of the identity to add to the curvatures.
    """

    value: float
    error: float
    objective: float
    gradients: Blocks
    curvatures: Curvatures
    damping: float = 0.0


@dataclass(frozen=True)
class Cloud:
    """Points around the mean, and what is known there.

    Attributes:
        target: the function.
        q: the Gaussian.
        half: deviations of the first half of the points, which the second mirrors; ``None`` at the
            mean alone.
        points: the points, along the first axis of each block.
        residuals: values of ``l`` minus the quadratic of ``q``.
        gradients: gradients of ``l`` as events, empty where a source needs none.
    """

    target: Target
    q: Gaussian
    half: Blocks | None
    points: Blocks
    residuals: Tensor
    gradients: Blocks

    def by_block(self, curvature: Callable[[SPD, Tensor, Tensor], Curvature]) -> Curvatures:
        """Return ``curvature(S, deviations, gradients)`` of each block."""
        assert self.half is not None
        half = self.half
        gradients = self.gradients
        return {n: curvature(S, half[n], gradients[n]) for n, S in self.q.precisions.items()}


def estimate(
    target: Target,
    q: Gaussian,
    source: str | Callable[[Any], Any],
    samples: int,
    generator: torch.Generator,
) -> Estimate:
    """Estimate value, gradient and curvature of the variational objective at ``q``.

    Args:
        target: the function.
        q: the Gaussian.
        source: a name in ``SOURCES``, or a function of the parameters that returns their curvature
            (for several blocks, a dictionary).
        samples: an even number of points; 0 takes the mean alone.
        generator: of the points.
    """
    find = choose(source, SOURCES, "curvature")
    find = find if isinstance(source, str) else partial(_from_user, source)
    target.refresh()
    if samples:
        half = q.deviations(samples // 2, generator)
        both = _mirrored(half)
    else:
        both = half = {n: m.new_zeros(1, *q.precisions[n].sizes) for n, m in q.means.items()}
    points = q.points(both)
    by_values = find is _reinforce
    values, slopes = (target.values(points), {}) if by_values else target.gradients(points)
    value, error, residuals = objective(q, both, values)
    events = {name: event(q.precisions[name], g) for name, g in slopes.items()}
    cloud = Cloud(target, q, half if samples else None, points, residuals, events)
    return Estimate(
        value,
        error,
        objective=value if samples else values[0].item(),
        curvatures=find(cloud),
        gradients=_slopes(cloud) if by_values else {n: g.mean(0) for n, g in events.items()},
        damping=target.model.prior_precision if source in FROM_MODEL else 0.0,
    )


def _mirrored(half: Blocks) -> Blocks:
    return {name: torch.cat([x, -x]) for name, x in half.items()}


def combine(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of estimates from independent points."""
    if len(estimates) == 1:
        return estimates[0]
    count = len(estimates)
    first = estimates[0]
    gradients = {}
    curvatures = {}
    for name in first.curvatures:
        gradients[name] = torch.stack([e.gradients[name] for e in estimates]).mean(0)
        curvatures[name] = _mean([e.curvatures[name] for e in estimates])
    return Estimate(
        value=sum(e.value for e in estimates) / count,
        error=math.hypot(*(e.error for e in estimates)) / count,
        objective=sum(e.objective for e in estimates) / count,
        gradients=gradients,
        curvatures=curvatures,
        damping=first.damping,
    )


def elbo(
    log_joint: Callable[[Any], Tensor],
    q: Gaussian,
    samples: int = 1000,
    *,
    seed: int = 0,
    vectorize: bool = True,
) -> tuple[float, float]:
    """Return the evidence lower bound ``E_q[log_joint] + entropy`` in nats, and its error.

    It is estimated for a Gaussian ``q`` from an even number of points; the error is a standard
    error, and all else is as in ``fit_gaussian``.
    """
    check_function(log_joint, "log_joint")
    check_samples(samples, 4)
    if not isinstance(q, Gaussian):
        raise TypeError(f"q must be a Gaussian, such as the posterior of a fit, got {describe(q)}")
    return elbo_of(Target(log_joint, vectorize), q, samples, seed)


def elbo_of(target: Target, q: Gaussian, samples: int, seed: int) -> tuple[float, float]:
    """Return the evidence lower bound and its standard error for a wrapped function."""
    target.refresh()
    both = _mirrored(q.deviations(samples // 2, torch.Generator(q.device).manual_seed(seed)))
    value, error, _ = objective(q, both, target.values(q.points(both)))
    return -value, error


def objective(q: Gaussian, deviations: Blocks, values: Tensor) -> tuple[float, float, Tensor]:
    """Return ``E_q[l] - entropy``, its standard error, and ``l`` minus the quadratic of ``q``."""
    residuals = values - 0.5 * q.whitened_square(deviations)
    # Averages over pairs are free of all odd parts of l.
    even = residuals.reshape(2, -1).mean(0) if len(residuals) > 1 else residuals
    value = even.mean().item() + 0.5 * q.logdet() - 0.5 * q.size * math.log(2 * math.pi)
    if len(residuals) == 1:
        return value, 0.0, residuals
    error = (even.std() / len(even) ** 0.5).item() if len(even) > 1 else math.inf
    return value, error, residuals


def check_samples(samples: object, least: int) -> None:
    """Raise unless ``samples`` is an even number of at least ``least``."""
    if isinstance(samples, bool) or not isinstance(samples, int) or samples % 2 or samples < least:
        raise ValueError(
            f"samples must be an even number of at least {least}, for antithetic pairs, got "
            f"{samples!r}"
        )


def _hessian(cloud: Cloud) -> Curvatures:
    return {name: cloud.target.mean_hessian(cloud.points, name) for name in cloud.points}


def _reparametrization(cloud: Cloud) -> Curvatures:
    """Reparametrization trick: the part of the gradient that is odd in the deviation."""

    def curvature(S: SPD, half: Tensor, gradients: Tensor) -> Curvature:
        plus, minus = gradients.chunk(2)
        return _plus_precision(reparametrization(S, half, (plus - minus) / 2 - S.matmul(half)))

    return cloud.by_block(curvature)


def _gradient_outer_product(cloud: Cloud) -> Curvatures:
    """``E_q[g g^T]``, with the outer products of ``S x``, whose mean is ``S``, for comparison."""

    def curvature(S: SPD, half: Tensor, gradients: Tensor) -> Curvature:
        vectors = torch.cat([gradients, S.matmul(half)])
        weights = vectors.new_ones(len(vectors))
        weights[len(gradients) :] = -2.0
        return OuterProducts(vectors, weights / len(gradients), shift=1.0, semidefinite=False)

    if cloud.half is None:
        return {name: gradient_outer_product(g[0]) for name, g in cloud.gradients.items()}
    return cloud.by_block(curvature)


def _reinforce(cloud: Cloud) -> Curvatures:
    """REINFORCE: even parts of the values give the curvature."""
    assert cloud.half is not None
    plus, minus = cloud.residuals.chunk(2)
    even = (plus + minus) / 2
    # The factor makes the mean of all other pairs the baseline of each pair.
    centered = (even - even.mean()) * len(even) / (len(even) - 1)
    half = cloud.half
    return {
        name: _plus_precision(reinforce(S, half[name], centered))
        for name, S in cloud.q.precisions.items()
    }


def _slopes(cloud: Cloud) -> Blocks:
    """Return gradients from values alone: odd parts of the values give them."""
    assert cloud.half is not None
    plus, minus = cloud.residuals.chunk(2)
    odd = (plus - minus) / 2
    half = cloud.half
    scores = {name: S.matmul(half[name]) for name, S in cloud.q.precisions.items()}
    return {name: torch.tensordot(odd, score, 1) / len(odd) for name, score in scores.items()}


def _from_model(method: str, cloud: Cloud) -> Curvatures:
    """Ask the model for its curvature; the prior's is the damping."""
    model: Any = cloud.target.model
    names = list(cloud.points)
    per_point = model.outputs if method == "gauss_newton" else 1
    cloud.target.ngrad += len(cloud.points[names[0]]) * per_point
    return _as_dict(getattr(model, method)(unwrap(cloud.points)), cloud)


def _from_user(source: Callable[[Any], Any], cloud: Cloud) -> Curvatures:
    """Average what a function of the user says at each of the points."""
    curvatures = [_as_dict(source(unwrap(at)), cloud) for at in singles(cloud.points)]
    return {name: _mean([c[name] for c in curvatures]) for name in cloud.points}


SOURCES: dict[str, Callable[[Cloud], Curvatures]] = {
    "hessian": _hessian,
    **{name: partial(_from_model, method) for name, method in FROM_MODEL.items()},
    "gradient-outer-product": _gradient_outer_product,
    "reparametrization": _reparametrization,
    "reinforce": _reinforce,
}
"""The sources of curvature by name."""


def _plus_precision(curvature: OuterProducts) -> OuterProducts:
    return replace(curvature, shift=curvature.shift + 1.0)


def _mean(curvatures: Sequence[Curvature]) -> Curvature:
    """Return the mean of curvatures of the same kind."""
    count = len(curvatures)
    dense = [c.matrix for c in curvatures if isinstance(c, Dense)]
    if len(dense) == count:
        return Dense(torch.stack(dense).mean(0))
    products = [c for c in curvatures if isinstance(c, OuterProducts)]
    if len(products) != count:
        raise TypeError("curvature must be Dense at all points, or OuterProducts at all points")
    weights = [
        c.vectors.new_ones(len(c.vectors)) if c.weights is None else c.weights for c in products
    ]
    return OuterProducts(
        torch.cat([c.vectors for c in products]),
        torch.cat(weights) / count,
        shift=sum(c.shift for c in products) / count,
        semidefinite=all(c.semidefinite for c in products),
    )


def _fitted(curvature: Curvature, S: SPD) -> Curvature:
    """Return curvature with vectors in the shape that ``S`` acts on, as a matrix where it is less.

    The examples of a model give as many vectors at every point; they would fill the memory.
    """
    if isinstance(curvature, Dense):
        return curvature
    vectors = event(S, curvature.vectors)
    if curvature.weights is None and not curvature.shift and len(vectors) > S.sizes[0]:
        if isinstance(S, Full):
            return Dense(symmetrize(vectors.mT @ vectors), semidefinite=True)
        if isinstance(S, Diagonal):  # which learns from the diagonal alone
            return Dense(torch.diag(vectors.square().sum(0)), semidefinite=True)
    return replace(curvature, vectors=vectors)


def _as_dict(curvature: Any, cloud: Cloud) -> Curvatures:
    """Return the curvature of each block that a model or a user gives, after a check."""
    names = list(cloud.points)
    if isinstance(curvature, (Dense, OuterProducts)):
        curvature = {ONLY: curvature}
    if not isinstance(curvature, Mapping) or set(curvature) != set(names):
        raise TypeError(
            f"curvature must return Dense or OuterProducts, or a dictionary of them for {names}"
        )
    return {name: _fitted(curvature[name], cloud.q.precisions[name]) for name in names}
