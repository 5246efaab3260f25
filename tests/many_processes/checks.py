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
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from eigenstep import Spectral
from eigenstep.optim.distributed import sharding

from . import stacked  # noqa: F401 - more of what the ranks do
from .cases import (
    BATCH,
    KINDS,
    Net,
    One,
    Pair,
    backward,
    batch,
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
    """List network, way of sharing the work and number format of what is trained on so
    many ranks.
    """
    whole = [("net", kind, dtype) for kind in KINDS[world] for dtype in DTYPES]
    single = [("one", kind, dtype) for kind in KINDS[world] for dtype in DTYPES]
    return [
        key
        for key in whole + single
        if key[1] != "sideways" or key == ("net", "sideways", torch.float64)
    ]


@on_ranks(4, 2)
def training(_: Path) -> Any:
    """Weights after 20 steps, for every way of sharing the work."""
    wanted = combinations(dist.get_world_size())
    return {
        (name, kind, dtype): weights(train(NETWORKS[name], kind, dtype)[0])
        for name, kind, dtype in wanted
    }


GROUPS: dict[str, dict[str, Any]] = {
    "everything else": {
        "grafting": "adam",
        "residual": True,
        "clip": 1.0,
        "interval": [(0, 1), (3, 2)],
    },
    "paper": {
        "eigenvalues": "kronecker",
        "rotation": "normalized",
        "maps": "truncated",
        "basis_lr": 0.5,
    },
    "one by one": {"foreach": False, "lr": torch.tensor(0.01)},
    "diagonal": {"structure": "diagonal", "nonfinite": "ignore"},
}


@on_ranks(2)
def options(_: Path) -> Any:
    """Options that change what is computed."""
    return {
        (name, kind): weights(train(Net, kind, torch.float64, 4, **chosen)[0])
        for name, chosen in GROUPS.items()
        for kind in ("ddp", "fsdp2")
    }


@on_ranks(4)
def rounds(_: Path) -> Any:
    """Rounds so short that there are many."""
    with mock.patch.object(sharding, "ROUND_BYTES", 100):
        return {
            kind: weights(train(Net, kind, torch.float64, 4)[0])
            for kind in ("ddp", "fsdp2", "hsdp")
        }


@on_ranks(4)
def rounding(_: Path) -> Any:
    """bfloat16 weights that are rounded at random, with different random numbers on every rank."""
    found = {}
    for kind in ("ddp", "hsdp"):
        torch.manual_seed(dist.get_rank())
        found[kind] = weights(train(Net, kind, torch.bfloat16, 4, stochastic_rounding=True)[0])
    return found


@on_ranks(2)
def mistakes(_: Path) -> Any:
    """What goes wrong is said in a sentence, on all ranks, before any weight is changed."""
    rank = dist.get_rank()
    found: dict[str, Any] = {}

    def note(name: str, model: nn.Module, optimizer: Spectral, **arguments: Any) -> None:
        before = weights(model)
        with pytest.raises((ValueError, RuntimeError)) as error:
            optimizer.step(**arguments)
        after = weights(model)
        found[name] = str(error.value), all(torch.equal(before[key], after[key]) for key in before)

    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, rank + 1.0)
    model.weight.grad = torch.ones(2, 3)
    note("other weights", model, Spectral([model.weight]))
    nn.init.constant_(model.weight, 1.0)
    model.weight.grad = torch.full((2, 3), rank + 1.0)
    note("other gradients", model, Spectral([model.weight]))
    model = nn.Linear(3, 2 + rank)
    model.weight.grad = torch.ones_like(model.weight)
    note("other shapes", model, Spectral([model.weight]))
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    model.weight.grad = torch.ones(2, 3)
    note(
        "curvature", model, Spectral([model.weight]), curvature={model.weight: torch.ones(1, 2, 3)}
    )

    for kind in ("ddp", "fsdp2"):
        sharded, optimizer, _ = train(Net, kind, torch.float32, 2)
        backward(sharded, kind, 2, torch.float32)
        broken = next(
            p for p in sharded.parameters() if p.grad is not None and p.shape == (13, 12)
        ).grad
        if rank == 1:
            (broken.to_local() if kind == "fsdp2" else broken)[0] = float("nan")
        note(f"nan {kind}", sharded, optimizer)
        before = weights(sharded)
        optimizer.param_groups[0]["nonfinite"] = "skip"
        optimizer.step()
        after = weights(sharded)
        found[f"skip {kind}"] = all(torch.equal(before[key], after[key]) for key in before)
        optimizer.zero_grad()
        go_on(sharded, optimizer, kind, torch.float32, 3, 4)

    sharded, optimizer, _ = train(Net, "fsdp2", torch.float32, 1)
    backward(sharded, "fsdp2", 2, torch.float32)
    if rank == 1:
        sharded.last.weight.grad = None
    note("other sets of gradients", sharded, optimizer)
    with pytest.raises(ValueError, match="distributed=True"):
        Spectral(sharded.parameters(), distributed=False).step()

    mesh = init_device_mesh("cpu", (2,))
    # Rows 0, 1, 4, 5 here
    placements = {"partial sums": Partial(), "stripes": _StridedShard(0, split_factor=2)}
    for name, placement in placements.items():
        size = torch.Size([4 if name == "partial sums" else 8, 3])
        given = [
            DTensor.from_local(
                torch.ones(4, 3), mesh, [placement], run_check=False, shape=size, stride=(3, 1)
            )
            for _ in range(2)
        ]
        param = nn.Parameter(given[0])
        param.grad = given[1]
        with pytest.raises(ValueError, match="must be") as error:
            Spectral([param]).step()
        found[name] = str(error.value), torch.equal(param.to_local(), torch.ones(4, 3))
    return found


