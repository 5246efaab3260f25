"""Measure how well the curvature that ``Spectral`` learns predicts the next gradient of a network
in training.

Gradients of all hidden layers of a small vision transformer and a character GPT are recorded while
AdamW trains them. Every scheme learns one matrix S for each layer from the past gradients; the
figure is the predictive NLL, [vec(G)' S^-1 vec(G) + log det S] / (n m), of the next gradient G,
lower is better: "early" over steps 20 to 50, "late" over the last half. Those of the library are
the optimizers that it ships, stepped with these gradients; what they are compared with decomposes
matrices. The last table says where they are ahead of the best of those, and where behind.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from eigenstep import Spectral

from ..behavior import behavior
from ..console import UserError, print_table
from ..data.datasets import find
from ..lines import look
from ..plotting import figure, save
from ..results import Table
from ..rivals import with_turning
from ..study import Cell, Plans, figures, nested
from ..tasks import Classification, picture_task, text_task
from .prediction import SOAP, KLShampoo, Layers, Learner, Shipped, follow, record, stack

TASKS: Mapping[str, Callable[..., Classification]] = {
    "fashion-mnist": partial(picture_task, "fashion-mnist", 7),
    "shakespeare": partial(text_task, "shakespeare"),
    "cifar-10": partial(picture_task, "cifar-10", 8),
    "digits": partial(picture_task, "digits", 2),
}


@dataclass(frozen=True)
class Scheme:
    """One way of learning.

    Attributes:
        family: a key of ``SHIPPED`` or ``DECOMPOSE``.
        options: what differs from its defaults.
    """

    family: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, like: Tensor) -> Learner:
        """Make a learner of gradients, shape ``(b, n, m)``."""
        options = {
            k: getattr(torch, v) if k.endswith("dtype") else v for k, v in self.options.items()
        }
        if self.family in DECOMPOSE:
            return DECOMPOSE[self.family](**options, like=like)
        return Shipped(partial(SHIPPED[self.family], **with_turning(options)), like)


SHIPPED: Mapping[str, Callable[..., Spectral]] = {
    "Spectral": Spectral,
    "Spectral.fast": Spectral.fast,
    "Spectral.paper": Spectral.paper,
}
DECOMPOSE: Mapping[str, Callable[..., Learner]] = {"KL-Shampoo": KLShampoo, "SOAP": SOAP}
SCHEMES: Mapping[str, Scheme] = {
    "diagonal": Scheme("Spectral", {"structure": "diagonal"}),
    "Spectral": Scheme("Spectral"),
    "Spectral, every step": Scheme("Spectral", {"interval": 1}),
    "Spectral, every 2 steps from the start": Scheme("Spectral", {"interval": [[0, 2]]}),
    "Spectral, every 5 steps from the start": Scheme("Spectral", {"interval": [[0, 5]]}),
    "Spectral, bfloat16 bases": Scheme("Spectral", {"basis_dtype": "bfloat16"}),
    "Spectral, whole sides": Scheme("Spectral", {"max_ratio": None}),
    "Spectral, Kronecker eigenvalues": Scheme("Spectral", {"eigenvalues": "kronecker"}),
    "Spectral.fast": Scheme("Spectral.fast"),
    "Spectral.paper": Scheme("Spectral.paper"),
    "Spectral.paper, every step": Scheme("Spectral.paper", {"interval": 1}),
    "KL-Shampoo, eigh every step": Scheme("KL-Shampoo", {"start": 2.0}),
    "SOAP, eigh every step": Scheme("SOAP", {"start": 2.0, "interval": 1, "exact": True}),
    "SOAP, QR every step": Scheme("SOAP", {"start": 2.0, "interval": 1, "exact": False}),
    "SOAP, QR every 2 steps": Scheme("SOAP", {"start": 2.0, "interval": 2, "exact": False}),
    "SOAP, QR every 10 steps": Scheme("SOAP", {"start": 2.0, "interval": 10, "exact": False}),
}
DRAWN = (
    "Spectral",
    "Spectral.fast",
    "Spectral.paper",
    "KL-Shampoo, eigh every step",
    "SOAP, eigh every step",
)
PERIODS = ("early", "late")
CURVE = 10
"""Curves are means over this many steps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to record."""
    add = parser.add_argument
    defaults = "default: fashion-mnist or digits, and shakespeare"
    add("--tasks", nargs="+", choices=TASKS, help=defaults)
    add("--steps", type=int, default=400, help="recorded gradients (default: %(default)s)")
    add("--seeds", type=int, default=1, help="recordings to average over (default: %(default)s)")
    add("--width", type=int, default=48, help="width of the networks (default: %(default)s)")
    add("--depth", type=int, default=2, help="their number of blocks (default: %(default)s)")
    quick = "100 steps of a narrow network with one block, on digits"
    add("--quick", action="store_true", help=quick)
    add("--plot", default="runs/bench/curvature.png", help="where the picture goes")


def cells(args: argparse.Namespace, found: Mapping[Any, Any]) -> Plans:
    """List all schemes on all tasks."""
    if args.quick:
        args.steps, args.width, args.depth, args.tasks = 100, 32, 1, args.tasks or ["digits"]
    if args.steps < 60:
        raise UserError(
            f"--steps must be at least 60, to have an early and a late period, got {args.steps}"
        )
    if args.seeds < 1:
        raise UserError(f"--seeds must be at least 1, got {args.seeds}")
    code = behavior("spectral", "fast", "paper", "options")
    plans = {}
    for task in args.tasks or default_tasks():
        how = {name: getattr(args, name) for name in ("width", "depth", "steps", "seeds")}
        for name, scheme in SCHEMES.items():
            key = {"task": task, **how, **asdict(scheme)}
            compute = partial(measure, task, name, **how)
            plans[task, name] = Cell(key, compute, code if scheme.family in SHIPPED else "")
    return plans


def default_tasks() -> list[str]:
    """Name the tasks that are measured if none are named, by what data are here."""
    pictures = "fashion-mnist" if find("fashion-mnist") else "digits"
    return [pictures, *(["shakespeare"] if find("shakespeare") else [])]


def report(args: argparse.Namespace, found: Mapping[Any, Any]) -> dict[str, Any]:
    """Print the tables of layers, draw the curves, and return all figures."""
    settings = {name: asdict(scheme) for name, scheme in SCHEMES.items()}
    result = {"settings": settings, "figures": nested(found)}
    for table in layer_tables(result):
        print_table(table.title, table.columns, table.rows)
    draw(result, args.plot)
    return figures(result, [], list(summary_tables(result)), "")


def measure(task: str, scheme: str, **how: int) -> dict[str, Any]:
    """Run a scheme over all layers of a task."""
    return summarize(recorded(task, **how), SCHEMES[scheme])


@lru_cache(1)
def recorded(task: str, *, width: int, depth: int, steps: int, seeds: int) -> list[Layers]:
    """Record the gradients of a task, once."""
    network = TASKS[task](width=width, depth=depth)
    return stack([record(network, steps, seed) for seed in range(seeds)])


def summarize(groups: list[Layers], scheme: Scheme) -> dict[str, Any]:
    """Run one scheme over the layers of a task, and average over periods, seeds and layers."""
    nll = torch.cat([follow(group.gradients, scheme.build) for group in groups], dim=-1)
    # The first figure is of the second step.
    periods = dict(zip(PERIODS, (nll[19:49].mean(0), nll[len(nll) // 2 :].mean(0)), strict=True))
    names = [name for group in groups for name in group.names]
    return {
        **{period: values.mean().item() for period, values in periods.items()},
        "seeds": {period: values.mean(1).tolist() for period, values in periods.items()},
        "layers": {
            name: {period: values[:, at].mean().item() for period, values in periods.items()}
            for at, name in enumerate(names)
        },
        "curve": [round(nll[at : at + CURVE].mean().item(), 4) for at in range(0, len(nll), CURVE)],
    }


def layer_tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Give the figures of each layer, a table for each block of a network and period."""
    for task, found in result["figures"].items():
        layers = next(iter(found.values()))["layers"]
        for block in dict.fromkeys(".".join(name.split(".")[:2]) for name in layers):
            inside = [name for name in layers if name.startswith(f"{block}.")]
            for period in PERIODS:
                rows = [
                    [scheme, *(f"{run['layers'][name][period]:.2f}" for name in inside)]
                    for scheme, run in found.items()
                ]
                columns = ["scheme", *(name.split(".")[-2] for name in inside)]
                yield Table(f"{task}, {block}, {period}", columns, rows)


