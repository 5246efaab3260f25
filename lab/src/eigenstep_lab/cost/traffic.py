"""Count what collectives put on the wire, by watching them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def _bytes(tensors: Any) -> int:
    every = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    return sum(t.numel() * t.element_size() for t in every)


def _all_to_all(
    rank: int,
    size: int,
    output: Tensor,
    sent: Tensor,
    group: Any,
    to_each: Any,
    splits: Any,
    *_: Any,
) -> float:
    """Return what does not stay here; torch passes splits of output and input."""
    rows = splits or [sent.shape[0] // size] * size
    return _bytes(sent) * (1 - rows[rank] / max(1, sum(rows)))


# What a rank sends at least, given the tensors of an operation: the figures of ring algorithms,
# which reach the bounds.
COSTS: Mapping[str, Callable[..., float]] = {
    "alltoall_base_": _all_to_all,
    "_allgather_base_": lambda rank, size, output, given, *_: (size - 1) * _bytes(given),
    "allgather_": lambda rank, size, outputs, given, *_: (size - 1) * _bytes(given),
    "allreduce_": lambda rank, size, tensors, *_: 2 * (size - 1) / size * _bytes(tensors),
    "_reduce_scatter_base_": lambda rank, size, output, given, *_: (
        (size - 1) / size * _bytes(given)
    ),
    "broadcast_": lambda rank, size, tensors, *_: (size - 1) / size * _bytes(tensors),
}


class TrafficCounter(TorchDispatchMode):
    """Adds up the bytes that this rank sends in collectives while it is active.

    Attributes:
        sent: bytes of each kind of collective.
        calls: number of collectives of each kind.
    """

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    @property
    def total(self) -> float:
        """Bytes of all collectives together."""
        return sum(self.sent.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the operation if it is a collective, and run it."""
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0]
            if name not in COSTS:
                raise NotImplementedError(f"the bytes of the collective {name} are not known")
            boxed: Any = next(a for a in args if isinstance(a, torch.ScriptObject))
            group = torch.distributed.ProcessGroup.unbox(boxed)
            self.sent[name] = self.sent.get(name, 0.0) + COSTS[name](
                group.rank(), group.size(), *args
            )
            self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))
