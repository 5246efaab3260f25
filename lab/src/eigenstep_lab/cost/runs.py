"""Short runs that measure what the cost model predicts: operations, state and bytes sent.

One process steps tensors with each optimizer; 2 and 4 processes train a GPT of 12 layers with
Spectral, by gloo.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from eigenstep.optim import Spectral

from ..bench.step import state_bytes
from ..models.transformers import GPT
from ..rivals import build
from ..train.parallel import leave
from .model import Shapes
from .traffic import TrafficCounter

Ranks = Mapping[str, list[dict[str, float]]]
"""What each rank does, for every way of sharing a network."""

WAYS: Mapping[str, tuple[str, int, int]] = {
    "DDP, 2 ranks": ("DDP", 2, 1),
    "FSDP2, 2 ranks": ("FSDP2", 2, 1),
    "DDP, 4 ranks": ("DDP", 4, 1),
    "FSDP2, 4 ranks": ("FSDP2", 4, 1),
    "HSDP, 2 × 2 ranks": ("HSDP", 4, 2),
}
"""How a network is shared, by how many ranks, with how many copies of sharded weights."""

ALWAYS = [(0, 2)]
"""Turn bases every second step, from the first one on."""
PERIOD = 4
"""So many steps are alike from then on: every second turn mends bases."""

MEASURED: Mapping[str, tuple[str, Any, int]] = {
    "AdamW": ("adamw", 1, 1),
    "Spectral": ("spectral", ALWAYS, PERIOD),
    "Spectral.fast": ("spectral_fast", ALWAYS, PERIOD),
    "Muon, distributed": ("muon", 1, 1),
    "SOAP, as published": ("soap_reference", 10, 10),
}
"""Rivals of the model that run here: name, interval, and steps to average over."""


def gpt(width: int) -> GPT:
    """Build the network that is measured."""
    return GPT(65, length=16, width=width, depth=12, heads=2)


def measure_single(name: str, shapes: Shapes) -> dict[str, float]:
    """Measure one process that steps tensors of some shapes."""
    key, interval, period = MEASURED[name]

    def noise(shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    named = [(name, nn.Parameter(noise(shape, seed))) for seed, (name, shape) in enumerate(shapes)]
    optimizer = build(key, named, 1e-3, interval=interval)

    def step(number: int) -> None:
        for seed, (_, param) in enumerate(named):
            param.grad = noise(tuple(param.shape), seed + number)
        optimizer.step()

    for number in range(period):  # sets up state
        step(number)
    with FlopCounterMode(display=False) as counter:
        for number in range(period, 2 * period):
            step(number)
    return {"products": counter.get_total_flops() / period, "state": float(state_bytes(optimizer))}


def trained(model: nn.Module) -> dict[str, float]:
    """Train with Spectral, and return what this process computes, keeps and sends in a step."""
    optimizer = Spectral(model.parameters(), interval=ALWAYS)
    text = torch.randint(65, (1, 17), generator=torch.Generator().manual_seed(0))

    def compute_gradients() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]

    for _ in range(PERIOD):  # sets up state
        compute_gradients()
        optimizer.step()
    flops = 0.0
    traffic = TrafficCounter()
    for _ in range(PERIOD):
        compute_gradients()
        with FlopCounterMode(display=False) as counter, traffic:
            optimizer.step()
        flops += counter.get_total_flops()
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return {
        "flops": flops / PERIOD,
        "state": float(sum(t.numel() * t.element_size() for t in tensors)),
        "sent": traffic.total / PERIOD,
        "collectives": sum(traffic.calls.values()) / PERIOD,
    }


def measure_ranks(width: int) -> Ranks:
    """Measure all ranks of every way of sharing a network; four processes are started once."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (width, folder), max(ranks for _, ranks, _ in WAYS.values()))  # type: ignore[no-untyped-call]
        return {
            name: [
                torch.load(Path(folder) / f"{name} {rank}.pt", weights_only=True)
                for rank in range(ranks)
            ]
            for name, (_, ranks, _) in WAYS.items()
        }


def _rank(rank: int, width: int, folder: str) -> None:
    torch.set_num_threads(1)
    for size in sorted({ranks for _, ranks, _ in WAYS.values()}):
        if rank >= size:
            continue
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store-{size}", rank=rank, world_size=size
        )
        for name, (way, ranks, replicas) in WAYS.items():
            if ranks == size:
                torch.save(
                    trained(_shared(gpt(width), way, ranks, replicas)),
                    Path(folder) / f"{name} {rank}.pt",
                )
        dist.barrier()
        leave()


def _shared(model: nn.Module, way: str, ranks: int, replicas: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if way == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    shape = (replicas, ranks // replicas) if replicas > 1 else (ranks,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    fully_shard(model, mesh=mesh)
    return model
