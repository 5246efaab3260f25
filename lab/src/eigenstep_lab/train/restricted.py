"""Read checkpoints that several processes wrote without running what is in them.

torch.distributed.checkpoint reads its table of contents and everything that is no tensor with
pickle, which calls any function that a file names. Here both are limited to plain data and a fixed
list of classes.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem

from .checkpoint import TABLE

_DTYPES = {
    ("torch", str(value).removeprefix("torch.")): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_KINDS = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        parts.BytesStorageMetadata,
        parts.ChunkStorageMetadata,
        parts.Metadata,
        parts.MetadataIndex,
        parts.StorageMeta,
        parts.TensorProperties,
        parts.TensorStorageMetadata,
        parts._MEM_FORMAT_ENCODING,
        _StorageInfo,
        torch.Size,
    )
}
# The checkpoint's own path is in the table. The modules that pathlib names its classes in differ
# between Pythons.
_PATHS = {
    (module, name): getattr(pathlib, f"Pure{name}")
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "WindowsPath")
}
_MAKERS: dict[tuple[str, str], Any] = {**_KINDS, **_PATHS}


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"tensors are strided, not {name}")
    return torch.strided


class _TableReader(pickle.Unpickler):
    """Knows the classes of a table of contents, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _DTYPES:
            return _DTYPES[module, name]
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: _layout(layout)
        if (module, name) not in _MAKERS:
            raise pickle.UnpicklingError(
                f"its table of contents asks for {module}.{name}, which is not allowed"
            )
        kind = _MAKERS[module, name]
        # A pickle can set attributes of a class that it was given: this one makes the real thing
        # and is thrown away.
        return type(name, (), {"__new__": lambda _, *arguments: kind.__new__(kind, *arguments)})


def read_table(path: Path, files: Collection[str]) -> parts.Metadata:
    """Read the table of contents of a checkpoint.

    Args:
        path: The checkpoint's folder.
        files: Names of the files in it that may be read.
    """
    if TABLE not in files:
        raise ValueError("its table of contents has no checksum")
    table = _TableReader(io.BytesIO((path / TABLE).read_bytes())).load()
    if not isinstance(table, parts.Metadata) or not isinstance(table.storage_data, dict):
        raise ValueError("its table of contents holds something else")
    for place in table.storage_data.values():
        if not isinstance(place, _StorageInfo) or place.relative_path not in files:
            raise ValueError("its table of contents names a file that is no part of it")
    table.storage_meta = parts.StorageMeta()
    return table


class Reader(FileSystemReader):
    """Reads tensors; torch does so without running anything."""

    def __init__(self, path: Path, files: Collection[str]) -> None:
        """Read the table of contents; `files` are the names of files that may be read."""
        super().__init__(path)
        self._table = read_table(path, files)

    def read_metadata(self, *_: Any, **__: Any) -> parts.Metadata:
        """Return the table of contents."""
        return self._table


class Planner(DefaultLoadPlanner):
    """Puts what was read where it belongs."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read what is no tensor as plain data, and hand torch a clean copy."""
        plain = torch.load(value, weights_only=True)
        safe = io.BytesIO()
        torch.save(plain, safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)
