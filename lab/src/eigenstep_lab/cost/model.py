"""What a step costs on many GPUs: operations, memory of state, bytes on the wire.

Each optimizer is a list of units that one rank must step as a whole; ranks share units as
`Spectral` shares its matrices (by the same code). `eigenstep bench scaling` compares the figures
with what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from eigenstep.optim import Spectral
from eigenstep.optim.distributed.ownership import balance, candidate_of

from ..rivals import is_hidden_matrix

Shapes = list[tuple[str, tuple[int, ...]]]
FLOAT = 4
"""Bytes of a number: weights, gradients and state are in float32."""


@dataclass(frozen=True)
class Transformer:
    """A dense decoder.

    Attributes:
        layers: number of blocks.
        width: length of a token.
        hidden: width of the perceptrons.
        keys: width of keys and values.
        vocabulary: number of tokens; the output layer has its own weights.
        gated: whether perceptrons have a third matrix.
        tokens: tokens in a batch, over all GPUs.
    """

    layers: int
    width: int
    hidden: int
    keys: int
    vocabulary: int
    gated: bool
    tokens: int

    def shapes(self) -> Shapes:
        """List all parameters."""
        d, h = self.width, self.hidden
        block: Shapes = [
            ("query", (d, d)),
            ("key", (self.keys, d)),
            ("value", (self.keys, d)),
            ("out", (d, d)),
        ]
        block += [("mlp_in", (h, d)), ("mlp_out", (d, h)), ("norm1", (d,)), ("norm2", (d,))]
        block += [("gate", (h, d))] if self.gated else []
        ends: Shapes = [
            ("embed", (self.vocabulary, d)),
            ("head", (self.vocabulary, d)),
            ("norm", (d,)),
        ]
        return [
            (f"blocks.{k}.{name}", shape) for k in range(self.layers) for name, shape in block
        ] + ends

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(math.prod(shape) for _, shape in self.shapes())


MODELS: Mapping[str, Transformer] = {
    "124 M": Transformer(12, 768, 3072, 768, 50304, False, 2**19),
    "1.3 B": Transformer(24, 2048, 8192, 2048, 50304, False, 2**20),
    "7 B": Transformer(32, 4096, 11008, 4096, 32000, True, 2**22),
    "13 B": Transformer(40, 5120, 13824, 5120, 32000, True, 2**22),
    "70 B": Transformer(80, 8192, 28672, 1024, 32000, True, 2**22),
}
"""Networks with the shapes of GPT-2 and GPT-3 XL (output layer of its own) and of Llama 2."""

GPUS = (8, 64, 256, 1024)


@dataclass(frozen=True)
class Unit:
    """Something that one rank steps as a whole, several times.

    Attributes:
        pieces: how many of them there are.
        products: operations in matrix products of one, per step.
        state: bytes of state of one.
        size: number of weights of one.
        decompositions: operations in QR and eigendecompositions of one, per step; torch's counter
            does not see them.
        travels: whether its gradients and steps must be sent; what is stepped entry by entry stays
            where it is.
    """

    pieces: int
    products: float
    state: float
    size: float
    decompositions: float = 0.0
    travels: bool = True

    @property
    def flops(self) -> float:
        """All operations of one, per step."""
        return self.products + self.decompositions


def _elementwise(shape: tuple[int, ...]) -> Unit:
    """Two moments, as Adam has them."""
    size = math.prod(shape)
    return Unit(1, 0.0, 2 * FLOAT * size, size, travels=False)


def adamw(shapes: Shapes) -> list[Unit]:
    """AdamW: two moments."""
    return [_elementwise(shape) for _, shape in shapes]


def spectral(
    shapes: Shapes, make: Callable[..., Spectral] = Spectral, ends: str = "kronecker"
) -> list[Unit]:
    """Spectral: what the optimizer itself plans with.

    Args:
        shapes: the parameters.
        make: builds the optimizer.
        ends: structure of the curvature of embeddings and output layers.
    """
    units = []
    for name, shape in shapes:
        param = nn.Parameter(torch.empty(shape, device="meta"))
        structure = "kronecker" if is_hidden_matrix(name, param) else ends
        optimizer = make([param], structure=structure)
        candidate = candidate_of(optimizer.options_of(optimizer.param_groups[0]), param)
        products, state, size = candidate.costs
        units.append(Unit(candidate.plan.slices, products, state, size))
    return units


def muon(shapes: Shapes) -> list[Unit]:
    """Muon: momentum and 15 products for a hidden matrix; AdamW for everything else."""
    units = []
    for name, shape in shapes:
        n, m = min(shape), max(shape)
        products = 5 * (4.0 * n * n * m + 2.0 * n**3)
        hidden = is_hidden_matrix(name, torch.empty(shape, device="meta"))
        units.append(Unit(1, products, FLOAT * n * m, n * m) if hidden else _elementwise(shape))
    return units


INTERVAL = 10
"""Steps between two decompositions, as published."""


def _of_matrices(shapes: Shapes, unit: Callable[[tuple[int, ...]], Unit]) -> list[Unit]:
    """Apply a formula to matrices, and leave vectors to Adam."""
    return [unit(shape) if len(shape) > 1 else _elementwise(shape) for _, shape in shapes]


def soap(shape: tuple[int, ...]) -> Unit:
    """SOAP: two moments, two statistics and two bases; QR now and then."""
    sides, size = [n for n in shape if n <= 10_000], math.prod(shape)  # longer sides get no basis
    once = sum(2.0 * size * n for n in sides)
    cubes = sum(n**3 for n in sides)
    # Statistics; gradient and momentum into the basis, and the step back; when bases change,
    # momentum twice more and statistics times bases, of which QR with its orthogonal factor takes
    # 8/3 n^3.
    products = (4 + 2 / INTERVAL) * once + 2 * cubes / INTERVAL
    state = 2 * FLOAT * size + 2 * FLOAT * sum(n * n for n in sides)
    return Unit(1, products, state, size, 8 / 3 * cubes / INTERVAL)


def shampoo(shape: tuple[int, ...]) -> Unit:
    """Distributed Shampoo: momentum, grafting, statistics and inverse roots of blocks."""
    counts = [math.ceil(n / 1024) for n in shape]  # the largest side of a block
    sides = [n / count for n, count in zip(shape, counts, strict=True)]
    size = math.prod(sides)
    # Statistics and preconditioning every step; about 9 n^3 for an eigendecomposition and 2 n^3 for
    # the root.
    products = 2 * sum(2.0 * size * n for n in sides)
    roots = 11 * sum(n**3 for n in sides) / INTERVAL
    state = 2 * FLOAT * size + 2 * FLOAT * sum(n * n for n in sides)
    return Unit(math.prod(counts), products, state, size, roots)


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of the model.

    Attributes:
        units: what has to be stepped, given the parameters.
        splits: whether ranks share the work; if not, each does everything.
    """

    units: Callable[[Shapes], list[Unit]]
    splits: bool = True


