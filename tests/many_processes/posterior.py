"""What ranks do with a posterior; ``test_posterior`` looks at what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from eigenstep import Spectral
from eigenstep.optim import SpectralPosterior

from .ranks import on_ranks

INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
STEPS = 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def optimizer_of(model: nn.Module) -> SpectralPosterior:
    return Spectral.posterior(model.parameters(), lr=0.02, ess=50, batch_size=8)


def loss_of(model: nn.Module, part: int, parts: int) -> Tensor:
    """That of a part of the data, whose mean over the parts is that of all."""
    return model(INPUTS[part::parts]).square().mean()


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def run(wrapped: bool) -> dict[str, Any]:
    model = network()
    optimizer = optimizer_of(model)
    outer = DistributedDataParallel(model) if wrapped else model
    drawn = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with optimizer.sampled_params(train=True):
            drawn.append(weights(model))
            loss_of(outer, dist.get_rank(), dist.get_world_size()).backward()
        optimizer.step()
    states = [x for param in model.parameters() for x in optimizer.state[param].values()]
    return {"drawn": drawn, "weights": weights(model), "states": [x.clone() for x in states]}


@on_ranks(2)
def posteriors(_: Path) -> dict[str, Any]:
    return {"plain": run(wrapped=False), "DDP": run(wrapped=True)}


@on_ranks(2)
def different_gradients(_: Path) -> str:
    model = network()
    optimizer = optimizer_of(model)
    if dist.get_rank() == 0:
        loss_of(model, 0, 1).backward()
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""
