"""Stacks of experts, fused projections and packed state on several ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from eigenstep import Spectral
from eigenstep.optim import Fused

from .cases import equal, load, state_of, weights
from .ranks import on_ranks

SPLIT = (34, 20, 40)
"""Rows of the matrices that are fused."""
STEPS, SAVED = 20, 12
AXES = ("first axis", "second axis", "last axis")
"""Of tensors that are sharded along one."""


def values(seed: int) -> dict[str, Tensor]:
    """Weights or gradients: three experts, and three projections in one matrix."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"experts": (3, 47, 33), "fused": (sum(SPLIT), 32), "table": (1200, 36)}
    return {
        name: torch.randn(size, generator=generator, dtype=torch.float64)
        for name, size in sizes.items()
    }


class Stacked(nn.Module):
    """All matrices in few parameters."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in values(0).items():
            setattr(self, name, nn.Parameter(value))

    def optimizer(self, **options: Any) -> Spectral:
        groups = [
            {"params": [("experts", self.experts)], "fused": Fused(batch_dims=1)},
            {"params": [("fused", self.fused)], "fused": Fused(sizes=SPLIT)},
            {"params": [("table", self.table)]},
        ]
        return Spectral(groups, lr=0.01, **options)

    def give_gradients(self, step: int) -> None:
        for name, value in values(step + 1).items():
            param = getattr(self, name)
            sharded = hasattr(param, "device_mesh")
            if sharded:
                value = distribute_tensor(value, param.device_mesh, param.placements)
            param.grad = value


def separate_weights() -> dict[str, Tensor]:
    """What one process makes of the same matrices, each a parameter of its own."""

    def cut(given: dict[str, Tensor]) -> list[Tensor]:
        return [*given["experts"], *given["fused"].split(SPLIT), given["table"]]

    params = [nn.Parameter(value.clone()) for value in cut(values(0))]
    optimizer = Spectral(params, lr=0.01)
    for step in range(STEPS):
        for param, gradient in zip(params, cut(values(step + 1)), strict=True):
            param.grad = gradient.clone()
        optimizer.step()
    trained = [param.detach() for param in params]
    experts, fused = torch.stack(trained[:3]), torch.cat(trained[3:6])
    return {"experts": experts, "fused": fused, "table": trained[6]}


def go(model: Stacked, optimizer: Spectral, first: int, last: int) -> None:
    for step in range(first, last):
        model.give_gradients(step)
        optimizer.step()


def stepped(**options: Any) -> dict[str, Tensor]:
    """What one process makes of the few parameters."""
    model = Stacked()
    go(model, model.optimizer(**options), 0, STEPS)
    return weights(model)


def shared(kind: str) -> Stacked:
    """Three experts on two ranks: neither they nor other sides can be divided evenly."""
    if kind == "fsdp2":
        return fully_shard(Stacked())
    model = Stacked()
    if kind in AXES:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name, param in list(model.named_parameters()):
            axis = min(AXES.index(kind), param.ndim - 1)
            setattr(
                model, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(axis)]))
            )
    return model


@on_ranks(2)
def stacked(_: Path) -> Any:
    """Train sharded and replicated."""
    trained = {}
    for kind in ("fsdp2", "replicated", *AXES):
        model = shared(kind)
        go(model, model.optimizer(), 0, STEPS)
        trained[kind] = weights(model)
    return trained


@on_ranks(2)
def portraits(place: Path) -> Any:
    """Go on, and go on from a checkpoint without bases; tell which bases it had after all."""
    results = {}
    for kind in ("fsdp2", "replicated"):
        model, again = shared(kind), shared(kind)
        optimizer, other = model.optimizer(), again.optimizer()
        go(model, optimizer, 0, SAVED)
        without_bases = optimizer.state_dict(bases=False)
        saved = {"model": get_model_state_dict(model), "optimizer": without_bases}
        dcp.save(saved, checkpoint_id=place / kind)
        go(model, optimizer, SAVED, SAVED + 2)
        go(again, other, 0, 1)
        state = {"model": get_model_state_dict(again), "optimizer": other.state_dict(bases=False)}
        dcp.load(state, checkpoint_id=place / kind)
        set_model_state_dict(again, state["model"])
        other.load_state_dict(state["optimizer"])
        go(again, other, SAVED, SAVED + 2)
        names = [name for state in without_bases["state"].values() for name in state]
        bases = [name for name in names if name.startswith("basis")]
        results[kind] = weights(model), weights(again), bases
    return results


@on_ranks(2)
def packed(place: Path) -> Any:
    """Train with packed state, and go on from a checkpoint with a new optimizer."""
    results = {}
    for kind in ("fsdp2", "replicated"):
        model, again = shared(kind), shared(kind)
        optimizer, other = (some.optimizer(state_dtype=torch.int8) for some in (model, again))
        go(model, optimizer, 0, SAVED)
        dcp.save(state_of(model, optimizer), checkpoint_id=place / kind)
        go(model, optimizer, SAVED, STEPS)
        load(again, other, place / kind)
        go(again, other, SAVED, STEPS)
        formats = {
            value.dtype
            for state in optimizer.state.values()
            for key, value in state.items()
            if key.startswith("momentum")
        }
        results[kind] = weights(model), weights(again), formats
    dist.barrier()
    return results


DIFFERENCES: dict[str, tuple[int, dict[str, Any]]] = {
    "other parts": (1, {"fused": Fused(sizes=(20, 34, 40))}),
    "no gradients": (0, {}),
}
"""What one rank alone does: the group and its other options; none: its experts get no gradients."""


@on_ranks(2)
def stacked_differences(_: Path) -> Any:
    """Let one rank differ, even where numbers are not looked at."""
    rank = dist.get_rank()
    results = {}
    for name, (index, options) in DIFFERENCES.items():
        model = shared("fsdp2")
        optimizer = model.optimizer(nonfinite="ignore")
        optimizer.param_groups[index].update(options if rank else {})
        model.give_gradients(2)
        if rank and not options:
            model.experts.grad = None
        before = weights(model)
        start = time.monotonic()
        with pytest.raises(ValueError, match="the ranks have") as error:
            optimizer.step()
        seconds = time.monotonic() - start
        after = weights(model)
        results[name] = str(error.value), seconds, equal(before, after)
    return results
