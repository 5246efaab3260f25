"""What the full-matrix and the Kronecker figure share: how closely schemes follow the default one.

All schemes see the same gradients and start at the same matrix. The default scheme, ``S <- (1 -
beta) S + beta g g^T`` as a whole matrix, is the truth of "iterate matching"; its fixed point, the
covariance of the gradients, is the truth of "fixed-point matching". Seeds are a batch: all of them
are learned in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Generator, Tensor
from torch.linalg import diagonal

from eigenstep.core.curvature import OuterProducts
from eigenstep.core.matrices import SPD, Full, Kronecker
from eigenstep.core.step import Turning, moore_penrose
from eigenstep.core.update import update

from ..baselines import cholesky
from ..baselines.cholesky import Cholesky
from ..baselines.van_loan import dense_curvature
from ..console import track
from ..problems.spd import random_spd
from ..results import Curve, Panel, Table, Verdict, typical_ratio


@dataclass(frozen=True)
class Settings:
    """Numbers of an experiment.

    Attributes:
        sizes: Shape of a gradient; the matrix has as many rows as a gradient has entries.
        seeds: How many random problems.
        steps: How many gradients.
        lr: The paper's beta-2.
        gap: In the paper's scheme, eigenvalues count as equal if they differ by at most this
            fraction of the larger.
        points: How many times the distances are measured.
    """

    sizes: tuple[int, ...]
    seeds: int
    steps: int
    lr: float
    gap: float = 1e-6
    points: int = 40


@dataclass(frozen=True)
class Scheme:
    """A way to learn or to descend.

    Attributes:
        start: The first state.
        step: Turns a state, and what it is told, into the next one.
        dense: Turns a state into the matrix that it stands for.
    """

    start: Any
    step: Callable[..., Any]
    dense: Callable[[Any], Tensor] = methodcaller("dense")


def paper_schemes(start: SPD, lr: float, gap: float, ending: str = "") -> dict[str, Scheme]:
    """Return the paper's scheme with exact and with truncated maps, whose bases are not mended."""
    turning = Turning(partial(moore_penrose, gap=gap), mend=False)
    exact = partial(update, lr=lr, turning=turning)
    cut = replace(turning, map="truncated_cayley")
    truncated = partial(update, lr=lr, turning=cut, positive="truncated_exp")
    return {
        f"paper, exact maps{ending}": Scheme(start, exact),
        f"paper, truncated maps{ending}": Scheme(start, truncated),
    }


def our_scheme(start: Full | Kronecker, lr: float) -> dict[str, Scheme]:
    """Return ours, which remembers what is not yet diagonalized."""
    turning = Turning(rayleigh=True)
    step = partial(update, lr=lr, turning=turning, positive="truncated_exp")
    return {"ours": Scheme(start.with_residual(), step)}


def cholesky_schemes(start: Cholesky, lr: float) -> dict[str, Scheme]:
    """Return the Cholesky scheme of Lin et al. (2024), exact and truncated."""
    step = partial(cholesky.update, lr=lr)
    truncated = partial(step, truncated=True)
    return {"Cholesky": Scheme(start, step), "Cholesky, truncated": Scheme(start, truncated)}


def frobenius(estimate: Tensor, truth: Tensor) -> Tensor:
    """Return ``||A - B||_F / ||B||_F``, shape ``(*batch,)``."""
    return torch.linalg.matrix_norm(estimate - truth) / torch.linalg.matrix_norm(truth)


def wasserstein(estimate: Tensor, truth: Tensor) -> Tensor:
    """Return the Wasserstein-2 distance of centered Gaussians over ``(tr B)^(1/2)``.

    It is the distance of Bures: ``W^2 = tr A + tr B - 2 tr (B^(1/2) A B^(1/2))^(1/2)``.
    """
    eigs, basis = torch.linalg.eigh(truth)
    root = (basis * eigs.clamp_min(0).sqrt()[..., None, :]) @ basis.mT
    cross = torch.linalg.eigvalsh(root @ estimate @ root).clamp_min(0).sqrt().sum(-1)
    trace, trace_truth = (diagonal(m).sum(-1) for m in (estimate, truth))
    return ((trace + trace_truth - 2 * cross).clamp_min(0) / trace_truth).sqrt()