OPTIMIZERS: Mapping[str, Optimizer] = {
    "AdamW": Optimizer(adamw),
    "Spectral": Optimizer(spectral),
    "Spectral.fast": Optimizer(lambda shapes: spectral(shapes, Spectral.fast)),
    "Spectral.fast, embeddings diagonal": Optimizer(
        lambda shapes: spectral(shapes, Spectral.fast, "diagonal")
    ),
    "Muon, distributed": Optimizer(muon),
    "SOAP, as published": Optimizer(lambda shapes: _of_matrices(shapes, soap), splits=False),
    "SOAP, if it were split": Optimizer(lambda shapes: _of_matrices(shapes, soap)),
    "Distributed Shampoo": Optimizer(lambda shapes: _of_matrices(shapes, shampoo)),
}


@dataclass(frozen=True)
class Cost:
    """What the busiest rank has to do in a step.

    Attributes:
        flops: operations in matrix products and decompositions.
        ddp_state: bytes of state that it keeps if weights are replicated.
        fsdp_state: the same if they are sharded.
        ddp_sent: bytes that a rank sends for the optimizer, on average, if weights are replicated.
        fsdp_sent: the same if they are sharded.
    """

    flops: float
    ddp_state: float
    fsdp_state: float
    ddp_sent: float
    fsdp_sent: float


def cost(units: Sequence[Unit], ranks: int, replicas: int = 1, *, splits: bool = True) -> Cost:
    """Return the cost of a step.

    Args:
        units: what has to be stepped.
        ranks: number of ranks.
        replicas: copies of sharded weights (HSDP).
        splits: whether ranks share the work; if not, each does everything, which sharded weights do
            not allow.
    """
    if not splits:
        flops, state = (
            sum(unit.pieces * getattr(unit, name) for unit in units) for name in ("flops", "state")
        )
        return Cost(flops, state, math.nan, 0.0, math.nan)
    whole = [(unit.pieces, (unit.flops, unit.state, unit.size)) for unit in units if unit.travels]
    _, loads = balance(_coarse(whole, ranks), 0.0, ranks)
    flops, state, _ = loads.max(0).tolist() if whole else (0.0, 0.0, 0.0)
    # What is stepped entry by entry has its state where its weights are.
    stays = sum(unit.state for unit in units if not unit.travels)
    moved = FLOAT * sum(unit.pieces * unit.size for unit in units if unit.travels)
    return Cost(
        flops, state + stays, state + stays * replicas / ranks, *traffic(moved, ranks, replicas)
    )


def _coarse(
    tasks: Sequence[tuple[int, tuple[float, ...]]], ranks: int
) -> list[tuple[int, tuple[float, ...]]]:
    """Join pieces of a task as long as every rank still gets several of them."""
    coarse = []
    for pieces, costs in tasks:
        joined = max(1, pieces // (8 * ranks))
        coarse.append((math.ceil(pieces / joined), tuple(joined * cost for cost in costs)))
    return coarse


def traffic(size: float, ranks: int, replicas: int = 1) -> tuple[float, float]:
    """Return what a rank must send on average so that owners can step `size` bytes.

    Args:
        size: bytes of all weights that have owners.
        ranks: number of ranks, each of which owns an equal part.
        replicas: copies of sharded weights (HSDP).

    Returns:
        If weights are replicated: owners send what they own to everyone else. If they are sharded:
        of what a rank owns it holds one part in `shards`; the gradients of the rest must come from
        its replica, and steps must go to all who hold the weights but itself.
    """
    shards = ranks // replicas
    share = size / ranks
    return share * (ranks - 1), share * ((shards - 1) / shards + replicas - 1 / shards)


def training_traffic(parameters: int, ranks: int) -> tuple[float, float]:
    """Return what DDP and FSDP2 send for a step themselves."""
    one = FLOAT * parameters * (ranks - 1) / ranks
    return 2 * one, 3 * one