def summary_tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Give the means over all layers and seeds, and how far the library is from the best that
    decomposes.
    """
    by_task = result["figures"]
    columns = [(task, period) for task in by_task for period in PERIODS]
    names = list(next(iter(by_task.values())))
    heads = [f"{task} {period}" for task, period in columns]
    rows = [
        [name, *(f"{by_task[task][name][period]:.3f}" for task, period in columns)]
        for name in names
    ]
    yield Table(
        "Mean predictive NLL of the next gradient, lower is better", ["scheme", *heads], rows
    )
    shipped = [name for name in names if result["settings"][name]["family"] in SHIPPED]
    best = {
        (task, period): min(by_task[task][name][period] for name in names if name not in shipped)
        for task, period in columns
    }
    rows = []
    for name in shipped:
        gaps = [by_task[task][name][period] - best[task, period] for task, period in columns]
        rows.append([name, *(f"{gap:+.3f} {'ahead' if gap < 0 else 'behind'}" for gap in gaps)])
    yield Table("The library minus the best of those that decompose", ["scheme", *heads], rows)


def draw(result: Mapping[str, Any], path: str) -> None:
    """Draw the figures over the steps, as they are and against an exact eigendecomposition."""
    by_task = result["figures"]
    drawn, axes = figure(columns=len(by_task), rows=2)
    for column, (task, found) in enumerate(by_task.items()):
        exact = torch.tensor(found[DRAWN[-1]]["curve"])
        steps = CURVE * (torch.arange(len(exact)) + 0.5)
        for number, scheme in enumerate(DRAWN):
            curve = torch.tensor(found[scheme]["curve"])
            axes[0, column].plot(steps, curve, label=scheme, **look(scheme, number))
            axes[1, column].plot(steps, curve - exact, label=scheme, **look(scheme, number))
        axes[0, column].set(title=task, xlabel="step", ylabel="predictive NLL")
        axes[1, column].set(xlabel="step", ylabel=f"minus that of {DRAWN[-1]}", ylim=(-0.8, 1.2))
        axes[0, column].legend(fontsize=7)
    save(drawn, path)
