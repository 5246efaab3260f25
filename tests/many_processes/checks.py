"""What the ranks do; the tests look at what comes back."""

from __future__ import annotations

import copy
import io
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from eigenstep import Spectral, Turning
from eigenstep.optim.distributed import agreement, sharding

from . import stacked  # noqa: F401 - more of what the ranks do
from .cases import (
    BATCH,
    KINDS,
    Net,
    One,
    Pair,
    backward,
    batch,
    equal,
    go_on,
    resume,
    state_of,
    train,
    weights,
)
from .ranks import on_ranks

NETWORKS = {"net": Net, "one": One}
DTYPES = (torch.float32, torch.float64)


def combinations(world: int) -> list[tuple[str, str, torch.dtype]]:
    """List network, way of sharing the work and number format of what so many ranks train."""
    keys = [(name, kind, dtype) for name in NETWORKS for kind in KINDS[world] for dtype in DTYPES]
    return [
        key for key in keys if key[1] != "sideways" or key == ("net", "sideways", torch.float64)
    ]


@on_ranks(4, 2)
def training(_: Path) -> Any:
    """Train 20 steps in every way of sharing the work."""
    return {
        (name, kind, dtype): weights(train(NETWORKS[name], kind, dtype)[0])
        for name, kind, dtype in combinations(dist.get_world_size())
    }


GROUPS: dict[str, dict[str, Any]] = {
    "everything else": {
        "eigenvalues": "kronecker",
        "turning": Turning("normalized", "truncated_cayley", rate=0.5, mend=False),
        "grafting": False,
        "clip": 1.0,
        "interval": [(0, 1), (3, 2)],
        "weight_decay": torch.tensor(0.3),
        "cautious_weight_decay": True,
    },
    "paper": {"recipe": Spectral.paper},
    "rate in a tensor": {"lr": torch.tensor(0.01)},
    "diagonal": {"structure": "diagonal", "nonfinite": "ignore"},
}


@on_ranks(2)
def options(_: Path) -> Any:
    """Train with options that change what is computed."""
    return {
        (name, kind): weights(train(Net, kind, torch.float64, 4, **chosen)[0])
        for name, chosen in GROUPS.items()
        for kind in ("ddp", "fsdp2")
    }


@on_ranks(4)
def rounds(_: Path) -> Any:
    """Train in rounds so short that there are many."""
    kinds = ("ddp", "fsdp2", "hsdp")
    with mock.patch.object(sharding, "ROUND_BYTES", 100):
        return {kind: weights(train(Net, kind, torch.float64, 4)[0]) for kind in kinds}


@on_ranks(4)
def rounding(_: Path) -> Any:
    """Round bfloat16 weights at random, with different random numbers on every rank."""
    trained = {}
    for kind in ("ddp", "hsdp"):
        torch.manual_seed(dist.get_rank())
        trained[kind] = weights(train(Net, kind, torch.bfloat16, 4, stochastic_rounding=True)[0])
    return trained


def refused(model: nn.Module, optimizer: Spectral, **arguments: Any) -> tuple[str, bool]:
    """Try a step; return the sentence, and whether the weights are as they were."""
    before = weights(model)
    with pytest.raises((ValueError, RuntimeError)) as error:
        optimizer.step(**arguments)
    return str(error.value), equal(before, weights(model))


