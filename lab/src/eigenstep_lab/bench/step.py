"""Measure what one optimizer step costs: CPU time, matrix-product work and memory.

All optimizers step the same tensors in turn, round after round, so that a busy machine disturbs
them alike; the figures are medians. Gradients are random: what a step costs does not depend on
them. Every second step turns or recomputes the preconditioner (`--interval`), every second turn
mends bases, and all kinds of step count. "Peak" is the memory that a step takes for a while on top
of weights, gradients and state.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from ..console import MOST_THREADS, between, track
from ..lines import save_lines
from ..results import Table, Verdict, verdict_table
from ..rivals import TRAINERS, build

Shapes = list[tuple[str, tuple[int, ...]]]


def transformer_shapes(width: int, depth: int, extra: Shapes) -> Shapes:
    """List the parameters of `depth` transformer layers of a width, and those around them."""
    layer: Shapes = [
        (f"{name}.weight", (width, width)) for name in ("query", "key", "value", "out")
    ]
    layer += [("mlp_in.weight", (4 * width, width)), ("mlp_out.weight", (width, 4 * width))]
    layer += [("norm1.weight", (width,)), ("norm2.weight", (width,)), ("mlp_in.bias", (4 * width,))]
    return [
        (f"blocks.{index}.{name}", shape) for index in range(depth) for name, shape in layer
    ] + extra


def resnet10t_shapes() -> Shapes:
    """List the parameters of timm's resnet10t: a stem of three convolutions and four
    blocks of two.
    """
    found: Shapes = []

    def convolution(name: str, outputs: int, inputs: int, kernel: int) -> None:
        found.append((f"{name}.weight", (outputs, inputs, kernel, kernel)))
        found.extend((f"{name}.norm.{part}", (outputs,)) for part in ("weight", "bias"))

    channels = (3, 24, 32, 64)
    for index in range(3):
        convolution(f"stem.{index}", channels[index + 1], channels[index], 3)
    for index, inputs in enumerate((64, 64, 128, 256)):
        outputs = 64 * 2**index
        convolution(f"blocks.{index}.first", outputs, inputs, 3)
        convolution(f"blocks.{index}.second", outputs, outputs, 3)
        if inputs != outputs:
            convolution(f"blocks.{index}.shortcut", outputs, inputs, 1)
    return [*found, ("head.weight", (1000, 512)), ("head.bias", (1000,))]


MODELS: Mapping[str, Shapes] = {
    "vit-256": transformer_shapes(
        256, 2, [("embed.weight", (256, 192)), ("head.weight", (10, 256))]
    ),
    "vit-384": transformer_shapes(
        384, 2, [("embed.weight", (384, 192)), ("head.weight", (10, 384))]
    ),
    "vit-768": transformer_shapes(
        768, 1, [("embed.weight", (768, 768)), ("head.weight", (10, 768))]
    ),
    "gpt2-124m": transformer_shapes(
        768, 12, [("embed.weight", (50257, 768)), ("positions", (1024, 768))]
    ),
    "gpt-256": transformer_shapes(
        256, 2, [("embed.weight", (4096, 256)), ("positions", (256, 256))]
    ),
    "resnet10t": resnet10t_shapes(),
    "shapes-100": [(f"layers.{i}.weight", (8 + i, 16 + 2 * i)) for i in range(100)],
    "vector-3m": [("weight", (3_000_000,))],
}
VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "spectral_diagonal": ("spectral", {"structure": "diagonal"}),
    "adamw": ("adamw", {"foreach": True}),
}
"""Rivals with options."""
CHOICES = tuple(dict.fromkeys((*TRAINERS, *VARIANTS)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to measure and for how long."""
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="shapes (default: all)"
    )
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=CHOICES,
        default=list(CHOICES),
        help="optimizers (default: all)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="timed rounds of two turns each (default: %(default)s)",
    )
    parser.add_argument(
        "--interval", type=int, default=2, help="steps between two turns (default: %(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=between(1, MOST_THREADS),
        default=1,
        help="threads for torch (default: %(default)s)",
    )
    parser.add_argument(
        "--plot",
        default="runs/bench/step.png",
        help="where the picture goes (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print a table for each model, and draw cost against width."""
    torch.set_num_threads(args.threads)
    results = {name: measure(MODELS[name], args) for name in args.models}
    widths = {name: int(name.split("-")[1]) for name in results if name.startswith("vit")}
    curves = {
        key: ([widths[m] for m in widths], [results[m][key]["ms"] for m in widths])
        for key in args.optimizers
    }
    if widths:
        save_lines(
            args.plot,
            curves,
            title="Cost of an optimizer step",
            x="width",
            y="CPU ms per step",
            log=True,
        )
    found = list(verdicts(results))
    tables = [cost_table(name, costs) for name, costs in results.items()]
    tables += [verdict_table("Against other optimizers", found)] if found else []
    return {
        "models": results,
        "verdicts": [asdict(v) for v in found],
        "tables": [asdict(t) for t in tables],
    }


def cost_table(model: str, costs: Mapping[str, Mapping[str, float]]) -> Table:
    """Show what a step costs on one model."""
    columns = ("optimizer", "CPU ms", "matmul GFLOP", "state B/parameter", "peak B/parameter")
    rows = [
        (key, f"{c['ms']:.1f}", f"{c['gflop']:.2f}", f"{c['state']:.1f}", f"{c['peak']:.1f}")
        for key, c in costs.items()
    ]
    return Table(f"One step on {model}", columns, rows, timed=True)


CLAIMS = (
    ("spectral", "soap", "ms", 0.5),
    ("spectral", "klshampoo", "ms", 0.5),
    ("spectral_fast", "muon_float32", "ms", 1.0),
    ("spectral_fast", "muon_float32", "gflop", 1.0),
    ("spectral_diagonal", "adamw", "ms", 1.5),
)
"""What we claim of transformers: scheme, rival, what is compared, and the largest ratio."""
OTHER_CLAIMS: Mapping[str, tuple[tuple[str, str, str, float], ...]] = {
    "resnet10t": (("spectral", "soap", "ms", 1.0),),
    "shapes-100": (),
    "vector-3m": (("spectral", "adamw", "ms", 1.5), ("spectral_diagonal", "adamw", "ms", 1.5)),
}
"""What we claim of other models."""
SAME_SIDES = {"gpt-256": {"soap": "soap_2048"}}
"""Where another rival has bases for the same sides as ours, which leaves a vocabulary of 4096
without one.
"""


def verdicts(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[Verdict]:
    """Compare costs with those of other optimizers."""
    for model in results:
        for ours, usual, what, limit in OTHER_CLAIMS.get(model, CLAIMS):
            rival = SAME_SIDES.get(model, {}).get(usual, usual)
            if {ours, rival} <= set(results[model]):
                ratio = results[model][ours][what] / results[model][rival][what]
                unit = {"ms": "CPU time", "gflop": "matmul work"}[what]
                claim = f"costs at most {limit:g} × {rival}"
                yield Verdict(
                    claim, ours, f"ratio of {unit} on {model}", ratio, limit, timed=what == "ms"
                )


def measure(shapes: Shapes, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Time all optimizers on one list of shapes, interleaved."""
    generator = torch.Generator().manual_seed(0)
    optimizers: dict[str, tuple[Optimizer, list[Tensor]]] = {}
    for key in args.optimizers:
        named = [(n, nn.Parameter(torch.randn(s, generator=generator) * 0.02)) for n, s in shapes]
        # In its first steps ours turns at every one: a schedule is followed to the letter.
        every = [(0, args.interval)] if key.startswith("spectral") else args.interval
        name, options = VARIANTS.get(key, (key, {}))
        optimizers[key] = (
            build(name, named, 1e-3, interval=every, **options),
            [p for _, p in named],
        )
    for optimizer, params in optimizers.values():
        for _ in range(2 * args.interval):  # the first steps set up state
            _step(optimizer, params, generator)
    times: dict[str, list[float]] = {key: [] for key in optimizers}
    steps = 2 * args.interval  # every second turn mends bases
    for _ in track(range(args.rounds), "Timing"):
        for key, (optimizer, params) in optimizers.items():
            spent = [_step(optimizer, params, generator) for _ in range(steps)]
            times[key].append(1e3 * sum(spent) / steps)
    found = {}
    for key, (optimizer, params) in optimizers.items():
        with FlopCounterMode(display=False) as counter:
            for _ in range(steps):
                _step(optimizer, params, generator)
        count = sum(p.numel() for p in params)
        found[key] = {
            "ms": statistics.median(times[key]),
            "gflop": counter.get_total_flops() / steps / 1e9,
            "state": state_bytes(optimizer) / count,
            "peak": max(_peak(optimizer, params, generator) for _ in range(steps)) / count,
        }
    return found


def _give_gradients(params: list[Tensor], generator: torch.Generator) -> None:
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) * 1e-3


def _peak(optimizer: Optimizer, params: list[Tensor], generator: torch.Generator) -> int:
    _give_gradients(params, generator)
    return peak_memory(optimizer.step)[0]


def peak_memory(function: Callable[[], object]) -> tuple[int, int]:
    """Return the most bytes that were allocated at a time while a function ran, and
    what remained.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler tells of each start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = [
        event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, live


def _step(optimizer: Optimizer, params: list[Tensor], generator: torch.Generator) -> float:
    _give_gradients(params, generator)
    start = time.process_time()
    optimizer.step()
    return time.process_time() - start


def state_bytes(optimizer: Optimizer) -> int:
    """Add up the tensors anywhere in an optimizer's state, each once."""
    seen: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            seen[value.data_ptr()] = value.numel() * value.element_size()
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    visit(dict(optimizer.state))
    return sum(seen.values())
