"""Estimates of ``E_q[gradient]`` and ``E_q[Hessian]`` of ``l = -log_joint`` under a Gaussian ``q`` (paper, Eq. 6).

Points come in antithetic pairs ``mean + x`` and ``mean - x``. Where an estimate is random even if ``l`` is quadratic,
the quadratic that ``q`` stands for is subtracted before and its known curvature ``S`` added after: no bias comes in,
and the noise vanishes as ``q`` comes close to a Gaussian posterior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ..curvature import Curvature, Dense, OuterProducts
from ..sources import gradient_outer_product, hessian, reinforce, reparametrization
from ..spd import SPD
from .gaussian import ONLY, Blocks, Gaussian, event, unwrap

SOURCES = ("hessian", "gauss-newton", "empirical-fisher", "gradient-outer-product", "reparametrization", "reinforce")
"""Names of the curvature estimates."""
FROM_MODEL = {"gauss-newton": "gauss_newton", "empirical-fisher": "empirical_fisher"}
"""Estimates that ``log_joint`` must bring along, as methods like those of ``eigenstep.inference.Supervised``."""


class NotFinite(ArithmeticError):
    """The objective or a derivative is NaN or infinite."""


@dataclass(frozen=True)
class Estimate:
    """What is known about the objective near a Gaussian.

    Attributes:
        value: ``E_q[l] - entropy``, the negative ELBO; at the mean alone, minus Laplace's log evidence.
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
    curvatures: dict[str, Curvature]
    damping: float = 0.0


class Target:
    """``l = -log_joint`` with its derivatives at many points, and a count of what was computed.

    A Hessian counts as one gradient for each parameter, a Gauss-Newton matrix as one for each output of the model.
    """

    def __init__(self, log_joint: Callable[[Any], Tensor], vectorize: bool = True) -> None:
        """Wrap a function of the parameters; with ``vectorize`` it is mapped over points by ``torch.func.vmap``."""
        self.log_joint = self.model = log_joint
        self.vectorize = vectorize
        self.nfev = self.ngrad = 0

    def refresh(self) -> None:
        """Draw a new minibatch, if ``log_joint`` has a method ``draw`` that returns a function for it."""
        draw = getattr(self.log_joint, "draw", None)
        self.model = draw() if draw else self.log_joint

    def loss(self, blocks: Blocks) -> Tensor:
        """Return ``l`` at one point."""
        value = self.model(unwrap(blocks))
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"log_joint must return one number as a tensor, got {shape}")
        return -value.reshape(())

    def values(self, points: Blocks) -> Tensor:
        """Return ``l`` at points along the first axis, shape ``(K,)``."""
        with torch.no_grad():
            values = self._map(self.loss, points)
        self.nfev += len(values)
        return _finite(values, "log_joint")

    def gradients(self, points: Blocks, check: bool = True) -> tuple[Tensor, Blocks]:
        """Return ``l`` and its gradients at points along the first axis."""
        gradients, values = self._map(grad_and_value(self.loss), points)
        self.ngrad += len(values)
        if not check:
            return values.detach(), {name: g.detach() for name, g in gradients.items()}
        _finite(values, "log_joint")
        return values.detach(), {
            name: _finite(g.detach(), "the gradient of log_joint") for name, g in gradients.items()
        }

    def mean_hessian(self, points: Blocks, name: str) -> Dense:
        """Return the mean Hessian of ``l`` with respect to one block."""
        mean = points[name].mean(0)

        def shifted(tensor: Tensor) -> Tensor:
            """The mean of ``l`` over all points, moved so that their mean is ``tensor`` in this block."""
            return self._map(self.loss, {**points, name: points[name] - mean + tensor}).mean()

        try:
            found = hessian(shifted, mean)
        except ValueError as error:
            raise NotFinite(f"the Hessian of log_joint cannot be used: {error}") from error
        self.ngrad += len(points[name]) * mean.numel()
        return found

    def _map(self, function: Callable[[Blocks], Any], points: Blocks) -> Any:
        if self.vectorize:
            return vmap(function, randomness="same")(points)
        results = [function(at) for at in _each(points)]
        if isinstance(results[0], Tensor):
            return torch.stack(results)
        gradients, values = zip(*results, strict=True)
        return {name: torch.stack([g[name] for g in gradients]) for name in points}, torch.stack(values)