@on_ranks(2)
def mistakes(_: Path) -> Any:
    """Make mistakes: all ranks say what is wrong before any weight is changed."""
    rank = dist.get_rank()
    results: dict[str, Any] = {}

    def layer(weight: float, gradient: float, rows: int = 2) -> tuple[nn.Module, Spectral]:
        model = nn.Linear(3, rows)
        nn.init.constant_(model.weight, weight)
        model.weight.grad = torch.full((rows, 3), gradient)
        return model, Spectral([model.weight])

    results["other weights"] = refused(*layer(rank + 1.0, 1.0))
    results["other gradients"] = refused(*layer(1.0, rank + 1.0))
    results["other shapes"] = refused(*layer(1.0, 1.0, rows=2 + rank))
    model, optimizer = layer(1.0, 1.0)
    results["curvature"] = refused(model, optimizer, curvature={model.weight: torch.ones(1, 2, 3)})
    for kind in ("ddp", "fsdp2"):
        model, optimizer, _ = train(Net, kind, torch.float32, 2)
        backward(model, kind, 2, torch.float32)
        gradients = [p.grad for p in model.parameters() if p.shape == (13, 12)]
        if rank == 1:
            (gradients[0].to_local() if kind == "fsdp2" else gradients[0])[0] = float("nan")
        results[f"nan {kind}"] = refused(model, optimizer)
        before = weights(model)
        optimizer.param_groups[0]["nonfinite"] = "skip"
        optimizer.step()
        results[f"skip {kind}"] = equal(before, weights(model))
        optimizer.zero_grad()
        go_on(model, optimizer, kind, torch.float32, 3, 4)

    model, optimizer, _ = train(Net, "fsdp2", torch.float32, 1)
    backward(model, "fsdp2", 2, torch.float32)
    if rank == 1:
        model.last.weight.grad = None
    results["other sets of gradients"] = refused(model, optimizer)
    with pytest.raises(ValueError, match="distributed=True"):
        Spectral(model.parameters(), distributed=False).step()
    results["partial sums"] = refused_placement(Partial(), 4)
    # Rows 0, 1, 4 and 5 are here
    results["stripes"] = refused_placement(_StridedShard(0, split_factor=2), 8)
    return results


def refused_placement(placement: Placement, rows: int) -> tuple[str, bool]:
    """Try to step a tensor that is spread in a way that Spectral cannot step."""
    mesh = init_device_mesh("cpu", (2,))
    spread = {"run_check": False, "shape": torch.Size([rows, 3]), "stride": (3, 1)}
    weight, gradient = (
        DTensor.from_local(torch.ones(4, 3), mesh, [placement], **spread) for _ in range(2)
    )
    param = nn.Parameter(weight)
    param.grad = gradient
    with pytest.raises(ValueError, match="must be") as error:
        Spectral([param]).step()
    return str(error.value), torch.equal(param.to_local(), torch.ones(4, 3))


def two_layers() -> tuple[nn.Parameter, nn.Parameter]:
    """Return two parameters with gradients, the same on all ranks."""
    first, second = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5))
    first.grad, second.grad = torch.full((4, 3), 0.5), torch.full((5,), 0.5)
    return first, second


def drop_gradients(optimizer: Spectral, *groups: int) -> None:
    for index in groups:
        optimizer.param_groups[index]["params"][0].grad = None


def make_sparse(optimizer: Spectral) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = param.grad.to_sparse()


LATER: dict[str, Any] = {
    "no gradient": lambda optimizer: drop_gradients(optimizer, 0),
    "no gradient at all": lambda optimizer: drop_gradients(optimizer, 0, 1),
    "another rate": lambda optimizer: optimizer.param_groups[1].update(lr=0.02),
    "another rate in a tensor": lambda optimizer: optimizer.param_groups[1].update(
        lr=torch.tensor(0.02)
    ),
    "another option": lambda optimizer: optimizer.param_groups[1].update(weight_decay=0.5),
    "another count": lambda optimizer: optimizer.param_groups[1].update(count=7),
    "one more group": lambda optimizer: optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(2))]}
    ),
    "sparse": make_sparse,
    "another layout": lambda optimizer: optimizer.param_groups[0].update(max_dim=2),
}
"""What one rank does between two steps."""


def refusal(optimizer: Spectral, watched: list[nn.Parameter]) -> tuple[str, float]:
    """Try a step that changes nothing; return the sentence and how long it took."""

    def everything() -> Any:
        return [w.detach() for w in watched], [dict(optimizer.state[w]) for w in watched]

    before = copy.deepcopy(everything())
    start = time.monotonic()
    with pytest.raises((ValueError, TypeError)) as error:
        optimizer.step()
    seconds = time.monotonic() - start
    torch.testing.assert_close(everything(), before, rtol=0, atol=0)
    return str(error.value), seconds


