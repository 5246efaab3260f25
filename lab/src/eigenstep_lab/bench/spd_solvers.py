"""Run our solver, other packages and baselines on the same problems, metered alike.

The meter sits inside the function that a solver minimizes: it counts values, gradients and products
with the Hessian, and ends the run at the first value within the wanted gap, so no solver has to
test for it. pymanopt gets gradients and products with the Hessian by hand in numpy; ours and geoopt
use autodiff.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eigenstep.core.step import symmetrize
from eigenstep.manifold import minimize_spd

from ..baselines import rgd
from ..console import require_peer
from ..extras import BarzilaiBorwein
from ..problems.spd import Problem


class Over(Exception):
    """The run has reached its goal, or the end of its budget."""


@dataclass
class Meter:
    """Counts of one run.

    Attributes:
        problem: what is minimized.
        gap: the run ends at the first value that is this close to the least one.
        max_gradients: the run ends after this many gradients and products with the Hessian.
        max_seconds: the run ends after this much CPU time.
        values: how often the function was computed.
        gradients: how often the gradient was.
        products: how often the Hessian was applied.
        best: least distance from the least value.
        trace: gradients and ``best``, whenever that fell by a fifth.
        message: how the run ended.
    """

    problem: Problem
    gap: float
    max_gradients: int
    max_seconds: float
    values: int = 0
    gradients: int = 0
    products: int = 0
    best: float = math.inf
    trace: list[tuple[int, float]] = field(default_factory=list)
    message: str = ""
    begin: float = 0.0

    def see(self, value: float) -> None:
        """Take note of a value."""
        self.values += 1
        distance = value - self.problem.least
        if distance < self.best:
            self.best = distance
            if not self.trace or distance < 0.8 * self.trace[-1][1]:
                self.trace.append((self.gradients + self.products, distance))
        if distance <= self.gap:
            raise Over("reached")
        if self.gradients + self.products >= self.max_gradients:
            raise Over(f"{self.max_gradients} gradients")
        if time.process_time() - self.begin >= self.max_seconds:
            raise Over(f"{self.max_seconds:g} s")

    def run(self, solve: Solver) -> float:
        """Let a solver run, and return the CPU time that it took."""
        self.begin = time.process_time()
        try:
            solve(self)
            self.message = "stopped"
        except Over as over:
            self.message = str(over)
        return time.process_time() - self.begin

    def differentiable(self, S: Tensor) -> Tensor:
        """Return the value at a torch tensor, and count how often it is differentiated."""
        if S.requires_grad:
            S.register_hook(self._count)  # type: ignore[no-untyped-call]
        value = self.problem.value(S)
        self.see(value.item())
        return value

    def _count(self, gradient: Tensor) -> None:
        self.gradients += 1

    def gradient(self, S: Tensor) -> Tensor:
        """Return the gradient, by hand."""
        self.gradients += 1
        gradient: Tensor = self.problem.gradient(S)
        return gradient


Solver = Callable[[Meter], None]


def ours(meter: Meter, **options: Any) -> None:
    """Minimize with ``minimize_spd``."""
    start = torch.eye(meter.problem.size, dtype=torch.float64)
    minimize_spd(meter.differentiable, start, gtol=0.0, max_iter=10**6, **options)


def pymanopt(meter: Meter, optimizer: str) -> None:
    """Minimize with an optimizer of pymanopt and hand-written derivatives."""
    package = require_peer("pymanopt")
    manifold = require_peer("pymanopt.manifolds").SymmetricPositiveDefinite(meter.problem.size)
    given = meter.problem.numpy()

    def cost(S: Any) -> float:
        value = float(given.value(S))
        meter.see(value)
        return value

    def gradient(S: Any) -> Any:
        meter.gradients += 1
        return given.gradient(S)

    def hessian(S: Any, direction: Any) -> Any:
        meter.products += 1
        return given.hessian(S, direction)

    decorate = package.function.numpy(manifold)
    problem = package.Problem(
        manifold,
        decorate(cost),
        euclidean_gradient=decorate(gradient),
        euclidean_hessian=decorate(hessian),
    )
    make = getattr(require_peer("pymanopt.optimizers"), optimizer)
    never = {
        "max_iterations": 10**6,
        "min_gradient_norm": 0.0,
        "min_step_size": 0.0,
        "max_time": math.inf,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(verbosity=0, **never).run(
            problem, initial_point=torch.eye(meter.problem.size).double().numpy()
        )


SEARCHING: dict[str, Solver] = {
    "ours": partial(ours, method="lbfgs"),
    "ours, Barzilai-Borwein": partial(ours, method=BarzilaiBorwein),
    "ours, no decomposition": partial(ours, method="lbfgs", retraction="spectral"),
    "pymanopt steepest descent": partial(pymanopt, optimizer="SteepestDescent"),
    "pymanopt conjugate gradient": partial(pymanopt, optimizer="ConjugateGradient"),
    "pymanopt trust regions": partial(pymanopt, optimizer="TrustRegions"),
}
"""Solvers that find their step sizes by themselves."""


def retraction(meter: Meter, lr: float) -> None:
    """Descend with the second-order retraction and a fixed step size."""
    S = torch.eye(meter.problem.size, dtype=torch.float64)
    while True:
        _watch(meter, S)
        S = rgd.retraction_step(S, meter.gradient(S), lr)


def cholesky(meter: Meter, lr: float) -> None:
    """Descend in a Cholesky factor with a fixed step size."""
    C = torch.eye(meter.problem.size, dtype=torch.float64)
    while True:
        S = symmetrize(C @ C.mT)
        _watch(meter, S)
        C = rgd.cholesky_step(C, meter.gradient(S), lr)


def spectral(meter: Meter, lr: float, retraction: str) -> None:
    """Descend with our scheme and a fixed step size, the paper's beta."""
    ours(meter, lr=lr, retraction=retraction)


