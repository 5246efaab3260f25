"""Estimates of ``E_q[gradient]`` and ``E_q[Hessian]`` of ``l = -log_joint`` under a Gaussian ``q``
(paper, Eq. 6).

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
from .models import Target, each_of

# Methods that log_joint needs
FROM_MODEL = {"gauss-newton": "gauss_newton", "empirical-fisher": "empirical_fisher"}


@dataclass(frozen=True)
class Estimate:
    """What is known about the objective near a Gaussian."""

    # E_q[l] - entropy, the negative ELBO; at the mean alone, minus Laplace's log evidence
    value: float
    error: float  # its standard error, infinite if unknown
    objective: float  # what steps should decrease: the value, or l at the mean
    gradients: Blocks  # E_q[gradient] of each block, as an event of its precision
    curvatures: dict[str, Curvature]  # E_q[Hessian] of each block
    damping: float = 0.0  # multiple of the identity to add to the curvatures


def estimate(
    target: Target,
    q: Gaussian,
    source: str | Callable[[Any], Any],
    samples: int,
    generator: torch.Generator,
) -> Estimate:
    """Estimate value, gradient and curvature of the variational objective at ``q``, from an even
    number of points.

    The source is a name in ``SOURCES``, or a function of the parameters that returns their
    curvature (for several blocks, a dictionary). No samples at all take the mean alone.
    """
    find = choose(source, SOURCES, "curvature")
    find = find if isinstance(source, str) else partial(_from_user, source)
    target.refresh()
    pairs = samples // 2
    if pairs:
        half = q.deviations(pairs, generator)
        both = {name: torch.cat([x, -x]) for name, x in half.items()}
    else:
        both = half = {n: m.new_zeros(1, *q.precisions[n].sizes) for n, m in q.means.items()}
    points = q.points(both)
    if find is _reinforce:
        values, gradients = target.values(points), Blocks()
    else:
        values, gradients = target.gradients(points)
    value, error, residuals = objective(q, both, values)
    aim = value if pairs else values[0].item()
    events = {name: event(q.precisions[name], g) for name, g in gradients.items()}
    cloud = Cloud(target, q, half if pairs else None, points, residuals, events)
    means, curvatures, damping = find(cloud)
    return Estimate(value, error, aim, means, curvatures, damping)


def combine(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of estimates from independent points."""
    if len(estimates) == 1:
        return estimates[0]
    count, first = len(estimates), estimates[0]
    return replace(
        first,
        value=sum(each.value for each in estimates) / count,
        error=math.hypot(*(each.error for each in estimates)) / count,
        objective=sum(each.objective for each in estimates) / count,
        gradients={
            name: torch.stack([each.gradients[name] for each in estimates]).mean(0)
            for name in first.gradients
        },
        curvatures={
            name: _mean([each.curvatures[name] for each in estimates]) for name in first.curvatures
        },
    )


def elbo(
    log_joint: Callable[[Any], Tensor],
    q: Gaussian,
    samples: int = 1000,
    *,
    seed: int = 0,
    vectorize: bool = True,
) -> tuple[float, float]:
    """Return an estimate of the evidence lower bound ``E_q[log_joint] + entropy`` in nats, and its
    standard error.

    It is that of a Gaussian ``q``, from an even number of points; all else as in ``fit_gaussian``.
    """
    check_function(log_joint, "log_joint")
    check_samples(samples, 4)
    if not isinstance(q, Gaussian):
        raise TypeError(f"q must be a Gaussian, such as the posterior of a fit, got {describe(q)}")
    return elbo_of(Target(log_joint, vectorize), q, samples, seed)