@on_ranks(2)
def differences(_: Path) -> Any:
    """Let one rank differ: all hear of it, and can go on together."""
    rank = dist.get_rank()
    results: dict[str, Any] = {}
    for name, change in LATER.items():
        layers = two_layers()
        groups = [{"params": [layer]} for layer in layers]
        lr = torch.tensor(0.01) if "tensor" in name else 0.01
        optimizer = Spectral(groups, lr=lr, nonfinite="ignore")
        optimizer.step()
        if rank == 1:
            change(optimizer)
        results[name] = refusal(optimizer, list(layers))
    layers = two_layers()
    ordered = list(reversed(layers)) if rank else list(layers)
    results["other order"] = refusal(Spectral(ordered), list(layers))
    layers[0].grad = None if rank else layers[0].grad
    results["no first gradient"] = refusal(Spectral(layers, nonfinite="ignore"), list(layers))
    layers = two_layers()
    optimizer = Spectral(layers)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.001, dtype=torch.float64) if rank else 0.001
    optimizer.step()  # the same number in another way
    layers[0].grad = layers[1].grad = None
    optimizer.step()  # nobody has any
    results["went on"] = [w.detach().clone() for w in layers]
    return results


def sharded(mesh: DeviceMesh) -> nn.Parameter:
    """Return a parameter of four rows, of which each of two ranks has two."""
    local = {"run_check": False, "shape": torch.Size([4, 3]), "stride": (3, 1)}
    param = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], **local))
    param.grad = torch.full_like(param, 0.5)
    return param


@on_ranks(4)
def subgroups(_: Path) -> Any:
    """Share parameters in rows and columns of ranks: what is wrong on one reaches all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    results: dict[str, Any] = {}
    for axes in (("row",), ("row", "column")):
        params = [sharded(mesh[axis]) for axis in axes]
        optimizer = Spectral(params, lr=0.01, nonfinite="skip")
        optimizer.step()
        results["stepped", axes] = all((p.to_local() < 1).all().item() for p in params)
        before = {str(k): p.to_local().clone() for k, p in enumerate(params)}
        if dist.get_rank() == 3:
            params[-1].grad.to_local()[0, 0] = float("nan")
        optimizer.step()
        after = {str(k): p.to_local() for k, p in enumerate(params)}
        results["skipped", axes] = equal(before, after)
        params[-1].grad.to_local()[0, 0] = 0.5
        optimizer.param_groups[0]["weight_decay"] = 0.1 * (dist.get_rank() == 3)
        try:
            optimizer.step()
        except ValueError as error:
            results["options", axes] = str(error)
        dist.barrier()
    return results


@on_ranks(4)
def absent(_: Path) -> Any:
    """Rank 3 lacks the parameters that it should share with rank 2."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    mesh = DeviceMesh.from_group(pairs[dist.get_rank() // 2], "cpu")
    everywhere = nn.Parameter(torch.ones(4, 3))
    everywhere.grad = torch.ones(4, 3)
    params = [everywhere] if dist.get_rank() == 3 else [everywhere, sharded(mesh)]
    began = time.monotonic()
    message = ""
    try:
        with mock.patch.object(agreement, "GRACE", 3.0):
            Spectral(params, lr=0.01).step()
    except ValueError as error:
        message = str(error)
    return message, time.monotonic() - began, bool((everywhere == 1).all())


@on_ranks(2)
def independent(_: Path) -> Any:
    """Ranks that do not work together step everything everywhere."""
    model, optimizer, _ = train(Net, "ddp", torch.float64, 4, distributed=False)
    sizes = [len(tensor) for state in optimizer.state.values() for tensor in state.values()]
    return weights(model), sizes


SAVED, END = 6, 12
"""Steps after which a checkpoint is written, and after which training ends."""


