"""Hamiltonian Monte Carlo with a fitted Gaussian as its metric: slow, exact, a judge.

In the coordinates in which the Gaussian is standard normal, paths are circles where the posterior
is that Gaussian, so that a leapfrog of any model close to it accepts nearly all its proposals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eigenstep.core.checks import check_function, check_number, check_size, describe
from eigenstep.inference.gaussian import Blocks, Gaussian, Parameters, event, unwrap
from eigenstep.inference.models import Target


@dataclass(frozen=True)
class Chains:
    """Draws from a posterior.

    Attributes:
        draws: parameters, shape ``(draws, chains, *shape)`` each.
        acceptance: fraction of accepted proposals.
        step_size: the length of a leapfrog step that was adapted to.
        ngrad: how many gradients were computed.
    """

    draws: Parameters
    acceptance: float
    step_size: float
    ngrad: int

    def stacked(self) -> Parameters:
        """Return all draws of all chains along one axis."""
        draws = self.draws
        return (
            {n: x.flatten(0, 1) for n, x in draws.items()}
            if isinstance(draws, dict)
            else draws.flatten(0, 1)
        )


def sample_posterior(
    log_joint: Callable[[Any], Tensor],
    metric: Gaussian,
    *,
    chains: int = 4,
    warmup: int = 200,
    draws: int = 1000,
    path: float = math.pi / 2,
    acceptance: float = 0.8,
    seed: int = 0,
    track: Callable[[range], Any] | None = None,
) -> Chains:
    """Draw from a posterior by Hamiltonian Monte Carlo.

    Args:
        log_joint: log density of data and parameters.
        metric: a Gaussian like the posterior: its precision is the mass matrix, and chains start
            from draws of it.
        chains: independent chains, which run side by side.
        warmup: draws during which the step size adapts, and that are thrown away.
        draws: draws of each chain that are kept.
        path: mean length of a path; a quarter turn, the default, forgets the start if the posterior
            is the Gaussian.
        acceptance: what fraction of proposals the step size is adapted to.
        seed: of all random numbers.
        track: wraps the range of draws, to show progress.
    """
    check_function(log_joint, "log_joint")
    if not isinstance(metric, Gaussian):
        raise TypeError(
            f"metric must be a Gaussian, such as the posterior of a fit, got {describe(metric)}"
        )
    for value, name in ((chains, "chains"), (warmup, "warmup"), (draws, "draws")):
        check_size(value, name)
    check_number(path, "path", 1e-3, 100.0)
    check_number(acceptance, "acceptance", 0.1, 0.99)
    target = Target(log_joint)
    generator = torch.Generator(metric.device).manual_seed(seed)

    def look(z: Blocks) -> tuple[Tensor, Blocks]:
        """Return energy and gradient for whitened coordinates, ``w = mean + S^-1/2 z``."""
        points = metric.points(
            {name: S.matmul(z[name], -0.5) for name, S in metric.precisions.items()}
        )
        values, gradients = target.gradients(points, check=False)
        return values, {
            n: S.matmul(event(S, gradients[n]), -0.5) for n, S in metric.precisions.items()
        }

    z = {n: _noise(S.spectrum, chains, generator) for n, S in metric.precisions.items()}
    energy, gradient = look(z)
    if not torch.isfinite(energy).all():
        raise ValueError(
            "log_joint must be finite at all draws from metric, where the chains start"
        )
    log_step, log_mean, accepted = math.log(0.5), 0.0, 0.0
    kept: list[Blocks] = []
    steps = range(warmup + draws)
    for at in track(steps) if track else steps:
        size = math.exp(log_step)
        # A random number of steps breaks the periods of paths.
        count = max(1, round(path / size * (0.5 + torch.rand((), generator=generator).item())))
        momentum = {n: _noise(S.spectrum, chains, generator) for n, S in metric.precisions.items()}
        new, new_energy, new_gradient, end = z, energy, gradient, momentum
        for _ in range(count):
            half = {n: end[n] - 0.5 * size * new_gradient[n] for n in z}
            new = {n: new[n] + size * half[n] for n in z}
            new_energy, new_gradient = look(new)
            end = {n: half[n] - 0.5 * size * new_gradient[n] for n in z}
        # A path that left the domain of the model has no finite energy, and no chance.
        chance = (
            (energy + _kinetic(momentum) - new_energy - _kinetic(end))
            .exp()
            .clamp(max=1.0)
            .nan_to_num(0.0)
        )
        accept = (
            torch.rand(chance.shape, generator=generator, dtype=chance.dtype, device=chance.device)
            < chance
        )
        z = {n: _choose(accept, new[n], z[n]) for n in z}
        gradient = {n: _choose(accept, new_gradient[n], gradient[n]) for n in z}
        energy = torch.where(accept, new_energy, energy)
        rate = chance.mean().item()
        if at < warmup:
            log_step += (at + 1) ** -0.6 * (rate - acceptance)
            log_mean += (log_step - log_mean) * (at + 1) ** -0.75
            log_step = log_mean if at == warmup - 1 else log_step
        else:
            accepted += rate / draws
            kept.append(
                metric.points({n: S.matmul(z[n], -0.5) for n, S in metric.precisions.items()})
            )
    stacked = {n: torch.stack([each[n] for each in kept]) for n in z}
    return Chains(unwrap(stacked), accepted, math.exp(log_step), target.ngrad)


def diagnostics(draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return the split R-hat and the effective sample size of each number.

    R-hat compares the variance between halves of chains with the one within; it is near 1 for
    chains that agree. The effective sample size divides the number of draws by the sum of their
    autocorrelations (Geyer's initial sequence).

    Args:
        draws: shape ``(draws, chains, ...)``.
    """
    length = len(draws) // 2
    halves = torch.cat([draws[:length], draws[length : 2 * length]], 1)
    within = halves.var(0).mean(0)
    between = halves.mean(0).var(0)
    total = within * (length - 1) / length + between
    spectrum = torch.fft.rfft(halves - halves.mean(0), n=2 * length, dim=0)
    covariance = (
        torch.fft.irfft(spectrum.abs().square(), n=2 * length, dim=0)[:length].mean(1) / length
    )
    correlation = 1 - (within - covariance) / total
    pairs = correlation[: length // 2 * 2].unflatten(0, (-1, 2)).sum(1)
    positive = (pairs > 0).cumprod(0)
    monotone = pairs.cummin(0).values
    time = (2 * (monotone * positive).sum(0) - 1).clamp_min(1e-3)
    return (total / within).sqrt(), halves.shape[0] * halves.shape[1] / time


def _noise(like: Tensor, chains: int, generator: torch.Generator) -> Tensor:
    return torch.randn(
        chains, *like.shape, generator=generator, dtype=like.dtype, device=like.device
    )


def _kinetic(momentum: Blocks) -> Tensor:
    return torch.stack([0.5 * p.square().flatten(1).sum(1) for p in momentum.values()]).sum(0)


def _choose(accept: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(accept.reshape(-1, *[1] * (new.ndim - 1)), new, old)
