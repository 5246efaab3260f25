"""Random configurations: options of Spectral, parameters, and what happens to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eigenstep import Turning
from eigenstep.optim import Fused

from .streams import PATTERNS, gradients

EMBEDDING = (1024, 32)
SHAPES: Mapping[tuple[int, ...], tuple[Fused, ...]] = {
    (1,): (),
    (7,): (),
    (1500,): (),
    (1, 1): (),
    (1, 9): (),
    (3, 5): (),
    (8, 8): (),
    (4, 16): (),
    (16, 8): (),
    (40, 32): (),
    (12, 4): (Fused(sizes=(4, 8)), Fused(sizes=(1, 11)), Fused(heads=3), Fused(heads=2, axis=1)),
    (24, 6): (Fused(heads=4), Fused(sizes=(4, 2), axis=1)),
    (48, 16): (
        Fused(sizes=(16, 16, 16)),
        Fused(sizes=(16, 16, 16), heads=2),
        Fused(sizes=(32, 8, 8), heads=(4, 1, 1)),
    ),
    (2, 3, 4): (Fused(batch_dims=1),),
    (3, 16, 16): (Fused(batch_dims=0), Fused(batch_dims=1)),
    (4, 2, 3, 3): (Fused(batch_dims=1), Fused(batch_dims=2)),
    EMBEDDING: (),
}
"""Shapes of parameters, and what some may hold: experts, fused projections, heads."""
TYPICAL: Mapping[str, tuple[Any, ...]] = {
    "interval": (1, 2, 5, [(0, 1), (7, 3)]),
    "nesterov": (0.0, 0.1, 0.2),
    "structure": ("auto", "kronecker", "full", "diagonal"),
    "max_dim": (2048, 6),
    "max_ratio": (None, 1.0, 2.0),
    "turning": (
        Turning(rate=0.5),
        Turning(rate=0.05, map="truncated_cayley"),
        Turning(map="cayley", mend=False),
        Turning(rotation="normalized"),
        Turning(rotation="pairwise", sweeps=2),
    ),
    "state_dtype": (None, torch.int8),
}
"""Options that change how curvature is learned; steps keep their bound."""
RARE: Mapping[str, tuple[Any, ...]] = {
    "nesterov": (0.0, 0.2, True, 1.0),
    "eigenvalues": ("corrected", "kronecker"),
    "root": (2.0, 1.0, 4.0),
    "clip": (None, 1.0),
    "grafting": (True, False),
    "damping": (1e-10, 1e-4),
    "weight_decay": (0.0, 0.1),
    "cautious_weight_decay": (False, True),
    "state_dtype": (None, torch.bfloat16, torch.float64, torch.int8),
    "stochastic_rounding": (False, True),
    "maximize": (False, True),
}
"""Options that change how large steps are, or how exact."""
BETAS = ((0.5, 0.9), (0.9, 0.9), (0.9, 0.95), (0.95, 0.95), (0.9, 0.99), (0.95, 0.99))
"""Betas for which AdamW's own steps keep the bound."""
ODD_BETAS = (
    (0.0, 0.9),
    (0.0, 0.95),
    (0.99, 0.5),
    (0.95, 0.5),
    (0.9, 0.5),
    (0.9, 0.999),
    (0.99, 0.999),
    (0.99, 0.9),
)


@dataclass(frozen=True)
class Plan:
    """One configuration.

    Attributes:
        options: Of Spectral, beside learning rate and betas.
        lr: Learning rate.
        betas: Decay rates.
        dtype: Number format of the weights.
        start: First weights.
        layouts: Options of each of them alone.
        rare: Which of them are embeddings, which step as in AdamW.
        model: Whether they are those of `Network`, and the optimizer finds out by itself what they
            are.
        streams: Gradients of each parameter, steps × shape.
        missing: Steps × parameters, where a gradient is None.
        broken: What every entry of some gradient is at a step, NaN or infinite; 0 if all is well.
        kills: Steps before which the training is killed and restored.
        light: Before which step another training goes on from a checkpoint without bases.
        bounded: Whether moves have a bound.
    """

    options: Mapping[str, Any]
    lr: float
    betas: tuple[float, float]
    dtype: torch.dtype
    start: list[Tensor]
    layouts: list[Mapping[str, Any]]
    rare: list[bool]
    model: bool
    streams: list[Tensor]
    missing: np.ndarray
    broken: np.ndarray
    kills: frozenset[int]
    light: int
    bounded: bool

    def describe(self) -> str:
        """Say what is needed to write the configuration down by hand."""
        shapes = [tuple(start.shape) for start in self.start]
        largest = [f"{float(stream.abs().max()):.1e}" for stream in self.streams]
        return (
            f"options {dict(self.options)}, layouts {self.layouts}, {'model, ' * self.model}lr "
            f"{self.lr:.3g}, "
            f"betas {self.betas}, {self.dtype}, shapes {shapes}, "
            f"largest gradients {largest}, {len(self.missing)} steps, killed before "
            f"{sorted(self.kills)}"
        )