@on_ranks(4)
def saving(place: Path) -> Any:
    """Train with checkpoints on the way, one of them written while training goes on."""
    results = {}
    for kind in ("ddp", "fsdp2"):
        model, optimizer, _ = train(Net, kind, torch.float32, SAVED)
        dcp.save(state_of(model, optimizer), checkpoint_id=place / kind)
        names = {key: sorted(state) for key, state in optimizer.state_dict()["state"].items()}
        if kind == "ddp":
            apart = dist.new_group()  # collectives of saving must not mix with those of training
            writing = dcp.async_save(
                state_of(model, optimizer), checkpoint_id=place / "async", process_group=apart
            )
        losses = go_on(model, optimizer, kind, torch.float32, SAVED, END)
        results[kind] = losses, weights(model), names
        with pytest.raises(TypeError, match="only a part"):
            torch.save(optimizer.state_dict(), io.BytesIO())
    writing.result()
    return results


RESUMED = [
    ("ddp", "ddp"),
    ("ddp", "fsdp2"),
    ("fsdp2", "fsdp2"),
    ("fsdp2", "ddp"),
    ("async", "ddp"),
]
"""How a checkpoint was written, and how training goes on from it."""


@on_ranks(2)
def resuming(place: Path) -> Any:
    """Go on with fewer ranks, from each checkpoint in each way."""
    saved = place.parents[1] / "saving" / "4"
    return {
        (source, kind): resume(saved / source, kind, torch.float32, SAVED, END)
        for source, kind in RESUMED
    }


@on_ranks(2)
def whole_states(_: Path) -> Any:
    """Load a checkpoint of one process before and after the first step of several."""
    alone, optimizer, _ = train(Net, "serial", torch.float64, 3, distributed=False)
    saved = copy.deepcopy((alone.state_dict(), optimizer.state_dict()))
    go_on(alone, optimizer, "serial", torch.float64, 3, 6)
    trained = []
    for steps in (0, 2):
        model, optimizer, _ = train(Net, "ddp", torch.float64, steps)
        model.module.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        go_on(model, optimizer, "ddp", torch.float64, 3, 6)
        trained.append(weights(model))
    return weights(alone), trained


def with_another_layout(saved: dict[str, Any]) -> None:
    saved["state"] = {}
    saved["param_groups"][0]["max_dim"] = 5


def with_nan(saved: dict[str, Any]) -> None:
    """Damage the first scale that this rank has."""
    saved["state"] = {key: dict(state) for key, state in saved["state"].items()}
    for state in saved["state"].values():
        for name in state:
            if name.startswith("scale") and len(getattr(state[name], "local", [0])):
                state[name] = state[name].clone()
                getattr(state[name], "local", state[name])[0] = float("nan")
                return


@on_ranks(2)
def refused_loads(_: Path) -> Any:
    """Load states that do not fit, whole ones and parts."""
    _, alone, _ = train(Net, "serial", torch.float64, 2, distributed=False)
    model, optimizer, _ = train(Net, "ddp", torch.float64, 2)
    before = copy.deepcopy([dict(state) for state in optimizer.state.values()])
    messages = []
    for part in (alone, optimizer):
        for spoil in (with_another_layout, with_nan):
            saved = part.state_dict()
            spoil(saved)
            with pytest.raises(ValueError, match="does not fit") as error:
                optimizer.load_state_dict(saved)
            messages.append((spoil.__name__, str(error.value)))
    after = [dict(state) for state in optimizer.state.values()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    go_on(model, optimizer, "ddp", torch.float64, 2, 3)
    return messages


@on_ranks(4, 2)
def tensor_parallelism(_: Path) -> Any:
    """Train with tensor parallelism, on four ranks combined with FSDP2."""
    groups = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (groups, 2), mesh_dim_names=("data", "tensor"))
    model = Pair().double()
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if groups == 2:
        fully_shard(model, mesh=mesh["data"])
    optimizer = Spectral(model.parameters(), lr=0.01, max_dim=6)
    first = mesh["data"].get_local_rank() * BATCH // groups
    rows = slice(first, first + BATCH // groups)
    for step in range(6):
        x, y = batch(step, torch.float64)
        optimizer.zero_grad()
        (model(x[rows]) - y[rows]).square().mean().backward()
        optimizer.step()
    return weights(model)
