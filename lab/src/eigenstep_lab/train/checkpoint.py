"""Checkpoints: written whole or not at all, checked when they are read, and exact.

A run keeps its two newest checkpoints. If the newest is damaged (by a failing disk, say), deleting it makes the run go
on from the one before.
"""

from __future__ import annotations

import importlib
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..console import UserError, atomic_write

KEPT = 2
TRUSTED = "pytorch_optimizer"
"""A package whose optimizers keep objects of their own among their state; other checkpoints hold plain data only."""


def save(directory: Path, step: int, content: dict[str, Any]) -> Path:
    """Write a checkpoint, and delete all but the newest ones.

    Args:
        directory: The run's folder.
        step: Steps that have been taken.
        content: Tensors, numbers, texts, and lists and dictionaries of them.
    """
    path = directory / f"step-{step:09d}.pt"
    with atomic_write(path) as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())  # so that a power cut cannot leave the name without the content
    drop_old(directory)
    return path


def list_checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints of a run, the newest last: files, or folders to which several processes wrote."""
    return sorted([*directory.glob("step-*.pt"), *directory.glob("step-*.dcp")], key=lambda path: path.stem)


def drop_old(directory: Path) -> None:
    """Delete all but the newest checkpoints."""
    for old in list_checkpoints(directory)[:-KEPT]:
        delete(old)


def delete(path: Path) -> None:
    """Delete a checkpoint."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def clean(directory: Path) -> None:
    """Remove what a process that was killed while it wrote a checkpoint has left behind."""
    for partial in [*directory.glob(".step-*.pt.*"), *directory.glob(".step-*.dcp.*")]:
        delete(partial)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint into main memory; a damaged one gives an error that says what to do."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # compares checksums, which torch.load does not do
        if broken:
            raise ValueError(f"the checksum of {broken} is wrong")
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        trusted: list[Any] = [_find(name) for name in unknown if name.split(".")[0] == TRUSTED]
        with torch.serialization.safe_globals(trusted):
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make a decoder raise anything
        if isinstance(error, PermissionError):
            raise UserError(f"{path} cannot be read: {error}") from error
        raise damaged(path, error) from error
    return content


def damaged(path: Path, error: BaseException) -> UserError:
    """Return an error that says that a checkpoint cannot be read, and what to do."""
    others = [other.name for other in list_checkpoints(path.parent) if other.stem < path.stem]
    instead = f"go on from {others[-1]}" if others else "begin anew"
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"the checkpoint {path} is damaged ({reason}): delete it and repeat the command to {instead}")


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def restore(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's state exactly as it was saved."""
    optimizer.load_state_dict(saved)
    # torch casts state to the number format of the weights, which loses digits where the optimizer keeps more.
    for old, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for index, parameter in zip(old["params"], group["params"], strict=True):
            if index in saved["state"]:
                optimizer.state[parameter] = _uncast(optimizer.state[parameter], saved["state"][index])


def _uncast(loaded: Any, saved: Any) -> Any:
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        return {key: _uncast(loaded[key], value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(_uncast(x, y) for x, y in zip(loaded, saved, strict=True))
    return loaded