def draw(chance: np.random.Generator) -> Plan:
    """Draw a configuration."""
    steps = int(chance.integers(5, 61))
    model = bool(chance.random() < 0.03)
    # Large ones take their time: each but now and then.
    known, shares = list(SHAPES), np.array([min(1.0, 300 / math.prod(shape)) for shape in SHAPES])
    picked = chance.choice(len(known), size=int(chance.integers(1, 5)), p=shares / shares.sum())
    shapes = [known[k] for k in picked]
    shapes = [tuple(weight.shape) for weight in Network().parameters()] if model else shapes
    layouts = [_layout(chance, shape) if not model else {} for shape in shapes]
    bounded = bool(chance.random() < 0.5)
    tables = [TYPICAL] if bounded else [TYPICAL, RARE]
    options = {
        name: values[chance.integers(len(values))]
        for table in tables
        for name, values in table.items()
    }
    # Most of them as they are by default, so that the few that are not stand out.
    options = {name: value for name, value in options.items() if chance.random() < 0.4}
    options = {"weight_decay": 0.0, **options, "nonfinite": str(chance.choice(["raise", "skip"]))}
    if options.get("structure") == "full":  # cubes of whole parameters would take all the time
        options["max_dim"] = min(200, options.get("max_dim", 200))
    dtype = torch.bfloat16 if not bounded and chance.random() < 0.15 else torch.float32
    scales = 10.0 ** chance.choice([-44, -30, -10, -3, 0, 0, 0, 3, 10, 30, 37.5], size=len(shapes))
    limit = torch.finfo(dtype).max
    streams = [
        gradients(chance, str(chance.choice(list(PATTERNS))), shape, steps, scale)
        .clamp(-limit, limit)
        .to(dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    count = int(chance.integers(0, 4))
    return Plan(
        options=options,
        lr=float(10.0 ** chance.uniform(-5, -1)),
        betas=(BETAS + ODD_BETAS)[chance.integers(len(BETAS) + len(ODD_BETAS) * (not bounded))],
        dtype=dtype,
        start=[torch.from_numpy(chance.standard_normal(shape)).to(dtype) for shape in shapes],
        layouts=layouts,
        rare=[
            shape == (Network.WORDS if model else EMBEDDING) and _recognized(options, model)
            for shape in shapes
        ],
        model=model,
        streams=streams,
        missing=chance.random((steps, len(shapes))) < chance.choice([0.0, 0.1, 0.5]),
        broken=np.where(
            chance.random(steps) < 0.05,
            chance.choice([math.nan, math.inf, -math.inf], size=steps),
            0.0,
        ),
        kills=frozenset(chance.integers(0, steps, size=count).tolist()),
        light=int(chance.integers(0, 2 * steps)),
        bounded=bounded,
    )


def _layout(chance: np.random.Generator, shape: tuple[int, ...]) -> Mapping[str, Any]:
    some = SHAPES[shape]
    if not some or chance.random() >= 0.5:
        return {}
    return {"fused": some[chance.integers(len(some))]}


def _recognized(options: Mapping[str, Any], model: bool) -> bool:
    """Tell whether embeddings step as in AdamW."""
    corrected = options.get("eigenvalues", "corrected") == "corrected"
    return model or (options.get("structure", "auto") == "auto" and corrected)


class Network(nn.Module):
    """One of each kind of module that `Spectral.for_model` knows."""

    WORDS = (80, 8)

    def __init__(self) -> None:
        """Set it up; it is never run."""
        super().__init__()
        self.words = nn.Embedding(*self.WORDS)
        self.attention = nn.MultiheadAttention(16, 2)
        self.filters = nn.Conv2d(3, 4, 3)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(16, 7, bias=False)