def two_layers() -> tuple[nn.Parameter, nn.Parameter]:
    """Two parameters with gradients, the same on all ranks."""
    first, second = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5))
    first.grad, second.grad = torch.full((4, 3), 0.5), torch.full((5,), 0.5)
    return first, second


def drop_gradient(optimizer: Spectral, index: int = 0) -> None:
    optimizer.param_groups[index]["params"][0].grad = None


def drop_all(optimizer: Spectral) -> None:
    drop_gradient(optimizer, 0)
    drop_gradient(optimizer, 1)


def make_sparse(optimizer: Spectral) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = param.grad.to_sparse()


LATER: dict[str, Any] = {
    "no gradient, ignore": drop_gradient,
    "no gradient in one group": lambda optimizer: drop_gradient(optimizer, 1),
    "no gradient at all": drop_all,
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
    """Try a step; return the sentence and how long it took, if nothing was changed."""
    before = copy.deepcopy(
        ([w.detach() for w in watched], [dict(optimizer.state[w]) for w in watched])
    )
    start = time.monotonic()
    with pytest.raises((ValueError, TypeError)) as error:
        optimizer.step()
    seconds = time.monotonic() - start
    after = [w.detach() for w in watched], [dict(optimizer.state[w]) for w in watched]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    return str(error.value), seconds


@on_ranks(2)
def differences(_: Path) -> Any:
    """One rank that differs from the others, at the first step or later: all hear of it, and can go
    on together.
    """
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for name, change in LATER.items():
        layers = two_layers()
        groups = [{"params": [layer]} for layer in layers]
        tensor = "tensor" in name
        optimizer = Spectral(groups, lr=torch.tensor(0.01) if tensor else 0.01, nonfinite="ignore")
        optimizer.step()
        if rank == 1:
            change(optimizer)
        found[name] = refusal(optimizer, list(layers))
    layers = two_layers()
    firsts: dict[str, Any] = {
        "other groups": [{"params": list(layers)}]
        if rank
        else [{"params": [layer]} for layer in layers],
        "other order": list(reversed(layers)) if rank else list(layers),
        "fewer": list(layers[:1]) if rank else list(layers),
    }
    for name, groups in firsts.items():
        found[name] = refusal(Spectral(groups), list(layers))
    layers[0].grad = None if rank else layers[0].grad
    found["no first gradient"] = refusal(Spectral(layers, nonfinite="ignore"), list(layers))
    layers = two_layers()
    optimizer = Spectral(layers)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.001, dtype=torch.float64) if rank else 0.001
    optimizer.step()  # the same number in another way
    layers[0].grad = layers[1].grad = None
    optimizer.step()  # nobody has any
    found["went on"] = [w.detach().clone() for w in layers]
    return found


