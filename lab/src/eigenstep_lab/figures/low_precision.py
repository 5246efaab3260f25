"""Training vision transformers in bfloat16, against AdamW, SOAP and Muon.

Small versions of the paper's experiment: a vision transformer with two blocks of width 64 on
Fashion-MNIST, and a hierarchical one (Hiera) whose width grows from 16 to 64 on CIFAR-10. Weights
and gradients are bfloat16, and so are the states of all optimizers but SOAP, which cannot decompose
matrices in half precision; products are computed in float32, as accelerators accumulate them. Each
scheme chooses its learning rate with a seed of its own, from a grid that is extended until the best
one is not at its edge, then trains with other seeds. The paper clips preconditioned gradients, and
so does its scheme here, with every root; ours does so with p = 1 and p = 4, whose steps have other
sizes than with p = 2. Rows that no verdict is about are in the first task's table only; quick runs
leave them out.

All update their preconditioners every two iterations, ours at each of the first 100. For the
paper's scheme that means the bases; eigenvalues and scale follow every gradient. The paper
normalizes rotations to a constant norm β̄₂/2, which it searches with all else in 80 runs; here it is
1.9/2, and the row "β̄ = 0.5" shows a shorter one.

The paper trains models of 85.6 and 50.7 million parameters on ImageNet-like pictures for 210
epochs; its protocol can be run with `eigenstep train` and `eigenstep tune`. Times are CPU seconds
on one thread: what they say about speed holds for CPUs only, where bfloat16 gains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..results import Panel, Result, Table, Verdict
from ..tasks import Record
from .training import Scheme, load_task, loss_panels, mean_loss, spread, step_ms, train_all

BF16 = torch.bfloat16
ROOTS = (1, 2, 4)


@dataclass(frozen=True)
class Settings:
    """Numbers of the experiment.

    Attributes:
        tasks: What is trained.
        steps: Length of a run.
        seeds: Number of runs of each scheme that verdicts are about.
        seeds_beside: Number of runs of each of the others, which show what choices do; with none
            they are left out.
        tuning_steps: Length of the runs that choose learning rates.
        lrs: Learning rates to choose from, in equal ratios; more are tried if the best is the first
            or the last.
    """

    tasks: tuple[str, ...]
    steps: int
    seeds: int
    seeds_beside: int
    tuning_steps: int
    lrs: tuple[float, ...]


TASKS = ("fashion-mnist", "cifar-10-hiera")
LRS = (1e-3, 3e-3, 1e-2, 3e-2)
QUICK = Settings(TASKS, steps=200, seeds=2, seeds_beside=0, tuning_steps=200, lrs=LRS)
FULL = Settings(TASKS, steps=1000, seeds=2, seeds_beside=2, tuning_steps=250, lrs=LRS)


def _spectral(optimizer: str, root: int, **options: Any) -> Scheme:
    return Scheme(
        optimizer, {"root": float(root), "basis_dtype": BF16, "state_dtype": BF16, **options}, BF16
    )


def _paper(root: int, **options: Any) -> Scheme:
    return _spectral("spectral_paper", root, basis_lr=BASIS_RATE, **options)


BASIS_RATE = 1.9
"""The paper's β̄₂, a constant that it searches; 2 is where the Neumann series stops to converge."""
CLIPPED = {"clip": 1.0}
"""Roots other than 2 have steps of any size: they are clipped, as in the paper."""
OTHER_ROOTS = (1, 4)
SCHEMES = {
    # Those whose times are compared come one after the other, for other programs may slow down all
    # of them.
    "paper, p = 2": _paper(2),
    "SOAP": Scheme("soap", {}, BF16),
    "ours, p = 2": _spectral("spectral", 2),
    **{f"paper, p = {root}": _paper(root) for root in OTHER_ROOTS},
    **{f"ours, p = {root}": _spectral("spectral", root, **CLIPPED) for root in OTHER_ROOTS},
    "AdamW": Scheme("adamw", {}, BF16),
    "Muon": Scheme("muon", {}, BF16),
}
BESIDE = {
    "paper, p = 1, β̄ = 0.5": _spectral("spectral_paper", 1, basis_lr=0.5),
}
"""Schemes that show what choices do, on the first task; no verdict is about them."""
REFERENCES = {
    "paper": Scheme("spectral_paper", {"basis_lr": BASIS_RATE}),
    "ours": Scheme("spectral", {}),
}
"""The schemes with p = 2 in float32, to see what half precision costs."""


