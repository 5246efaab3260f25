"""Training on several processes: who is who, sharing, and checkpoints.

One process alone is a team of one, which needs no process group.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from eigenstep.optim import Spectral

from .. import checksums
from ..console import UserError
from .checkpoint import SUMS, TABLE, damaged


class Team:
    """The processes of a run.

    Attributes:
        rank: number of this process.
        size: how many there are.
        way: how they share the network: "ddp" or "fsdp2".
    """

    def __init__(self, way: str = "ddp") -> None:
        """Describe the processes, if the process group is set up; else one."""
        self.way = way
        together = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)

    @property
    def leads(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0

    def wrap(self, model: nn.Module, optimizer_name: str) -> nn.Module:
        """Return the network to call; its parameters may become shards."""
        if self.size == 1:
            return model
        if self.way == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        if not optimizer_name.startswith(("spectral", "adamw")):
            raise UserError(
                f"optimizer {optimizer_name} cannot step sharded weights: use --parallel ddp with "
                "it"
            )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(next(model.parameters()).device.type, (self.size,))
        for block in getattr(model, "blocks", []):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def check_batch(self, batch: int, accumulate: int) -> None:
        """Raise unless a batch can be cut into equal parts for all processes."""
        if batch % (self.size * accumulate):
            parts = f"{self.size} processes" + (
                f" times accumulate = {accumulate}" if accumulate > 1 else ""
            )
            raise UserError(f"batch must be a multiple of {parts}, got {batch}")

    def accumulating(self, network: Any, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context of a pass; gradients are exchanged in the last one."""
        if self.size > 1 and self.way == "ddp" and not last:
            without: contextlib.AbstractContextManager[None] = network.no_sync()
            return without
        if self.size > 1 and self.way == "fsdp2":
            network.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def part(self, tensor: Tensor) -> Tensor:
        """Return this process's part of a batch."""
        return tensor.chunk(self.size)[self.rank]

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes."""
        if self.size > 1:
            tensor = tensor / self.size
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool, device: torch.device) -> bool:
        """Tell whether any process raises a flag."""
        if self.size == 1:
            return flag
        votes = torch.tensor([int(flag)], device=device)
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes.item())

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            dist.barrier()

    def splits(self, optimizer: Optimizer) -> bool:
        """Tell whether every process has only a part of the weights or of the optimizer's state."""
        return self.size > 1 and (self.way == "fsdp2" or isinstance(optimizer, Spectral))


@contextlib.contextmanager
def together(way: str, device: str) -> Iterator[tuple[Team, str]]:
    """Set up the process group under torchrun; yield the team and the device.

    A process group that is there already is used, and left as it is.

    Args:
        way: "ddp" or "fsdp2".
        device: the device that the settings ask for.
    """
    if (dist.is_available() and dist.is_initialized()) or int(
        os.environ.get("WORLD_SIZE", "1")
    ) == 1:
        yield Team(way), device
        return
    from torch.distributed.rendezvous import rendezvous

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise UserError(
            "device must be cpu or cuda (each process takes a GPU of its own) under torchrun, got "
            f"{device}"
        )
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    store, rank, size = next(rendezvous("env://"))
    # After a restart torchrun's store still has the addresses of processes that are gone: look
    # under another name.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield Team(way), device
    finally:
        leave()


def leave() -> None:
    """Take the process group down so that this process may end at any time afterwards.

    Gloo's threads give tensors back to Python a moment after the last exchange. If Python is on its
    way out by then, the process is aborted (pytorch/pytorch#190489), which looks like a failure of
    training. The threads are ended with the last reference to their group, but torch's caches of
    sharded tensors keep such references: so give them that moment.
    """
    dist.destroy_process_group()
    time.sleep(0.5)


def save(
    path: Path, team: Team, model: nn.Module, optimizer: Optimizer, progress: dict[str, Any]
) -> None:
    """Write a checkpoint, of which every process has a part, all at once."""
    from torch.distributed.checkpoint.state_dict_saver import save as write

    partial = path.with_name(f".{path.name}.partial")
    if team.leads:
        shutil.rmtree(partial, ignore_errors=True)
    team.wait()
    write(_state(model, optimizer, progress), checkpoint_id=partial)
    written = [file.name for file in partial.glob(f"__{team.rank}_*")]
    digests = _digests(partial, [*written, TABLE] if team.leads else written)
    if team.leads:
        checksums.write(partial / SUMS, digests)
        shutil.rmtree(path, ignore_errors=True)
        partial.replace(path)
    team.wait()


def load(
    path: Path, model: nn.Module, optimizer: Optimizer, progress: dict[str, Any]
) -> dict[str, Any]:
    """Load a checkpoint of any number of processes; return its progress."""
    from torch.distributed.checkpoint import state_dict

    content = _read(path, _state(model, optimizer, progress))
    state_dict.set_model_state_dict(model, content["model"])
    state_dict.set_optimizer_state_dict(model, optimizer, content["optimizer"])
    saved: dict[str, Any] = content["progress"]
    return saved


def peek(path: Path, name: str) -> Any:
    """Read one entry of the progress of a checkpoint, before anything is changed."""
    return _read(path, {"progress": {name: None}})["progress"][name]


def _read(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Fill in what is in a checkpoint; a damaged one gives an error that says what to do."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load as read

    from .restricted import Planner, Reader

    try:
        expected = checksums.read(path / SUMS)
        team = Team()
        checksums.compare(expected, _digests(path, sorted(expected)[team.rank :: team.size]))
        read(content, storage_reader=Reader(path, expected), planner=Planner())
    except CheckpointException as error:  # what went wrong on each rank
        reason, _ = next(iter(error.failures.values()))
        raise damaged(path, reason) from error
    except Exception as error:  # a damaged file can make a decoder raise anything
        raise damaged(path, error) from error
    return content


def _digests(folder: Path, names: list[str]) -> dict[str, str]:
    """Compute checksums of files, shared among processes; all get all of them."""
    digests = {
        name: checksums.digest(folder / name) if (folder / name).is_file() else "missing"
        for name in names
    }
    everyone: list[Any] = [digests]
    if dist.is_available() and dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, digests)
    return {name: value for some in everyone for name, value in some.items()}


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights on the first process; all processes must call this."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    gathered: Any = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    weights: dict[str, Tensor] = gathered
    return weights


def load_whole_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load weights that every process has in full."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if dist.is_available() and dist.is_initialized():
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(weights)


def _state(model: nn.Module, optimizer: Optimizer, progress: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    weights = get_model_state_dict(model)
    state = get_optimizer_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state, "progress": progress}
