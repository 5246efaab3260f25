"""What a checkpoint sees of state that is split over ranks: the whole tensor, of which each rank
holds a part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MOVING = "torch.distributed.checkpoint moves state between ranks"
SAVING = (
    "save and load it with torch.distributed.checkpoint, which puts the parts of all ranks together"
)


class ShardedState(Tensor):
    """A tensor of which this rank holds the elements ``start`` to ``start + len(local)`` of the
    first axis, or none.

    ``torch.distributed.checkpoint`` asks it what to write and what to read, so that a checkpoint
    has every element once and can be loaded by any number of ranks, however they share it. It has
    the whole shape, but no arithmetic.
    """

    local: Tensor  # the elements that are here
    start: int  # index of the first of them

    @staticmethod
    def __new__(cls, local: Tensor, start: int, total: int) -> ShardedState:
        """Wrap this rank's elements, if any, given the length of the first axis of the whole."""
        size = (total, *local.shape[1:])
        whole = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=local.dtype, device=local.device
        )
        whole.local, whole.start = local, start
        return whole

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Allow what checkpoints need: copies, also to other devices and number formats."""
        copying = (
            torch.ops.aten.detach.default,
            torch.ops.aten.clone.default,
            torch.ops.aten._to_copy.default,
        )
        first = args[0]
        if func in copying:
            return cls(func(first.local, *args[1:], **(kwargs or {})), first.start, len(first))
        if func is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(first.shape):
            return cls(
                first.local.new_empty(first.local.shape, **(kwargs or {})), first.start, len(first)
            )
        raise NotImplementedError(
            f"{func} cannot be computed: this rank has only a part of the optimizer's state"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Say what is here."""
        return (
            f"ShardedState({self.start} to {self.start + len(self.local)} of {tuple(self.shape)})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: ``torch.save`` on one rank would lose what the others hold."""
        raise TypeError(f"this rank has only a part of the optimizer's state: {SAVING}")

    def __create_chunk_list__(self) -> list[Any]:
        """Tell ``torch.distributed.checkpoint`` which part to read."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        first = torch.Size([self.start, *[0] * (self.ndim - 1)])
        return [ChunkStorageMetadata(first, self.local.shape)] if self.local.numel() else []

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        """Tell ``torch.distributed.checkpoint`` which part to write."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties, kind = TensorProperties.create_from_tensor(self.local), WriteItemType.SHARD
        parts = [
            TensorWriteData(chunk, properties, self.shape) for chunk in self.__create_chunk_list__()
        ]
        return [
            WriteItem(MetadataIndex(fqn, part.chunk.offsets), kind, tensor_data=part)
            for part in parts
        ]

    def __get_tensor_shard__(self, _: Any) -> Tensor:
        """Give ``torch.distributed.checkpoint`` the part to write or to fill."""
        return self.local


def own_part(tensor: Tensor, start: int, count: int, total: int, name: str) -> Tensor:
    """Return this rank's ``count`` of ``total`` elements of state, of which all or just these were
    loaded.
    """
    if isinstance(tensor, ShardedState):
        if (tensor.start, len(tensor.local), len(tensor)) != (start, count, total):
            raise ValueError(f"state_dict does not fit: other ranks own {name} now; {MOVING}")
        return tensor.local
    if len(tensor) == total:
        return tensor[start : start + count].clone()
    if len(tensor) != count:
        raise ValueError(f"state of {name} is that of another rank; {MOVING}")
    return tensor