def run(
    settings: Settings, *, seed: int, device: torch.device, trainings: Path | None = None
) -> Result:
    """Train with all schemes on all tasks."""
    panels: list[Panel] = []
    verdicts: list[Verdict] = []
    tables: list[Table] = []
    for name in settings.tasks:
        task = load_task(name, device)
        chosen: dict[str, float] = {}
        records: dict[str, list[Record]] = {}
        make = partial(train_all, task, steps=settings.steps, trainings=trainings)
        for schemes, runs in ((SCHEMES, settings.seeds), (BESIDE, settings.seeds_beside)):
            if runs and (schemes is SCHEMES or name == TASKS[0]):
                lrs = dict.fromkeys(schemes, settings.lrs)
                trained = make(
                    schemes, lrs, seeds=range(seed, seed + runs), tuning_steps=settings.tuning_steps
                )
                chosen, records = {**chosen, **trained[0]}, {**records, **trained[1]}
        same = {family: [chosen[f"{family}, p = 2"]] for family in REFERENCES}
        _, wide = make(REFERENCES, same, seeds=range(seed, seed + settings.seeds))
        panels += loss_panels(task, {name: records[name] for name in SCHEMES})
        for family, reference in wide.items():
            verdicts += _verdicts(family, task.name, records, reference)
        tables.append(
            _table(task.name, chosen, {**records, **{f"{k}, float32": v for k, v in wide.items()}})
        )
    return Result(panels, verdicts, tables)


def _verdicts(
    family: str, task: str, records: dict[str, list[Record]], reference: Sequence[Record]
) -> list[Verdict]:
    losses = {root: mean_loss(records[f"{family}, p = {root}"]) for root in ROOTS}
    best = min(losses, key=losses.__getitem__)
    noise = max(spread(records[f"{family}, p = {root}"]) for root in ROOTS)
    at_best = records[f"{family}, p = {best}"]
    at_two = records[f"{family}, p = 2"]
    muon, adamw = (mean_loss(records[name]) for name in ("Muon", "AdamW"))
    cost = step_ms(at_two) / step_ms(records["SOAP"])
    root = f"with the best root, p = {best}"
    return [
        Verdict(
            "It trains transformers in half precision effectively.",
            family,
            f"{task}: held-out loss with p = 2, divided by that in float32",
            mean_loss(at_two) / mean_loss(reference),
            limit=1.05,
        ),
        Verdict(
            "It matches the performance of Muon.",
            family,
            f"{task}: held-out loss {root}, divided by Muon's",
            mean_loss(at_best) / muon,
            limit=1.05,
        ),
        Verdict(
            "Non-diagonal methods have benefits.",
            family,
            f"{task}: held-out loss {root}, divided by AdamW's",
            mean_loss(at_best) / adamw,
            limit=1.0,
        ),
        Verdict(
            "A different root can affect the performance.",
            family,
            f"{task}: difference of the held-out losses with the worst and the best root, in "
            "standard deviations",
            (max(losses.values()) - losses[best]) / max(noise, 1e-12),
            limit=2,
            at_least=True,
        ),
        Verdict(
            "It is faster than SOAP, because it decomposes no matrix.",
            family,
            f"{task}: optimizer time per step with p = 2, divided by SOAP's",
            cost,
            limit=0.9,
            timed=True,
        ),
    ]


def _table(task: str, chosen: dict[str, float], records: dict[str, list[Record]]) -> Table:
    rows = [
        (
            name,
            f"{chosen[name]:g}" if name in chosen else "as with p = 2",
            f"{mean_loss(runs):.4f} ± {spread(runs):.4f}",
            f"{sum(record.test_error for record in runs) / len(runs):.1%}",
            f"{step_ms(runs):.1f}",
            f"{step_ms(runs, 'total_seconds'):.1f}",
        )
        for name, runs in sorted(records.items(), key=lambda item: mean_loss(item[1]))
    ]
    columns = (
        "scheme",
        "learning rate",
        "held-out loss",
        "error",
        "optimizer ms per step",
        "whole ms per step",
    )
    return Table(f"{task}, after training", columns, rows, timed=True)