def estimate(
    target: Target,
    q: Gaussian,
    source: str | Callable[[Any], Any],
    samples: int,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Estimate value, gradient and curvature of the variational objective at ``q``.

    Args:
        target: the function.
        q: where.
        source: one of :data:`SOURCES`, or a function of the parameters that returns their curvature (for several
            blocks, a dictionary).
        samples: number of points, even; 0 takes the mean alone.
        generator: source of randomness.
    """
    target.refresh()
    pairs = samples // 2
    half = (
        q.deviations(pairs, generator)
        if pairs
        else {n: m.new_zeros(1, *q.precisions[n].sizes) for n, m in q.means.items()}
    )
    both = {name: torch.cat([x, -x]) for name, x in half.items()} if pairs else half
    points = q.points(both)
    if source == "reinforce":
        values, gradients = target.values(points), Blocks()
    else:
        values, gradients = target.gradients(points)
    value, error, residuals = objective(q, both, values)
    aim = value if pairs else values[0].item()
    if source == "reinforce":
        return Estimate(value, error, aim, *_from_values(q, half, residuals))
    events = {name: event(q.precisions[name], g) for name, g in gradients.items()}
    curvatures, damping = _curvatures(target, q, source, half if pairs else None, points, events)
    return Estimate(value, error, aim, {n: g.mean(0) for n, g in events.items()}, curvatures, damping)


def elbo(
    log_joint: Callable[[Any], Tensor], q: Gaussian, samples: int = 1000, *, seed: int = 0, vectorize: bool = True
) -> tuple[float, float]:
    """Return an estimate of the evidence lower bound ``E_q[log_joint] + entropy`` in nats, and its standard error.

    Args:
        log_joint: the log density of data and parameters, as a function of the parameters.
        q: the Gaussian.
        samples: number of points, even.
        seed: of the random numbers.
        vectorize: whether ``torch.func.vmap`` may evaluate all points at once.
    """
    check_samples(samples, 4)
    return elbo_of(Target(log_joint, vectorize), q, samples, seed)


def elbo_of(target: Target, q: Gaussian, samples: int, seed: int) -> tuple[float, float]:
    """Return the evidence lower bound and its standard error for a wrapped function."""
    target.refresh()
    half = q.deviations(samples // 2, torch.Generator(q.device).manual_seed(seed))
    both = {name: torch.cat([x, -x]) for name, x in half.items()}
    value, error, _ = objective(q, both, target.values(q.points(both)))
    return -value, error


def objective(q: Gaussian, deviations: Blocks, values: Tensor) -> tuple[float, float, Tensor]:
    """Return ``E_q[l] - entropy``, its standard error, and the values of ``l`` minus the quadratic of ``q``.

    Args:
        q: the Gaussian.
        deviations: ``w - mean`` of the points: all ``x``, then all ``-x`` in the same order; or zero, once.
        values: ``l`` at these points.
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
        raise ValueError(f"samples must be an even number of at least {least}, for antithetic pairs, got {samples!r}")


def _curvatures(
    target: Target, q: Gaussian, source: Any, half: Blocks | None, points: Blocks, gradients: Blocks
) -> tuple[dict[str, Curvature], float]:
    names = list(q.means)
    if source == "hessian":
        return {name: target.mean_hessian(points, name) for name in names}, 0.0
    if source == "reparametrization":
        assert half is not None
        return {name: _from_gradients(q.precisions[name], half[name], gradients[name]) for name in names}, 0.0
    if source == "gradient-outer-product":
        if half is None:
            return {name: gradient_outer_product(gradients[name][0]) for name in names}, 0.0
        return {name: _outer_products(q.precisions[name], half[name], gradients[name]) for name in names}, 0.0
    if callable(source):
        each = [_as_dict(source(unwrap(at)), names) for at in _each(points)]
        return {name: _mean([found[name] for found in each], q.precisions[name]) for name in names}, 0.0
    model: Any = target.model
    target.ngrad += len(points[names[0]]) * (model.outputs if source == "gauss-newton" else 1)
    found = _as_dict(getattr(model, FROM_MODEL[source])(unwrap(points)), names)
    return {name: _mean([found[name]], q.precisions[name]) for name in names}, model.prior_precision


def _from_values(q: Gaussian, half: Blocks, residuals: Tensor) -> tuple[Blocks, dict[str, Curvature]]:
    """REINFORCE: odd parts of the values give the gradient, even parts the curvature."""
    plus, minus = residuals.chunk(2)
    odd, even = (plus - minus) / 2, (plus + minus) / 2
    # The mean of all other pairs is the baseline of each: that is what the factor is for.
    centered = (even - even.mean()) * len(even) / (len(even) - 1)
    gradients: Blocks = {}
    curvatures: dict[str, Curvature] = {}
    for name, S in q.precisions.items():
        scores = S.matmul(half[name])
        gradients[name] = torch.tensordot(odd, scores, 1) / len(odd)
        curvatures[name] = _plus_precision(reinforce(S, half[name], centered))
    return gradients, curvatures


def _from_gradients(S: SPD, half: Tensor, gradients: Tensor) -> Curvature:
    """Reparametrization trick: the part of the gradient that is odd in the deviation."""
    plus, minus = gradients.chunk(2)
    return _plus_precision(reparametrization(S, half, (plus - minus) / 2 - S.matmul(half)))


def _outer_products(S: SPD, half: Tensor, gradients: Tensor) -> Curvature:
    """``E_q[g g^T]``, with the outer products of ``S x``, whose mean is ``S``, for comparison."""
    expected = S.matmul(half)
    weights = torch.cat([torch.ones(len(gradients)), torch.full((len(half),), -2.0)]).to(gradients) / len(gradients)
    return OuterProducts(torch.cat([gradients, expected]), weights, shift=1.0, semidefinite=False)


def _plus_precision(curvature: OuterProducts) -> OuterProducts:
    return replace(curvature, shift=curvature.shift + 1.0)


def _mean(found: list[Curvature], S: SPD) -> Curvature:
    first = found[0]
    if isinstance(first, Dense):
        return Dense(torch.stack([each.matrix for each in found if isinstance(each, Dense)]).mean(0))
    products = [each for each in found if isinstance(each, OuterProducts)]
    if len(products) != len(found) or any(each.weights is not None or each.shift for each in products):
        raise TypeError("curvature functions must return Dense, or OuterProducts without weights and shift")
    return OuterProducts(event(S, torch.cat([each.vectors for each in products])) / len(found) ** 0.5)


def _as_dict(curvature: Any, names: list[str]) -> Mapping[str, Curvature]:
    found = {ONLY: curvature} if isinstance(curvature, (Dense, OuterProducts)) else curvature
    if not isinstance(found, Mapping) or set(found) != set(names):
        raise TypeError(f"curvature must return Dense or OuterProducts, or a dictionary of them for {names}")
    return found


def _each(points: Blocks) -> list[Blocks]:
    count = len(next(iter(points.values())))
    return [{name: tensor[at] for name, tensor in points.items()} for at in range(count)]


def _finite(tensor: Tensor, what: str) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise NotFinite(
            f"{what} is NaN or infinite at {int((~torch.isfinite(tensor)).sum())} of {tensor.numel()} entries"
        )
    return tensor
