"""Train a small vision transformer on handwritten digits with four optimizers, and compare them.

Everything needed is on board: the pictures come with scikit-learn. All optimizers start from the
same weights, see the same batches in the same order and use the same schedule; each has its own
learning rate, found beforehand. The table tells loss and error on held-out pictures, the picture
shows the training loss and what Spectral has learned. It takes about half a minute on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eigenstep.optim import Spectral

from .console import LARGEST_SEED, between, print_table, progress
from .lines import look
from .plotting import figure, save
from .rivals import build
from .tasks import CLASSIFICATIONS, Record, train

LEARNING_RATES = {"spectral": 1e-2, "soap": 1e-2, "muon": 5e-2, "adamw": 1e-3}
OPTIONS: dict[str, dict[str, Any]] = {"adamw": {"betas": (0.9, 0.99)}}
"""What suits an optimizer better than its own defaults, in so few steps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how long to train and where the picture goes."""
    parser.add_argument(
        "--steps", type=between(1, 10**9), default=120, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=between(0, LARGEST_SEED),
        default=0,
        help="first weights, order of data (default: %(default)s)",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("runs/demo.png"),
        help="the picture (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    """Train with each optimizer, then show a table and a picture."""
    torch.set_num_threads(1)  # the matrices are small: threads would only wait for each other
    task = CLASSIFICATIONS["digits"]()
    records: dict[str, Record] = {}
    learned: dict[str, Any] = {}
    with progress() as bar:
        for name, lr in LEARNING_RATES.items():
            line = bar.add_task(name, total=args.steps)

            def make(model: nn.Module, name: str = name, lr: float = lr) -> torch.optim.Optimizer:
                optimizer = build(name, model, lr, weight_decay=0.1, **OPTIONS.get(name, {}))
                if isinstance(optimizer, Spectral):
                    learned["optimizer"] = optimizer
                return optimizer

            def advance(step: int, loss: float, name: str = name, line: Any = line) -> None:
                bar.update(line, advance=1, description=f"{name:<9} loss {loss:.3f}")

            records[name] = train(task, make, steps=args.steps, seed=args.seed, on_step=advance)
    rows = [
        (
            name,
            f"{LEARNING_RATES[name]:g}",
            f"{r.test_loss:.3f}",
            f"{r.test_error:.1%}",
            *_milliseconds(r),
        )
        for name, r in sorted(records.items(), key=lambda item: item[1].test_loss)
    ]
    columns = (
        "optimizer",
        "learning rate",
        "held-out loss",
        "held-out error",
        "optimizer ms",
        "whole step ms",
    )
    print_table(f"Handwritten digits, a vision transformer, {args.steps} steps", columns, rows)
    draw(records, learned["optimizer"], args.plot)
    print(
        "Next: `eigenstep train` trains on your own data, `eigenstep reproduce all` makes the "
        "paper's figures,"
    )
    print(
        "`eigenstep bench` compares with other optimizers, `eigenstep doctor` says what this "
        "machine can do."
    )


def _milliseconds(record: Record) -> list[str]:
    steps = max(1, len(record.losses))
    return [
        f"{1e3 * seconds / steps:.1f}"
        for seconds in (record.optimizer_seconds, record.total_seconds)
    ]


def draw(records: dict[str, Record], optimizer: Spectral, path: Path) -> None:
    """Draw the training losses, and the eigenvalues that Spectral learned for each matrix."""
    drawn, axes = figure(columns=2)
    for number, (name, record) in enumerate(records.items()):
        losses = torch.tensor(record.losses)
        smooth = losses.unfold(0, min(10, len(losses)), 1).mean(-1)
        axes[0, 0].plot(smooth, label=name, **look(name, number))
    axes[0, 0].set(title="Training loss", xlabel="step", yscale="log")
    axes[0, 0].legend(fontsize=8)
    for name, spectrum in optimizer.spectra().items():
        if "attention" in name or "mlp" in name:
            axes[0, 1].plot(spectrum["eigenvalues_1"].flatten(), alpha=0.6, linewidth=1)
    axes[0, 1].set(
        title="Eigenvalues of the curvature, one line per matrix", xlabel="rank", yscale="log"
    )
    save(drawn, path)