def geoopt(meter: Meter, lr: float, optimizer: str) -> None:
    """Descend with an optimizer of geoopt and a fixed step size."""
    package = require_peer("geoopt")
    start = torch.eye(meter.problem.size, dtype=torch.float64)
    S = package.ManifoldParameter(start, manifold=package.SymmetricPositiveDefinite())
    stepper = getattr(package.optim, optimizer)([S], lr=lr)
    while True:
        _watch(meter, S.detach(), see=False)
        stepper.zero_grad()
        torch.autograd.backward(meter.differentiable(S))
        stepper.step()


def _watch(meter: Meter, S: Tensor, see: bool = True) -> None:
    """Look at the matrix of a scheme that does not do so itself."""
    if not torch.isfinite(S).all():
        raise Over("diverged")
    if torch.linalg.cholesky_ex(S).info.item():
        raise Over("left the cone")
    if see:
        meter.see(meter.problem.value(S).item())


FIXED: dict[str, Callable[..., None]] = {
    "retraction RGD": retraction,
    "Cholesky RGD": cholesky,
    "paper's scheme": partial(spectral, retraction="paper"),
    "geoopt SGD": partial(geoopt, optimizer="RiemannianSGD"),
    "geoopt Adam": partial(geoopt, optimizer="RiemannianAdam"),
}
"""Schemes that need a step size."""
RATES = (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3)
"""Step sizes that are tried for each of them."""


def best_fixed(name: str, make: Callable[[], Meter]) -> tuple[Meter, dict[str, str]]:
    """Run a scheme with every step size; return the run that got furthest, or there first, and how
    each ended.
    """
    runs, endings = [], {}
    for lr in RATES:
        meter = make()
        try:
            meter.run(partial(FIXED[name], lr=lr))
        except (ValueError, RuntimeError) as error:  # torch.linalg's errors are RuntimeErrors
            meter.message = f"error: {str(error).splitlines()[0][:60]}"
        runs.append(meter)
        endings[f"{lr:.3g}"] = meter.message
    there = [meter for meter in runs if meter.message == "reached"]
    if there:
        return min(there, key=lambda meter: meter.gradients), endings
    return min(runs, key=lambda meter: meter.best), endings
