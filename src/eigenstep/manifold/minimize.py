"""Minimize a differentiable function of a positive-definite matrix, which stays one all the way."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ..core.checks import (
    check_beside,
    check_finite,
    check_function,
    check_number,
    check_size,
    choose,
    describe,
)
from ..core.matrices import SPD
from ..core.progress import Show, bar
from ..core.result import RUNNING, Ending, Result
from .descent import METHODS, Direction, LineSearch, Way, fixed_steps
from .objective import Evaluation, Objective
from .point import Point, Retraction
from .retractions import RETRACTIONS


class Iterate(NamedTuple):
    """What is kept of each point on the way."""

    fun: float
    """The objective."""
    gradient_norm: float
    """Length of its Riemannian gradient."""
    ngrad: int
    """Gradients computed so far."""
    nfev: int
    """Values computed so far."""


@dataclass(frozen=True, kw_only=True)
class SPDResult(Result):
    """What came out, beside how it went (``eigenstep.core.result.Result``).

    The ``reason`` is "gtol" (a short gradient, and nothing left to gain), "rounding" (nothing left
    to gain that values could show), "stuck" (no step helps), "nonfinite", "max_iter" or "callback".
    ``history`` has each ``Iterate``.

    Attributes:
        point: the best point found (with fixed step sizes: the last).
        fun: value of the objective there.
    """

    point: Point = field(repr=False)
    fun: float

    @property
    def S(self) -> SPD:
        """The matrix, positive definite, of the structure of the start."""
        return self.point.S

    @property
    def x(self) -> tuple[Tensor, ...]:
        """The Euclidean tensors that belong to it."""
        return self.point.others


def minimize_spd(  # noqa: PLR0913
    fun: Callable[..., Tensor],
    S0: SPD | Tensor,
    x0: Tensor | Sequence[Tensor] = (),
    *,
    factored: bool = False,
    method: str | Callable[[], Direction] = "lbfgs",
    retraction: str | Retraction = "geodesic",
    lr: float | Callable[[int], float] | None = None,
    momentum: float = 0.0,
    max_step: float = 2.0,
    gtol: float = 1e-6,
    max_iter: int = 1000,
    callback: Callable[[SPDResult], object] | None = None,
    progress: bool = False,
) -> SPDResult:
    """Minimize a function over positive-definite matrices, and over tensors beside them.

    Gradients come from autodiff; steps follow the affine-invariant (Fisher-Rao) geometry. The
    matrix is held as ``B Diag(d) B^T``, or by a frame ``F = B Diag(d)^1/2 O^T``, so it cannot leave
    the cone of positive-definite matrices. Eigenvalues tell how long a step beyond ``max_step`` is,
    and whether a matrix has shrunk too far.

    Args:
        fun: ``fun(S)`` or ``fun(S, *x)``, a scalar tensor that depends differentiably on its
            arguments. While the step size is searched for, values that are not finite and errors of
            ``torch.linalg`` count as too large.
        S0: where to start: a symmetric positive-definite tensor, or ``Full``, ``Diagonal`` or
            ``Kronecker``, whose structure is kept. Leading dimensions make a batch of matrices,
            over which to minimize jointly.
        x0: Euclidean tensors to minimize over as well.
        factored: give ``fun`` the factored matrix with its methods ``matmul``, ``solve``,
            ``logdet``, ``log_prob`` and so on (``TangentView``) in place of a dense tensor: more
            accurate where the matrix is ill-conditioned, because nothing needs to be decomposed or
            inverted.
        method: "lbfgs" or "gradient", each with a search for the step size, or a function that
            makes a rule of your own (``eigenstep.manifold.descent.Direction``).
        retraction: how the matrix follows a step: "geodesic" (exact; takes a singular value
            decomposition where eigenvalues are needed), "spectral" (the paper's update without any
            decomposition, made safe at equal eigenvalues), "paper" (the paper's update to the
            letter), or a function (``eigenstep.manifold.retractions``).
        lr: a fixed step size, or a function of the iteration that gives it, instead of ``method``
            and a search: for stochastic objectives. It is the paper's beta-2, as everywhere: a step
            is ``S - 2 lr S G S`` to first order, with ``G`` the gradient with respect to ``S``.
        momentum: with ``lr``, the part of the previous velocity to keep, below 1.
        max_step: no step may change the logarithm of an eigenvalue by more than this.
        gtol: stop where the Riemannian gradient is at most this long and, without ``lr``, its
            curvature promises no further decrease by more than this, as for a quadratic function:
            in tests the rest was below ten times it. One or two more gradients are spent on that,
            more where the objective is flat.
        max_iter: stop after this many steps.
        callback: called with the result so far at the start and after each step; ``True`` stops the
            search.
        progress: show a progress bar; needs the package ``rich``.

    Returns:
        The point found and how the search went; see ``SPDResult``.
    """
    check_function(fun, "fun")
    _check_options(lr, momentum, max_step, gtol, max_iter, callback)
    retraction = choose(retraction, RETRACTIONS, "retraction")
    point = Point.start(S0, retraction, "S0")
    point = point.beside(_tensors(x0, point.S.spectrum))
    start = Objective(fun, factored).at(point)
    if not math.isfinite(start.value):
        raise ValueError(f"fun must be finite at S0, got {start.value}")
    if lr is None:
        rule = choose(method, METHODS, "method")
        way = LineSearch(start, rule, max_step, gtol).descend()
    else:
        sizes = lr if callable(lr) else lambda _: lr
        way = fixed_steps(start, sizes, momentum, max_step, gtol)
    run = _Run(start, keep_best=lr is None)
    with bar(max_iter) if progress else nullcontext() as show:
        return run.follow(way, max_iter, callback, show)


class _Run:
    """What came out so far."""

    def __init__(self, start: Evaluation, keep_best: bool) -> None:
        self.best = start
        self.keep_best = keep_best
        self.latest: Evaluation | None = None
        self.history: list[Iterate] = []

    def follow(
        self,
        way: Way,
        max_iter: int,
        callback: Callable[[SPDResult], object] | None,
        show: Show | None,
    ) -> SPDResult:
        """Go down the way to its end."""
        for at, ending in way:
            self.visit(at)
            if show:
                text = f"value {at.value:.8g}, gradient {at.gradient.norm().item():.2e}"
                show(len(self.history), text)
            ending = ending or self.verdict(max_iter, callback)
            if ending:
                return self.result(ending)
        raise AssertionError("a way ends with a reason")

    def visit(self, at: Evaluation) -> None:
        """Take note of a point, unless it is the latest one."""
        if at is self.latest:
            return
        self.latest = at
        norm = at.gradient.norm().item()
        self.history.append(Iterate(at.value, norm, at.objective.ngrad, at.objective.nfev))
        if not self.keep_best or at.value <= self.best.value:
            self.best = at

    def verdict(
        self, max_iter: int, callback: Callable[[SPDResult], object] | None
    ) -> Ending | None:
        """Tell whether the run is over, whatever is left to gain."""
        if not math.isfinite(self.history[-1].gradient_norm):
            return Ending("nonfinite", "the gradient is not finite")
        if len(self.history) > max_iter:
            return Ending("max_iter", f"max_iter={max_iter} steps are done")
        if callback is not None and callback(self.result(RUNNING)) is True:
            return Ending("callback", "the callback asked to stop", success=True)
        return None

    def result(self, ending: Ending) -> SPDResult:
        """Return what came out."""
        return SPDResult(
            **vars(ending),
            nit=len(self.history) - 1,
            nfev=self.best.objective.nfev,
            ngrad=self.best.objective.ngrad,
            history=self.history,
            point=self.best.point,
            fun=self.best.value,
        )


def _tensors(x0: Tensor | Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Return the Euclidean tensors, after a check."""
    if not isinstance(x0, (Tensor, Sequence)):
        raise TypeError(f"x0 must be a tensor or a sequence of tensors, got {describe(x0)}")
    tensors = [x0] if isinstance(x0, Tensor) else list(x0)
    for index, tensor in enumerate(tensors):
        check_finite(tensor, f"x0[{index}]")
        check_beside(tensor, f"x0[{index}]", like, "S0")
    return [tensor.detach() for tensor in tensors]


def _check_options(
    lr: object, momentum: float, max_step: float, gtol: float, max_iter: int, callback: object
) -> None:
    if lr is not None and not callable(lr):
        check_number(lr, "lr", 0.0)
    check_number(momentum, "momentum", 0.0, 1.0)
    if momentum and lr is None:
        raise ValueError("momentum needs fixed step sizes: pass lr, too")
    check_number(max_step, "max_step", 1e-12, 100.0)
    check_number(gtol, "gtol", 0.0)
    check_size(max_iter, "max_iter")
    if callback is not None:
        check_function(callback, "callback")
