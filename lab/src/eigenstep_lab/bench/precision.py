"""Compare number formats: weights, optimizer state and bases in float32 and bfloat16.

In bfloat16, weights are tried with ordinary and with stochastic rounding.

Trains one task in each setting with the same seeds, then runs the optimizer for 10,000 steps on
random gradients and records how far its bases drift from orthogonal, ||B^T B - I||_F / sqrt(n), in
each format.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from eigenstep.optim import Spectral

from ..console import track
from ..figures.training import load_task
from ..lines import save_lines
from ..orthogonality import orthogonality_defect
from ..problems.tasks import TASKS, train
from ..results import Table, Verdict, verdict_table

BF16 = torch.bfloat16
SETTINGS: Mapping[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bf16 basis": (torch.float32, {"basis_dtype": BF16}),
    "bf16 basis and state": (torch.float32, {"basis_dtype": BF16, "state_dtype": BF16}),
    "bf16 weights, basis and state": (BF16, {"basis_dtype": BF16, "state_dtype": BF16}),
    "the same, stochastic rounding": (
        BF16,
        {"basis_dtype": BF16, "state_dtype": BF16, "stochastic_rounding": True},
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how much to measure."""
    parser.add_argument(
        "--task", choices=TASKS, default="fashion-mnist", help="task (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=500, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, default=8, help="training seeds (default: %(default)s)"
    )
    parser.add_argument(
        "--lr", type=float, default=1e-2, help="learning rate (default: %(default)s)"
    )
    parser.add_argument(
        "--drift-steps",
        type=int,
        default=10_000,
        help="steps of the drift test (default: %(default)s)",
    )
    parser.add_argument("--plot", default="runs/bench/precision.png", help="where the picture goes")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train in every setting, measure the drift, print a table and draw the drift."""
    torch.set_num_threads(1)
    # Products in float32, as accelerators accumulate them: half-precision ones would take many CPUs
    # minutes.
    task = replace(load_task(args.task, torch.device("cpu")), test_batches=256)
    results: dict[str, dict[str, Any]] = {}
    curves = {}
    for name, (dtype, options) in SETTINGS.items():

        def make(model: nn.Module, options: dict[str, Any] = options) -> Spectral:
            return Spectral(model.parameters(), args.lr, weight_decay=0.1, **options)

        records = []
        for seed in track(range(args.seeds), name):
            torch.manual_seed(seed)  # for stochastic rounding
            records.append(train(task, make, steps=args.steps, seed=seed, dtype=dtype))
        losses, errors = [r.test_loss for r in records], [r.test_error for r in records]
        results[name] = {
            "loss": sum(losses) / len(losses),
            "error": sum(errors) / len(errors),
            "losses": losses,
        }
    for name in ("float32", "bf16 basis"):
        defects = drift(args.drift_steps, SETTINGS[name][1])
        curves[name] = (list(defects), list(defects.values()))
        results[name]["largest_defect"] = max(defects.values())
    save_lines(args.plot, curves, title="Drift of the bases", x="step", y="orthogonality defect")
    found = list(verdicts(results))
    title = f"{args.task}, {args.steps} steps, mean of {args.seeds} seeds"
    tables = (loss_table(title, results), verdict_table("Low precision against float32", found))
    return {
        "settings": results,
        "verdicts": [asdict(v) for v in found],
        "tables": [asdict(t) for t in tables],
    }


def loss_table(title: str, results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Show the losses and how far the bases drifted."""
    reference = results["float32"]["loss"]
    rows = [
        (
            name,
            f"{r['loss']:.4f}",
            f"{r['loss'] / reference - 1:+.2%}",
            f"{r['error']:.1%}",
            f"{r['largest_defect']:.1e}" if "largest_defect" in r else "",
        )
        for name, r in results.items()
    ]
    return Table(
        title,
        ("setting", "held-out loss", "against float32", "error", "largest defect of a basis"),
        rows,
    )


def verdicts(results: Mapping[str, Mapping[str, Any]]) -> Iterator[Verdict]:
    """Compare every setting with float32, and the drift of the bases with what we allow."""
    for name, found in results.items():
        if name != "float32":
            ratio = found["loss"] / results["float32"]["loss"]
            yield Verdict(
                "loses at most 1 % against float32", name, "ratio of held-out losses", ratio, 1.01
            )
        if "largest_defect" in found:
            defect = found["largest_defect"]
            yield Verdict("bases stay orthogonal", name, "largest defect", defect, 1e-2)


def drift(steps: int, options: dict[str, Any]) -> dict[int, float]:
    """Return the orthogonality defect of the bases after every 1 % of the steps on a random stream
    of gradients.
    """
    generator, size = torch.Generator().manual_seed(0), 64
    mix = torch.randn(size, size, generator=generator)
    weight = nn.Parameter(torch.zeros(size, size))
    optimizer = Spectral([weight], 1e-3, **options)
    defects = {}
    for step in track(range(1, steps + 1), "Drift"):
        weight.grad = mix @ torch.randn(size, size, generator=generator)
        optimizer.step()
        if step % max(1, steps // 100) == 0:
            state = optimizer.state[weight]
            worst = [orthogonality_defect(state[f"basis_{axis}"]).max() for axis in (0, 1)]
            defects[step] = float(torch.stack(worst).max())
    return defects
