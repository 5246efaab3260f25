"""Measure memory: state by mode, what a step takes beside it, and what stepping a large embedding
costs.

State is counted in bytes per weight, without computing anything. The step that is measured turns
bases; "peak" is the memory that it takes for a while on top of weights, gradients and state. The
embedding is stepped by `Spectral` and by torch's `AdamW` in turn; times are medians of CPU time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from eigenstep import Spectral

from ..console import MOST_THREADS, between, track
from ..results import Table, Verdict, verdict_table
from .step import Shapes, peak_memory, state_bytes, transformer_shapes

MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "bf16 bases": {"basis_dtype": torch.bfloat16},
    "bf16": {"basis_dtype": torch.bfloat16, "state_dtype": torch.bfloat16},
    "int8": {"state_dtype": torch.int8, "max_dim": 1024},
}
"""Options of `Spectral` that decide how much memory it takes."""


def vit(depth: int) -> Shapes:
    """Shapes of ViT-B/16."""
    return transformer_shapes(
        768, depth, [("embed.weight", (768, 768)), ("head.weight", (1000, 768))]
    )


def gpt(depth: int) -> Shapes:
    """Shapes of GPT-2, 124 million weights with 12 layers."""
    return transformer_shapes(
        768, depth, [("embed.weight", (50257, 768)), ("positions", (1024, 768))]
    )


MODELS: Mapping[str, Callable[[int], Shapes]] = {"ViT-B/16": vit, "GPT-2": gpt}
LIMITS = (("default", "GPT-2", 16.0), ("int8", "ViT-B/16", 6.0), ("int8", "GPT-2", 6.0))
"""Mode, model, and bytes of state per weight that it may take at most."""
MOST_PEAK, MOST_TIME = 6.0, 1.3
"""Bytes per weight that a step may take beside the state, and how much longer an embedding may take
than in AdamW.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how much to measure."""
    parser.add_argument(
        "--depth",
        type=int,
        default=12,
        help="layers of the network that steps (default: %(default)s)",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=["default", "int8"], help="modes that step"
    )
    parser.add_argument(
        "--rows", type=int, default=50_000, help="rows of the embedding (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="timed steps of the embedding (default: %(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=between(1, MOST_THREADS),
        default=1,
        help="threads for torch (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Count, step, time, and say what holds."""
    torch.set_num_threads(args.threads)
    state = {mode: {name: state_of(shapes(12), options) for name, shapes in MODELS.items()}
             for mode, options in MODES.items()}  # fmt: skip
    peaks = {mode: peak_of(gpt(args.depth), MODES[mode]) for mode in args.modes}
    times = embedding_times(args.rows, args.rounds)
    found = list(verdicts(state, peaks, times))
    rows = [(mode, *(f"{own[name]:.2f}" for name in MODELS)) for mode, own in state.items()]
    tables = [
        Table("State, bytes per weight", ("mode", *MODELS), rows),
        Table(
            f"A step of GPT-2 with {args.depth} layers, bytes per weight",
            ("mode", "state", "peak beside it"),
            [(mode, f"{own['state']:.2f}", f"{own['peak']:.2f}") for mode, own in peaks.items()],
        ),
        Table(
            f"An embedding of {args.rows:,} × 768",
            ("optimizer", "ms of CPU time"),
            [(name, f"{ms:.0f}") for name, ms in times.items()],
            timed=True,
        ),
        verdict_table("What holds", found),
    ]
    measured = {"state": state, "peaks": peaks, "embedding_ms": times}
    return {
        **measured,
        "verdicts": [asdict(v) for v in found],
        "tables": [asdict(t) for t in tables],
    }


def verdicts(state: Any, peaks: Any, times: Mapping[str, float]) -> Iterator[Verdict]:
    """Compare with what we promise."""
    for mode, model, limit in LIMITS:
        yield Verdict(
            f"state of at most {limit:g} B per weight",
            mode,
            f"B on {model}",
            state[mode][model],
            limit,
        )
    for mode, own in peaks.items():
        yield Verdict(
            f"at most {MOST_PEAK:g} B per weight beside the state",
            mode,
            "B",
            own["peak"],
            MOST_PEAK,
        )
    ratio = times["Spectral"] / times["AdamW"]
    yield Verdict(
        "embeddings cost what they do in AdamW",
        "default",
        "ratio of times",
        ratio,
        MOST_TIME,
        timed=True,
    )


def state_of(shapes: Shapes, options: Mapping[str, Any]) -> float:
    """Return the bytes of state per weight of a network that exists nowhere."""
    named = [(name, nn.Parameter(torch.empty(shape, device="meta"))) for name, shape in shapes]
    reports = Spectral(named, **options).summary()
    return sum(report.state_bytes for report in reports) / sum(
        math.prod(report.shape) for report in reports
    )


def peak_of(shapes: Shapes, options: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes per weight of a step that turns bases, and of the state, once there is
    state.
    """
    params = [nn.Parameter(torch.randn(shape) * 0.02) for _, shape in shapes]
    optimizer = Spectral(params, **options)
    count, peak = sum(param.numel() for param in params), 0
    for _ in track(range(2), "Stepping"):
        for param in params:
            param.grad = torch.randn(param.shape) * 1e-3
        peak = peak_memory(optimizer.step)[0]  # of the last one
    return {"state": state_bytes(optimizer) / count, "peak": peak / count}


def embedding_times(rows: int, rounds: int) -> dict[str, float]:
    """Return the median CPU milliseconds of a step of an embedding, of which most rows have no
    gradient.
    """
    makers: Mapping[str, Callable[..., Optimizer]] = {"Spectral": Spectral, "AdamW": AdamW}
    tables = {name: nn.Parameter(torch.randn(rows, 768) * 0.02) for name in makers}
    optimizers = {name: make([tables[name]], lr=1e-3) for name, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in makers}
    for round_ in track(range(rounds + 2), "Timing"):
        for name, optimizer in optimizers.items():
            gradient = torch.zeros(rows, 768)
            gradient[torch.randint(rows, (1024,))] = torch.randn(768)
            tables[name].grad = gradient
            start = time.process_time()  # which other processes hardly change
            optimizer.step()
            if round_ > 1:  # the first steps set up state
                times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(found) for name, found in times.items()}