def elbo_of(target: Target, q: Gaussian, samples: int, seed: int) -> tuple[float, float]:
    """Return the evidence lower bound and its standard error for a wrapped function."""
    target.refresh()
    half = q.deviations(samples // 2, torch.Generator(q.device).manual_seed(seed))
    both = {name: torch.cat([x, -x]) for name, x in half.items()}
    value, error, _ = objective(q, both, target.values(q.points(both)))
    return -value, error


def objective(q: Gaussian, deviations: Blocks, values: Tensor) -> tuple[float, float, Tensor]:
    """Return ``E_q[l] - entropy``, its standard error, and the values of ``l`` minus the quadratic
    of ``q``.
    """
    residuals = values - 0.5 * q.whitened_square(deviations)
    # Averages over pairs are free of all odd parts of l.
    even = residuals.reshape(2, -1).mean(0) if len(residuals) > 1 else residuals
    value = even.mean().item() + 0.5 * q.logdet() - 0.5 * q.size * math.log(2 * math.pi)
    if len(residuals) == 1:
        return value, 0.0, residuals
    return value, (even.std() / len(even) ** 0.5).item() if len(even) > 1 else math.inf, residuals


def check_samples(samples: object, least: int) -> None:
    """Raise unless ``samples`` is an even number of at least ``least``."""
    if isinstance(samples, bool) or not isinstance(samples, int) or samples % 2 or samples < least:
        raise ValueError(
            f"samples must be an even number of at least {least}, for antithetic pairs, got "
            f"{samples!r}"
        )


@dataclass(frozen=True)
class Cloud:
    """Points around the mean, and what is known there."""

    target: Target  # the function
    q: Gaussian  # the Gaussian
    # Deviations of the first half of the points, which the second mirrors; None at the mean alone
    half: Blocks | None
    points: Blocks  # the points, along the first axis of each block
    residuals: Tensor  # values of l minus the quadratic of q
    gradients: Blocks  # gradients of l as events, empty where a source needs none

    def each(self, curvature: Callable[[SPD, Tensor, Tensor], Curvature]) -> Found:
        """Apply ``curvature(S, deviations, gradients)`` to all blocks, beside the mean
        gradients.
        """
        assert self.half is not None
        precisions, half, gradients = self.q.precisions, self.half, self.gradients
        return self.found({n: curvature(S, half[n], gradients[n]) for n, S in precisions.items()})

    def found(self, curvatures: dict[str, Curvature], damping: float = 0.0) -> Found:
        """Return curvatures beside the mean gradients."""
        return {n: g.mean(0) for n, g in self.gradients.items()}, curvatures, damping


# Gradients, curvatures and damping of an Estimate
Found = tuple[Blocks, dict[str, Curvature], float]


def _hessian(cloud: Cloud) -> Found:
    return cloud.found(
        {name: cloud.target.mean_hessian(cloud.points, name) for name in cloud.points}
    )


def _reparametrization(cloud: Cloud) -> Found:
    """Reparametrization trick: the part of the gradient that is odd in the deviation."""

    def curvature(S: SPD, half: Tensor, gradients: Tensor) -> Curvature:
        plus, minus = gradients.chunk(2)
        return _plus_precision(reparametrization(S, half, (plus - minus) / 2 - S.matmul(half)))

    return cloud.each(curvature)


def _gradient_outer_product(cloud: Cloud) -> Found:
    """``E_q[g g^T]``, with the outer products of ``S x``, whose mean is ``S``, for comparison."""

    def curvature(S: SPD, half: Tensor, gradients: Tensor) -> Curvature:
        weights = torch.cat([torch.ones(len(gradients)), torch.full((len(half),), -2.0)]).to(
            gradients
        )
        vectors = torch.cat([gradients, S.matmul(half)])
        return OuterProducts(vectors, weights / len(gradients), shift=1.0, semidefinite=False)

    if cloud.half is None:
        return cloud.found(
            {name: gradient_outer_product(g[0]) for name, g in cloud.gradients.items()}
        )
    return cloud.each(curvature)


def _reinforce(cloud: Cloud) -> Found:
    """REINFORCE: odd parts of the values give the gradient, even parts the curvature."""
    assert cloud.half is not None
    plus, minus = cloud.residuals.chunk(2)
    odd, even = (plus - minus) / 2, (plus + minus) / 2
    # The mean of all other pairs is the baseline of each: that is what the factor is for.
    centered = (even - even.mean()) * len(even) / (len(even) - 1)
    gradients: Blocks = {}
    curvatures: dict[str, Curvature] = {}
    for name, S in cloud.q.precisions.items():
        scores = S.matmul(cloud.half[name])
        gradients[name] = torch.tensordot(odd, scores, 1) / len(odd)
        curvatures[name] = _plus_precision(reinforce(S, cloud.half[name], centered))
    return gradients, curvatures, 0.0


def _from_model(method: str, cloud: Cloud) -> Found:
    """Ask the model for its curvature; the prior's is the damping."""
    model: Any = cloud.target.model
    names = list(cloud.points)
    cloud.target.ngrad += len(cloud.points[names[0]]) * (
        model.outputs if method == "gauss_newton" else 1
    )
    found = _as_dict(getattr(model, method)(unwrap(cloud.points)), names)
    return cloud.found(
        {n: _fitted(found[n], cloud.q.precisions[n]) for n in names}, model.prior_precision
    )


def _from_user(source: Callable[[Any], Any], cloud: Cloud) -> Found:
    """Average what a function of the user says at each of the points."""
    names = list(cloud.points)
    each = [_as_dict(source(unwrap(at)), names) for at in each_of(cloud.points)]
    return cloud.found(
        {n: _mean([_fitted(found[n], cloud.q.precisions[n]) for found in each]) for n in names}
    )


# The curvature estimates by name
SOURCES: dict[str, Callable[[Cloud], Found]] = {
    "hessian": _hessian,
    **{name: partial(_from_model, method) for name, method in FROM_MODEL.items()},
    "gradient-outer-product": _gradient_outer_product,
    "reparametrization": _reparametrization,
    "reinforce": _reinforce,
}


def _plus_precision(curvature: OuterProducts) -> OuterProducts:
    return replace(curvature, shift=curvature.shift + 1.0)


def _mean(found: Sequence[Curvature]) -> Curvature:
    """Return the mean of curvatures of the same kind."""
    dense = [each for each in found if isinstance(each, Dense)]
    if len(dense) == len(found):
        return Dense(torch.stack([each.matrix for each in dense]).mean(0))
    products = [each for each in found if isinstance(each, OuterProducts)]
    if len(products) != len(found):
        raise TypeError("curvature must be Dense at all points, or OuterProducts at all points")
    weights = [
        each.vectors.new_ones(len(each.vectors)) if each.weights is None else each.weights
        for each in products
    ]
    return OuterProducts(
        torch.cat([each.vectors for each in products]),
        torch.cat(weights) / len(found),
        shift=sum(each.shift for each in products) / len(found),
        semidefinite=all(each.semidefinite for each in products),
    )


def _fitted(curvature: Curvature, S: SPD) -> Curvature:
    """Return curvature with vectors in the shape that ``S`` acts on, summed up where there are more
    than a matrix has.

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


def _as_dict(curvature: Any, names: list[str]) -> Mapping[str, Curvature]:
    found = {ONLY: curvature} if isinstance(curvature, (Dense, OuterProducts)) else curvature
    if not isinstance(found, Mapping) or set(found) != set(names):
        raise TypeError(
            f"curvature must return Dense or OuterProducts, or a dictionary of them for {names}"
        )
    return found
