"""Hamiltonian Monte Carlo with a fitted Gaussian as its metric: slow, exact, a judge.

In the coordinates in which the Gaussian is standard normal, paths are circles where the posterior
is that Gaussian, so that a leapfrog of any model close to it accepts nearly all its proposals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eigenstep.core.checks import check_function, check_size, describe
from eigenstep.inference.gaussian import Blocks, Gaussian, Parameters, event, unwrap
from eigenstep.inference.models import Target

PATH = math.pi / 2
"""Mean length of a path: a quarter turn forgets the start if the posterior is the Gaussian."""
ACCEPTANCE = 0.8
"""Rate of accepted proposals to which the step size adapts."""


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
    dynamics = Dynamics(Target(log_joint), metric, seed)
    place = dynamics.start(chains)
    size = StepSize(warmup)
    accepted = 0.0
    kept: list[Blocks] = []
    steps = range(warmup + draws)
    for at in track(steps) if track else steps:
        place, rate = dynamics.move(place, size.value)
        size = size.adapted(at, rate)
        if at >= warmup:
            accepted += rate / draws
            kept.append(dynamics.points(place.z))
    stacked = {name: torch.stack([draw[name] for draw in kept]) for name in kept[0]}
    return Chains(unwrap(stacked), accepted, size.value, dynamics.target.ngrad)


@dataclass(frozen=True)
class StepSize:
    """A step size that adapts to a wanted rate of acceptance (Hoffman and Gelman, 2014).

    Attributes:
        warmup: draws during which it adapts; then it is the mean of its logarithm.
        log: logarithm of the present size.
        log_mean: running mean of the logarithm.
    """

    warmup: int
    log: float = math.log(0.5)
    log_mean: float = 0.0

    @property
    def value(self) -> float:
        """The present size."""
        return math.exp(self.log)

    def adapted(self, at: int, rate: float) -> StepSize:
        """Return the size after draw number ``at``, which was accepted at a rate."""
        if at >= self.warmup:
            return self
        log = self.log + (at + 1) ** -0.6 * (rate - ACCEPTANCE)
        log_mean = self.log_mean + (log - self.log_mean) * (at + 1) ** -0.75
        return StepSize(self.warmup, log_mean if at == self.warmup - 1 else log, log_mean)


class Place(NamedTuple):
    """Where all chains are: whitened coordinates, energies and their gradients."""

    z: Blocks
    energy: Tensor
    gradient: Blocks


class Dynamics:
    """Hamiltonian dynamics in coordinates in which a Gaussian is standard normal."""

    def __init__(self, target: Target, metric: Gaussian, seed: int) -> None:
        """Set up the dynamics; the seed decides momenta and lengths of paths."""
        self.target = target
        self.metric = metric
        self.generator = torch.Generator(metric.device).manual_seed(seed)

    def start(self, chains: int) -> Place:
        """Return draws from the Gaussian."""
        place = self.look(self._noise(chains))
        if not torch.isfinite(place.energy).all():
            raise ValueError(
                "log_joint must be finite at all draws from metric, where the chains start"
            )
        return place

    def points(self, z: Blocks) -> Any:
        """Return the parameters at whitened coordinates, ``w = mean + S^-1/2 z``."""
        precisions = self.metric.precisions
        return self.metric.points({name: S.matmul(z[name], -0.5) for name, S in precisions.items()})

    def look(self, z: Blocks) -> Place:
        """Return energies and gradients at whitened coordinates."""
        values, gradients = self.target.gradients(self.points(z), check=False)
        whitened = {
            name: S.matmul(event(S, gradients[name]), -0.5)
            for name, S in self.metric.precisions.items()
        }
        return Place(z, values, whitened)

    def move(self, place: Place, size: float) -> tuple[Place, float]:
        """Follow a path from each chain's place, and return where they are and how many agreed."""
        # A random number of steps breaks the periods of paths.
        length = 0.5 + torch.rand((), generator=self.generator).item()
        momentum = self._noise(len(place.energy))
        new = place
        end = momentum
        for _ in range(max(1, round(PATH / size * length))):
            half = {name: end[name] - 0.5 * size * new.gradient[name] for name in end}
            new = self.look({name: new.z[name] + size * half[name] for name in end})
            end = {name: half[name] - 0.5 * size * new.gradient[name] for name in end}
        change = place.energy + _kinetic(momentum) - new.energy - _kinetic(end)
        # A path that left the domain of the model has no finite energy, and no chance.
        chance = change.exp().clamp(max=1.0).nan_to_num(0.0)
        uniform = torch.empty_like(chance).uniform_(generator=self.generator)
        accept = uniform < chance
        moved = Place(
            {name: _choose(accept, new.z[name], place.z[name]) for name in place.z},
            torch.where(accept, new.energy, place.energy),
            {
                name: _choose(accept, new.gradient[name], place.gradient[name])
                for name in place.gradient
            },
        )
        return moved, chance.mean().item()

    def _noise(self, chains: int) -> Blocks:
        return {
            name: torch.randn(
                chains,
                *S.spectrum.shape,
                generator=self.generator,
                dtype=S.spectrum.dtype,
                device=S.spectrum.device,
            )
            for name, S in self.metric.precisions.items()
        }


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


def _kinetic(momentum: Blocks) -> Tensor:
    return torch.stack([0.5 * p.square().flatten(1).sum(1) for p in momentum.values()]).sum(0)


def _choose(accept: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(accept.reshape(-1, *[1] * (new.ndim - 1)), new, old)
