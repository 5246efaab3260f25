"""Independent searches side by side: all points of all runs in one array."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eigenstep.core.checks import check_function, check_number
from eigenstep.core.numpy_twin import Array
from eigenstep.search.arguments import check_options, check_population, check_start
from eigenstep.search.gaussian import SpectralGaussian
from eigenstep.search.sampling import default_population, even
from eigenstep.search.space import Form, Point, sanitize, to_numpy
from eigenstep.search.stopping import MAX_CONDITION


@dataclass(frozen=True)
class BatchResult:
    """What came out of a batch of searches, an entry for each run.

    Attributes:
        x: best points, shape ``(R, d)``.
        fun: their values, shape ``(R,)``; ``inf`` where no evaluation gave a finite one.
        nfev: evaluations until the run was over, shape ``(R,)``.
        success: which runs reached the target or, without one, converged, at a finite value.
    """

    x: Point
    fun: Array
    nfev: NDArray[np.int64]
    success: NDArray[np.bool_]


def minimize_batch(
    fun: Callable[[Any], object],
    x0: Point,
    sigma0: float,
    *,
    population: int | None = None,
    seed: int | None = None,
    target: float | None = None,
    max_evals: int | None = None,
    tolx: float = 1e-11,
) -> BatchResult:
    """Run independent searches side by side, ten times as fast in small dimensions.

    Args:
        fun: takes points of shape ``(R, K, d)`` and returns values of shape ``(R, K)``. Each run
            may have a function of its own. Runs that are over keep their place; what is computed
            for them is ignored.
        x0: starts, shape ``(R, d)``; points have its type (numpy or torch, with device and dtype).
        sigma0: how far from the starts to look at first.
        population: points in each generation of each run; ``4 + 3 log d``, rounded up to even, by
            default.
        seed: the same seed gives the same runs.
        target: a run is over at this value.
        max_evals: a run is over after so many evaluations; 10,000 times the dimension by default.
        tolx: a run is over where its distribution is narrower than this.
    """
    check_function(fun, "fun")
    check_number(sigma0, "sigma0", 1e-150, 1e150)
    check_options(
        sizes={"max_evals": max_evals}, numbers={"tolx": (tolx, 0.0), "target": (target, -np.inf)}
    )
    check_population(population)
    form, starts = Form(x0), to_numpy(x0)
    if starts.ndim != 2 or 0 in starts.shape or not np.isfinite(starts).all():
        raise ValueError(f"x0 must be finite, of shape (runs, dimension); got shape {starts.shape}")
    runs, d = starts.shape
    population = even(default_population(d)) if population is None else population
    max_evals = 10_000 * d if max_evals is None else max_evals
    for start in starts:
        check_start(start, np.full(d, sigma0), tolx, form)

    rng = np.random.default_rng(seed)
    state = SpectralGaussian.start(starts.copy(), sigma0)
    best_x = starts.copy()
    best = np.full(runs, np.inf)
    nfev = np.zeros(runs, dtype=np.int64)
    success = np.zeros(runs, dtype=bool)
    active = np.ones(runs, dtype=bool)
    while active.any():
        # All runs that go on have used the same number of evaluations; the last generation may be a
        # smaller one.
        count = min(population, max_evals - int(nfev.max()))
        z = state.draw(rng, count)
        x = state.sample(z)
        values = to_numpy(fun(form.make(x)))
        if values.shape != (runs, count):
            raise ValueError(f"fun must return values of shape {(runs, count)}, got {values.shape}")
        values = sanitize(values)
        nfev[active] += count
        least = values.argmin(-1)
        lowest = np.take_along_axis(values, least[:, None], -1)[:, 0]
        better = active & (lowest < best)
        best[better] = lowest[better]
        best_x[better] = x[better, least[better]]
        if count > 1:
            state = _keep_finished(state, state.update(z, values), active)
        axes = state.axes()
        longest, shortest = axes.max(-1), axes.min(-1)
        converged = longest < tolx
        success |= active & np.isfinite(best) & (converged if target is None else best <= target)
        degenerate = longest > shortest * MAX_CONDITION**0.5
        active &= ~(success | converged | degenerate | (nfev >= max_evals))
    return BatchResult(form.make(best_x), best, nfev, success)


def _keep_finished(
    old: SpectralGaussian, new: SpectralGaussian, active: NDArray[np.bool_]
) -> SpectralGaussian:
    """Return the new state, with the old arrays for runs that are over."""
    if active.all():
        return new
    kept = {}
    for name in ("mean", "sigma", "log_eigs", "basis", "path", "step_path", "average"):
        before, after = getattr(old, name), getattr(new, name)
        if before is not None and after is not None:
            kept[name] = np.where(active.reshape(-1, *[1] * (after.ndim - 1)), after, before)
    return replace(new, **kept)
