"""Compare number formats: weights, optimizer state and bases in float32 and bfloat16.

In bfloat16, weights are tried with ordinary and with stochastic rounding.

Trains one task in each setting with the same seeds, then runs the optimizer for 10,000 steps on random gradients and
records how far its bases drift from orthogonal, ||B^T B - I||_F / sqrt(n), in each format.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...maps import orthogonality_defect
from ...optim import Spectral
from ..console import print_table, track
from ..plots import save_lines
from ..tasks import TASKS, train

BF16 = torch.bfloat16
SETTINGS: Mapping[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bf16 basis": (torch.float32, {"basis_dtype": BF16}),
    "bf16 basis and state": (torch.float32, {"basis_dtype": BF16, "state_dtype": BF16}),
    "bf16 weights, basis and state": (BF16, {"basis_dtype": BF16, "state_dtype": BF16}),
    "the same, stochastic rounding": (BF16, {"basis_dtype": BF16, "state_dtype": BF16, "stochastic_rounding": True}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how much to measure."""
    parser.add_argument("--task", choices=TASKS, default="fashion-mnist", help="task (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="training steps (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="training seeds (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate (default: %(default)s)")
    parser.add_argument(
        "--drift-steps", type=int, default=10_000, help="steps of the drift test (default: %(default)s)"
    )
    parser.add_argument("--plot", default="runs/bench/precision.png", help="where the picture goes")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train in every setting, measure the drift, print a table and draw the drift."""
    torch.set_num_threads(1)
    task = TASKS[args.task]()
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
        results[name] = {"loss": sum(losses) / len(losses), "error": sum(errors) / len(errors), "losses": losses}
    for name in ("float32", "bf16 basis"):
        defects = drift(args.drift_steps, SETTINGS[name][1])
        curves[name] = (list(defects), list(defects.values()))
        results[name]["largest_defect"] = max(defects.values())
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
    print_table(
        f"{args.task}, {args.steps} steps, mean of {args.seeds} seeds",
        ("setting", "held-out loss", "against float32", "error", f"largest defect in {args.drift_steps} steps"),
        rows,
    )
    save_lines(args.plot, curves, title="Drift of the bases", x="step", y="orthogonality defect")
    return results


def drift(steps: int, options: dict[str, Any], size: int = 64) -> dict[int, float]:
    """Return the orthogonality defect of the bases after every 1 % of the steps on a random stream of gradients."""
    generator = torch.Generator().manual_seed(0)
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