FIXED_POINT, ITERATES = "Fixed-point matching", "Iterate matching"
METRICS = {"relative Frobenius": frobenius, "relative Wasserstein-2": wasserstein}


def random_covariances(size: int, seeds: int, condition: float, generator: Generator) -> Tensor:
    """Return random matrices whose eigenvalues have the mean one, shape seeds × n × n."""
    matrices = random_spd(size, condition, generator, (seeds,))
    return matrices * (size / diagonal(matrices).sum(-1))[:, None, None]


def run(
    schemes: Mapping[str, Scheme],
    start: Tensor,
    covariance: Tensor,
    settings: Settings,
    generator: Generator,
) -> tuple[Panel, ...]:
    """Let all schemes learn from the same gradients; measure distances to two truths.

    Args:
        schemes: The schemes by name; the default one is added.
        start: The matrix at which all of them start, shape seeds × n × n.
        covariance: The covariance of the gradients, shape seeds × n × n.
        settings: Step size and so on.
        generator: Draws the gradients, on the CPU, so that all devices see the same.

    Returns:
        Four panels: for each metric, fixed-point matching and iterate matching.
    """
    root = torch.linalg.cholesky(covariance)
    default = start
    states = {name: scheme.start for name, scheme in schemes.items()}
    measured = sorted(
        {round(at) for at in torch.linspace(1, settings.steps, settings.points).tolist()}
    )
    distances: dict[tuple[str, str], dict[str, list[Tensor]]] = {
        (metric, truth): {} for metric in METRICS for truth in (FIXED_POINT, ITERATES)
    }
    shape = (settings.seeds, len(root[0]), 1)
    for step in track(range(1, settings.steps + 1), "Learning"):
        noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(start.device)
        gradient = (root @ noise)[..., 0].reshape(1, settings.seeds, *settings.sizes)
        curvature = OuterProducts(gradient)
        outer = dense_curvature(curvature, len(settings.sizes))
        default = (1 - settings.lr) * default + settings.lr * outer
        states = {name: schemes[name].step(state, curvature) for name, state in states.items()}
        if step in measured:
            estimates = {name: schemes[name].dense(state) for name, state in states.items()}
            for (metric, truth), curves in distances.items():
                goal = covariance if truth == FIXED_POINT else default
                known = {"default": default} if truth == FIXED_POINT else {}
                for name, estimate in (known | estimates).items():
                    curves.setdefault(name, []).append(METRICS[metric](estimate, goal).cpu())
    return tuple(
        Panel(
            truth,
            "iteration",
            f"{metric} distance",
            {name: Curve.of(measured, torch.stack(values)) for name, values in curves.items()},
        )
        for (metric, truth), curves in distances.items()
    )


def median(arrivals: Tensor) -> float:
    """Return the median over seeds of when each has arrived; the lower one of two."""
    return float(arrivals.quantile(0.5, interpolation="lower"))


def compare(
    name: str, rival: str, panels: Sequence[Panel], title: str, claim: str, limit: float
) -> Verdict:
    """Judge how far a scheme is from a truth, by the worse of the two metrics.

    Args:
        name: The scheme.
        rival: The scheme it is compared with.
        panels: What `run` returned.
        title: Title of the panels that count.
        claim: The paper's claim.
        limit: How many times as far the scheme may be.
    """
    ratios = [
        typical_ratio(panel.curves[name], panel.curves[rival])
        for panel in panels
        if panel.title == title
    ]
    quantity = (
        f"{title.lower()}, distance divided by that of “{rival}”, geometric mean, worse of "
        "both metrics"
    )
    return Verdict(claim, name, quantity, max(ratios), limit)


def final_distances(panels: Sequence[Panel], of: str = "") -> Table:
    """Return the last distances, medians over the seeds; `of` says which problem they are of."""
    names = list(panels[0].curves)
    columns = ["scheme", *(f"{panel.title}, {panel.y}" for panel in panels)]
    rows = [[name, *(_last(panel, name) for panel in panels)] for name in names]
    return Table(
        f"{of}: distances".lstrip(": ").capitalize() + " at the last iteration, medians over seeds",
        columns,
        rows,
    )


def _last(panel: Panel, name: str) -> str:
    return f"{panel.curves[name].quantile(0.5)[-1]:.3g}" if name in panel.curves else "0"
