"""What the ranks run: small networks, trained in every way of sharing the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from eigenstep import Spectral

BATCH = 8
KINDS = {2: ("ddp", "fsdp2", "sideways"), 4: ("ddp", "fsdp2", "sideways", "hsdp")}
"""Ways of sharing the work, by the number of ranks."""
Build = Callable[[], nn.Module]


class Net(nn.Module):
    """Matrices, some of them cut into pieces; vectors, a scalar; unused and frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.first = nn.Linear(6, 12)  # long: cut into blocks
        self.middle = nn.ModuleList([nn.Linear(12, 12) for _ in range(2)])
        self.wide = nn.Linear(12, 13, bias=False)  # 13: shards differ in size
        self.last = nn.Linear(13, 3)  # 3 rows: some ranks have none
        self.unused = nn.Linear(5, 5)
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim:
                    parameter.copy_(
                        torch.randn(parameter.shape, generator=generator)
                        / max(parameter.shape) ** 0.5
                    )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.middle:
            x = x + torch.tanh(layer(x))
        x = self.frozen(x) * self.scale
        return self.last(torch.tanh(self.wide(x)))


class One(nn.Module):
    """A single matrix: fewer than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(6, 3, bias=False)
        with torch.no_grad():
            self.only.weight.copy_(torch.randn(3, 6, generator=torch.Generator().manual_seed(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.only(x)


class Pair(nn.Module):
    """Two layers, to be cut along their columns and rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(
                    torch.randn(
                        parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
                    )
                )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All ranks' data of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), (x[:, :3].square() - x[:, 3:]).to(dtype)


def prepare(model: nn.Module, kind: str) -> nn.Module:
    """Wrap or shard a model for a way of sharing the work."""
    if kind == "serial":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    world = dist.get_world_size()
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    scalars = {parameter for parameter in model.parameters() if not parameter.ndim}

    def choose(param: nn.Parameter) -> Shard:
        across = kind == "sideways" and param.ndim == 2 and param.shape[1] % world == 0
        return Shard(1) if across else Shard(0)

    for layer in getattr(model, "middle", [])[:1]:
        fully_shard(layer, mesh=mesh, shard_placement_fn=choose)
    return fully_shard(model, mesh=mesh, shard_placement_fn=choose, ignored_params=scalars)


def backward(model: nn.Module, kind: str, step: int, dtype: torch.dtype) -> float:
    """Compute gradients of the mean loss over all ranks' data; each rank sees its part."""
    x, y = batch(step, dtype)
    world, rank = (1, 0) if kind == "serial" else (dist.get_world_size(), dist.get_rank())
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    loss = (model(x[mine]) - y[mine]).square().mean()
    loss.backward()
    if kind not in ("serial", "ddp"):  # fully_shard leaves scalars to the user
        for parameter in model.parameters():
            if not parameter.ndim and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
    mean = loss.detach() / world
    if kind != "serial":
        dist.all_reduce(mean)
    return mean.item()


def train(
    build: Build,
    kind: str,
    dtype: torch.dtype,
    steps: int = 20,
    recipe: Callable[..., Spectral] = Spectral,
    **options: Any,
) -> tuple[nn.Module, Spectral, list[float]]:
    """Train a new network and return it, its optimizer and the losses."""
    model = prepare(build().to(dtype), kind)
    optimizer = recipe(model.parameters(), **{"lr": 0.01, "max_dim": 6, **options})
    return model, optimizer, go_on(model, optimizer, kind, dtype, 0, steps)


def go_on(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    kind: str,
    dtype: torch.dtype,
    first: int,
    last: int,
) -> list[float]:
    """Take the steps ``first`` to ``last``."""
    losses = []
    for step in range(first, last):
        optimizer.zero_grad(set_to_none=True)
        losses.append(backward(model, kind, step, dtype))
        optimizer.step()
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights in full, on every rank."""
    whole = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        whole[name.removeprefix("module.")] = value.clone()
    return whole


def distance(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference of weights, relative to the largest entry of their tensor."""
    assert list(mine) == list(theirs)
    return max(
        ((mine[key] - theirs[key]).abs().max() / theirs[key].abs().max()).item() for key in mine
    )


def equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Tell whether weights are the same, bit for bit."""
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what goes into a checkpoint, in torch's own way."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def load(model: nn.Module, optimizer: torch.optim.Optimizer, place: Path) -> None:
    """Load a checkpoint that any number of ranks wrote."""
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=place)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def resume(
    place: Path, kind: str, dtype: torch.dtype, first: int, last: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Go on from a checkpoint with a new network and optimizer; return losses and weights."""
    # The checkpoint knows better
    model, optimizer, _ = train(Net, kind, dtype, 0, lr=0.5, interval=5)
    load(model, optimizer, place)
    return go_on(model, optimizer, kind, dtype, first, last), weights(model)
