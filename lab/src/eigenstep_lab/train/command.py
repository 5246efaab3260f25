"""Train a transformer on pictures or text, in a run that can be interrupted and goes on exactly.

  eigenstep train                       a small ViT on handwritten digits, with Spectral
  eigenstep train --data cifar-10 --flip --crop 0.5 --optimizer muon --lr 0.01
  eigenstep train --data shakespeare --train-for '2000 steps' --model-option depth=6
  eigenstep train --data novel.txt --option root=4 --option basis_dtype=bfloat16
  eigenstep train --config plainvit-imagewoof --data ~/imagewoof2 --workers 8
  torchrun --nproc-per-node 8 -m eigenstep_lab.cli train --parallel fsdp2 ...

A run lives in a folder of its own, runs/train/... or --directory: log.csv (and TensorBoard's
files), checkpoints, and at the end model.pt and result.json. Interrupt it as you like: the same
command goes on from the last checkpoint and ends with the same weights, bit for bit, on the same
machine. Durations are '20 epochs' or '1000 steps'.

Under torchrun, processes share batch, work and state; --parallel says whether they replicate or
shard the network. A checkpoint goes to a folder step-*.dcp then, from which any number of processes
can go on.

--config takes settings from a TOML file; what the command line says wins. Names are those of the
options below, with _ for -; [option] and [model_option] are tables.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from ..console import print_table, progress
from . import checkpoint, settings
from .trainer import Result, train

ROOT = "runs/train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all settings."""
    settings.add_arguments(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="delete what the folder holds and begin anew"
    )


def run(args: argparse.Namespace) -> None:
    """Train, or go on training, then show how good the network is."""
    chosen = settings.from_arguments(args)
    directory = chosen.place(ROOT)
    leads = os.environ.get("RANK", "0") == "0"
    fresh = args.fresh and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if leads:
        goes_on = checkpoint.list_checkpoints(directory) and not fresh
        print(f"{'Going on with' if goes_on else 'Starting'} the run in {directory}", flush=True)
    bar = progress(shown=leads)
    line = bar.add_task(chosen.optimizer, total=None)

    def advance(step: int, steps: int, loss: float) -> None:
        shown = f" loss {loss:.3f}" if math.isfinite(loss) else ""
        bar.update(line, completed=step, total=steps, description=chosen.optimizer + shown)

    try:
        with bar, asked_to_stop() as stop:
            result = train(
                chosen, directory, command=args.command, on_step=advance, stop=stop, fresh=fresh
            )
        check_finished(result)
    except KeyboardInterrupt:
        if leads:
            explain_interruption(directory, args.command)
        raise
    if leads:
        show(result, directory)


def check_finished(result: Result) -> None:
    """Interrupt a run that was asked to stop before its last step."""
    if result.step < result.steps:
        raise KeyboardInterrupt


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether to stop; a second signal interrupts."""
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("Stopping after this step (once more: at once) ...", flush=True)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def explain_interruption(directory: Path, command: str) -> None:
    """Say what is kept and how to go on."""
    checkpoints = checkpoint.list_checkpoints(directory)
    kept = f"Kept: {checkpoints[-1]}." if checkpoints else "There was no checkpoint yet."
    print(
        f"Interrupted. {kept} The same command goes on from there: "
        f"{command.replace(' --fresh', '')}"
    )


def show(result: Result, directory: Path) -> None:
    """Print the outcome of a finished run."""
    rows = [
        ("held-out loss", f"{result.test_loss:.4f}"),
        ("held-out error", f"{result.test_error:.2%}"),
        ("steps", f"{result.steps:,}"),
        ("parameters", f"{result.parameters:,}"),
        ("seconds of training", f"{result.seconds:.1f}"),
        ("weights", directory / "model.pt"),
        ("log", directory / "log.csv"),
    ]
    print_table("Trained", ("what", "value"), rows)
