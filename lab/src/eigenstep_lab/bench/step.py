"""Measure what one optimizer step costs: CPU time, matrix-product work and memory.

All optimizers step the same tensors in turn, round after round, so that a busy machine disturbs
them alike; the figures are medians. Gradients are random: what a step costs does not depend on
them. Every second step turns or recomputes the preconditioner (`--interval`), every second turn
mends bases, and all kinds of step count. "Peak" is the memory that a step takes for a while on top
of weights, gradients and state.

With `--parts memory`: state by mode, in bytes per weight, counted without computing anything; the
peak of a step that turns bases; and the time of a large embedding beside torch's AdamW.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from eigenstep import Spectral, Turning

from ..behavior import behavior
from ..console import MOST_THREADS, between, track
from ..lines import save_lines
from ..results import Table, Verdict
from ..rivals import TRAINERS, build
from ..study import Cell, Plans, figures

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


def vit(depth: int) -> Shapes:
    """List the shapes of ViT-B/16."""
    return transformer_shapes(
        768, depth, [("embed.weight", (768, 768)), ("head.weight", (1000, 768))]
    )


def gpt(depth: int) -> Shapes:
    """List the shapes of GPT-2, 124 million weights with 12 layers."""
    return transformer_shapes(
        768, depth, [("embed.weight", (50257, 768)), ("positions", (1024, 768))]
    )


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
    "gpt2-124m": gpt(12),
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


PARTS = ("price", "memory")
NETWORKS: Mapping[str, Callable[[int], Shapes]] = {"ViT-B/16": vit, "GPT-2": gpt}
"""Networks of `memory`."""
MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "bf16 bases": {"turning": Turning(dtype=torch.bfloat16)},
    "bf16": {"state_dtype": torch.bfloat16},
    "int8": {"state_dtype": torch.int8, "max_dim": 1024},
}
"""Options of `Spectral` that decide how much memory it takes."""


LIMITS = (("default", "GPT-2", 16.0), ("int8", "ViT-B/16", 6.0), ("int8", "GPT-2", 6.0))
"""Mode, model, and bytes of state per weight that it may take at most."""
MOST_PEAK, MOST_TIME = 6.0, 1.3
"""Bytes per weight that a step may take beside the state, and how much longer an embedding may take
than in AdamW.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to measure and for how long."""
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=["price"], help="default: price")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="shapes (default: all)")
    add("--optimizers", nargs="+", choices=CHOICES, default=list(CHOICES), help="default: all")
    add("--rounds", type=int, default=7, help="timed rounds of two turns each (default: 7)")
    add("--interval", type=int, default=2, help="steps between two turns (default: 2)")
    add("--depth", type=int, default=12, help="layers of GPT-2 of `memory` (default: 12)")
    add("--modes", nargs="+", choices=MODES, default=["default", "int8"], help="that step")
    add("--rows", type=int, default=50_000, help="of the embedding of `memory` (default: 50000)")
    threads = between(1, MOST_THREADS)
    add("--threads", type=threads, default=1, help="threads for torch (default: 1)")
    add("--plot", default="runs/bench/step.png", help="where the picture goes")


def cells(args: argparse.Namespace, found: Mapping[Any, Any]) -> Plans:
    """List a cell for each model, and those of memory."""
    torch.set_num_threads(args.threads)
    plans: dict[Any, Cell] = {}
    if "price" in args.parts:
        how = {name: getattr(args, name) for name in ("optimizers", "rounds", "interval")}
        for name in args.models:
            key = {"model": name, **how, "threads": args.threads}
            plans["price", name] = _cell(key, measure, MODELS[name], **how)
    if "memory" in args.parts:
        plans |= memory_cells(args)
    return plans


def _cell(key: Mapping[str, Any], compute: Callable[..., Any], *args: Any, **how: Any) -> Cell:
    return Cell(key, partial(compute, *args, **how), behavior("spectral", "fast", "options"))


def memory_cells(args: argparse.Namespace) -> dict[Any, Cell]:
    """List what is measured of memory."""
    plans: dict[Any, Cell] = {}
    for mode, model in product(MODES, NETWORKS):
        key = {"mode": mode, "state": model}
        plans["state", mode, model] = _cell(key, state_of, NETWORKS[model](12), MODES[mode])
    for mode in args.modes:
        key = {"mode": mode, "depth": args.depth}
        plans["peak", mode] = _cell(key, peak_of, gpt(args.depth), MODES[mode])
    key = {"rows": args.rows, "rounds": args.rounds, "threads": args.threads}
    plans["embedding",] = _cell(key, embedding_times, args.rows, args.rounds)
    return plans


def report(args: argparse.Namespace, found: Mapping[Any, Any]) -> dict[str, Any]:
    """Return tables and verdicts, and draw cost against width."""
    price = {name[1]: costs for name, costs in found.items() if name[0] == "price"}
    tables = [cost_table(name, costs) for name, costs in price.items()]
    judged = list(verdicts(price))
    plain: dict[str, Any] = {"models": price}
    widths = {name: int(name.split("-")[1]) for name in price if name.startswith("vit")}
    if widths:
        curves = {
            key: (list(widths.values()), [price[model][key]["ms"] for model in widths])
            for key in args.optimizers
        }
        labels = {"title": "Cost of an optimizer step", "x": "width", "y": "CPU ms per step"}
        save_lines(args.plot, curves, log=True, **labels)
    if "memory" in args.parts:
        state = {mode: {model: found["state", mode, model] for model in NETWORKS} for mode in MODES}
        peaks = {mode: found["peak", mode] for mode in args.modes}
        times = found["embedding",]
        plain |= {"state": state, "peaks": peaks, "embedding_ms": times}
        judged += memory_verdicts(state, peaks, times)
        tables += memory_tables(state, peaks, times, args)
    return figures(plain, judged, tables, "What holds")


def memory_tables(
    state: Mapping[str, Mapping[str, float]],
    peaks: Mapping[str, Mapping[str, float]],
    times: Mapping[str, float],
    args: argparse.Namespace,
) -> list[Table]:
    """Show what was measured of memory."""
    rows = [(mode, *(f"{own[name]:.2f}" for name in NETWORKS)) for mode, own in state.items()]
    steps = [(mode, f"{own['state']:.2f}", f"{own['peak']:.2f}") for mode, own in peaks.items()]
    title = f"A step of GPT-2 with {args.depth} layers, bytes per weight"
    spent = [(name, f"{ms:.0f}") for name, ms in times.items()]
    embedding = f"An embedding of {args.rows:,} × 768"
    return [
        Table("State, bytes per weight", ("mode", *NETWORKS), rows),
        Table(title, ("mode", "state", "peak beside it"), steps),
        Table(embedding, ("optimizer", "ms of CPU time"), spent, timed=True),
    ]


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


def memory_verdicts(state: Any, peaks: Any, times: Mapping[str, float]) -> Iterator[Verdict]:
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


Stepped = tuple[Optimizer, list[Tensor]]
"""An optimizer and its parameters."""


def measure(
    shapes: Shapes, *, optimizers: Sequence[str], rounds: int, interval: int
) -> dict[str, dict[str, float]]:
    """Time all optimizers on one list of shapes, interleaved."""
    generator = torch.Generator().manual_seed(0)
    steps = 2 * interval  # every second turn mends bases
    built = {key: _built(key, shapes, interval, generator) for key in optimizers}
    for stepped in built.values():
        _spent(stepped, steps, generator)  # the first steps set up state
    times: dict[str, list[float]] = {key: [] for key in built}
    for _ in range(rounds):
        for key, stepped in built.items():
            times[key].append(1e3 * _spent(stepped, steps, generator) / steps)
    return {
        key: {"ms": statistics.median(times[key]), **_counted(stepped, steps, generator)}
        for key, stepped in built.items()
    }


def _built(key: str, shapes: Shapes, interval: int, generator: torch.Generator) -> Stepped:
    named = [(n, nn.Parameter(torch.randn(s, generator=generator) * 0.02)) for n, s in shapes]
    # In its first steps ours turns at every one: a schedule is followed to the letter.
    every = [(0, interval)] if key.startswith("spectral") else interval
    name, options = VARIANTS.get(key, (key, {}))
    return build(name, named, 1e-3, interval=every, **options), [p for _, p in named]


def _spent(stepped: Stepped, steps: int, generator: torch.Generator) -> float:
    """Return the CPU seconds of some steps."""
    return sum(_step(*stepped, generator) for _ in range(steps))


def _counted(stepped: Stepped, steps: int, generator: torch.Generator) -> dict[str, float]:
    """Return matrix work of a step, and bytes of state and peak for each parameter."""
    optimizer, params = stepped
    with FlopCounterMode(display=False) as counter:
        _spent(stepped, steps, generator)
    count = sum(p.numel() for p in params)
    return {
        "gflop": counter.get_total_flops() / steps / 1e9,
        "state": state_bytes(optimizer) / count,
        "peak": max(_peak(optimizer, params, generator) for _ in range(steps)) / count,
    }


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
    tensors = {tensor.data_ptr(): tensor for tensor in _tensors_in(dict(optimizer.state))}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Give the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        for part in parts:
            yield from _tensors_in(part)


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