@on_ranks(4)
def subgroups(_: Path) -> Any:
    """Parameters that two of the four ranks share, in rows and columns: what is wrong on one
    reaches all.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))

    def sharded(axis: str) -> nn.Parameter:
        shape = torch.Size([4, 3])
        one = DTensor.from_local(
            torch.ones(2, 3), mesh[axis], [Shard(0)], run_check=False, shape=shape, stride=(3, 1)
        )
        param = nn.Parameter(one)
        param.grad = torch.full_like(one, 0.5)
        return param

    found: dict[str, Any] = {}
    for axes in (("row",), ("row", "column")):
        params = [sharded(axis) for axis in axes]
        optimizer = Spectral(params, lr=0.01, nonfinite="skip")
        optimizer.step()
        found["stepped", axes] = all((p.to_local() < 1).all().item() for p in params)
        before = [p.to_local().clone() for p in params]
        if dist.get_rank() == 3:
            params[-1].grad.to_local()[0, 0] = float("nan")
        optimizer.step()
        found["skipped", axes] = all(
            torch.equal(p.to_local(), w) for p, w in zip(params, before, strict=True)
        )
        params[-1].grad.to_local()[0, 0] = 0.5
        optimizer.param_groups[0]["weight_decay"] = 0.1 * (dist.get_rank() == 3)
        try:
            optimizer.step()
        except ValueError as error:
            found["options", axes] = str(error)
        dist.barrier()
    return found


@on_ranks(4)
def absent(_: Path) -> Any:
    """Rank 3 has none of the parameters that it should share with rank 2, only one that
    all share.
    """
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    mesh = DeviceMesh.from_group(pairs[dist.get_rank() // 2], "cpu")
    everywhere = nn.Parameter(torch.ones(4, 3))
    params = [everywhere]
    if dist.get_rank() != 3:
        shape = torch.Size([4, 3])
        one = DTensor.from_local(
            torch.ones(2, 3), mesh, [Shard(0)], run_check=False, shape=shape, stride=(3, 1)
        )
        params.append(nn.Parameter(one))
    for param in params:
        param.grad = torch.ones_like(param)
    began = time.monotonic()
    try:
        Spectral(params, lr=0.01).step()
    except ValueError as error:
        return str(error), time.monotonic() - began, bool((everywhere == 1).all())
    return "", time.monotonic() - began, False


@on_ranks(2)
def independent(_: Path) -> Any:
    """Ranks that do not work together: everything is stepped everywhere."""
    model, optimizer, _ = train(Net, "ddp", torch.float64, 4, distributed=False)
    return weights(model), [
        len(tensor) for own in optimizer.state.values() for tensor in own.values()
    ]


SAVED, END = 6, 12
"""Steps after which a checkpoint is written, and after which training ends."""


@on_ranks(4)
def saving(place: Path) -> Any:
    """Train with checkpoints on the way, one of them written while training goes on."""
    found = {}
    for kind in ("ddp", "fsdp2"):
        model, optimizer, _ = train(Net, kind, torch.float32, SAVED)
        dcp.save(state_of(model, optimizer), checkpoint_id=place / kind)
        names = {key: sorted(own) for key, own in optimizer.state_dict()["state"].items()}
        if kind == "ddp":
            apart = dist.new_group()  # collectives of saving must not mix with those of training
            writing = dcp.async_save(
                state_of(model, optimizer), checkpoint_id=place / "async", process_group=apart
            )
        losses = go_on(model, optimizer, kind, torch.float32, SAVED, END)
        found[kind] = losses, weights(model), names
        with pytest.raises(TypeError, match="only a part"):
            torch.save(optimizer.state_dict(), io.BytesIO())
    writing.result()
    return found


@on_ranks(2)
def resuming(place: Path) -> Any:
    """Go on with fewer ranks, from each checkpoint in each way."""
    saved = place.parents[1] / "saving" / "4"
    pairs = [
        ("ddp", "ddp"),
        ("ddp", "fsdp2"),
        ("fsdp2", "fsdp2"),
        ("fsdp2", "ddp"),
        ("async", "ddp"),
    ]
    return {
        (source, kind): resume(saved / source, kind, torch.float32, SAVED, END)
        for source, kind in pairs
    }


@on_ranks(2)
def whole_states(_: Path) -> Any:
    """A checkpoint that one process wrote with torch.save, loaded by ranks before and after their
    first step.
    """
    alone, own, _ = train(Net, "serial", torch.float64, 3, distributed=False)
    saved = copy.deepcopy((alone.state_dict(), own.state_dict()))
    go_on(alone, own, "serial", torch.float64, 3, 6)
    found = []
    for steps in (0, 2):
        model, optimizer, _ = train(Net, "ddp", torch.float64, steps)
        model.module.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        go_on(model, optimizer, "ddp", torch.float64, 3, 6)
        found.append(weights(model))
    return weights(alone), found


@on_ranks(2)
def refused_loads(_: Path) -> Any:
    """Whole states that do not fit ranks that share the work already, and damaged parts of their
    own.
    """
    _, own, _ = train(Net, "serial", torch.float64, 2, distributed=False)
    model, optimizer, _ = train(Net, "ddp", torch.float64, 2)
    before = [(name, t.clone()) for state in optimizer.state.values() for name, t in state.items()]
    found = []
    for part in (own, optimizer):
        for name in ("layout", "nan"):
            saved = part.state_dict()
            saved["state"] = {key: dict(state) for key, state in saved["state"].items()}
            if name == "layout":
                saved["state"] = {}
                saved["param_groups"][0]["max_dim"] = 5
            else:
                key, what = next(
                    (key, what)
                    for key, state in saved["state"].items()
                    for what, value in state.items()
                    if what.startswith("scale") and len(getattr(value, "local", [0]))
                )
                damaged = saved["state"][key][what] = saved["state"][key][what].clone()
                getattr(damaged, "local", damaged)[0] = float("nan")
            with pytest.raises(ValueError, match="does not fit") as error:
                optimizer.load_state_dict(saved)
            found.append((name, str(error.value)))
    after = [(name, t) for state in optimizer.state.values() for name, t in state.items()]
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(before, after, strict=True))
    go_on(model, optimizer, "ddp", torch.float64, 2, 3)
    return found


def tensor_parallel(steps: int, dtype: torch.dtype) -> nn.Module:
    """Train with tensor parallelism, on four ranks combined with FSDP2."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    model = Pair().to(dtype)
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if world == 4:
        fully_shard(model, mesh=mesh["data"])
    optimizer = Spectral(model.parameters(), lr=0.01, max_dim=6)
    for step in range(steps):
        x, y = batch(step, dtype)
        rows = slice(
            *(
                mesh["data"].get_local_rank() * BATCH // (world // 2) + k * BATCH // (world // 2)
                for k in (0, 1)
            )
        )
        optimizer.zero_grad()
        (model(x[rows]) - y[rows]).square().mean().backward()
        optimizer.step()
    return model


@on_ranks(4, 2)
def tensor_parallelism(_: Path) -> Any:
    return weights(tensor_parallel(6, torch.float64))
