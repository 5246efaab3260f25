"""Checkpoints: written whole or not at all, checked when they are read, and exact.

A run keeps its two newest checkpoints. If the newest is damaged (by a failing disk, say), deleting
it makes the run go on from the one before. Beside every file lies its checksum, NAME.sha256; a
folder holds its own, SHA256SUMS.
"""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import checksums
from ..console import UserError, atomic_write

KEPT = 2
SUMS = "SHA256SUMS"
"""The file with the checksums of all other files of a checkpoint that is a folder."""
TABLE = ".metadata"
"""The file in which torch.distributed.checkpoint keeps the table of contents of such a folder."""
_SHAMPOO = "pytorch_optimizer.optimizer.utils"
CLASSES = {
    f"{_SHAMPOO}.partition": ("PreConditionerType", "BlockPartitioner"),
    f"{_SHAMPOO}.preconditioner": ("PreConditioner",),
    f"{_SHAMPOO}.graft": (
        "LayerWiseGrafting",
        "Graft",
        "SGDGraft",
        "SQRTNGraft",
        "AdaGradGraft",
        "RMSPropGraft",
    ),
}
"""Classes that a checkpoint may hold besides plain data: Scalable Shampoo's."""


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
        # Before the checkpoint itself has its name: it must never be there without its checksum.
        checksums.write(_checksum_of(path), {path.name: checksums.digest(Path(file.name))})
    drop_old(directory)
    return path


def _checksum_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def list_checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints of a run, files or folders, the newest last."""
    return sorted(
        [*directory.glob("step-*.pt"), *directory.glob("step-*.dcp")], key=lambda path: path.stem
    )


def drop_old(directory: Path) -> None:
    """Delete all but the newest checkpoints."""
    for old in list_checkpoints(directory)[:-KEPT]:
        delete(old)


def delete(path: Path) -> None:
    """Delete a checkpoint."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
        _checksum_of(path).unlink(missing_ok=True)


def clean(directory: Path) -> None:
    """Remove what a process that was killed while it wrote a checkpoint has left behind."""
    for partial in [*directory.glob(".step-*.pt.*"), *directory.glob(".step-*.dcp.*")]:
        delete(partial)
    for checksum in directory.glob("step-*.pt.sha256"):
        if not checksum.with_suffix("").exists():
            checksum.unlink()


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint into main memory; a damaged one gives an error that says what to do."""
    try:
        expected = checksums.read(_checksum_of(path))
        checksums.compare(expected, {path.name: checksums.digest(path)})
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        with torch.serialization.safe_globals(_allowed(unknown)):
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
    return UserError(
        f"the checkpoint {path} is damaged ({reason}): delete it and repeat the command to "
        f"{instead}"
    )


def _allowed(names: list[str]) -> list[Any]:
    """Import those of some classes, given by their full names, that a checkpoint may hold."""
    allowed = []
    for module, classes in CLASSES.items():
        allowed += [
            getattr(importlib.import_module(module), name)
            for name in classes
            if f"{module}.{name}" in names
        ]
    return allowed


def restore(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's state exactly as it was saved."""
    optimizer.load_state_dict(saved)
    # torch casts state to the number format of the weights, which loses digits where the optimizer
    # keeps more.
    for old, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for index, parameter in zip(old["params"], group["params"], strict=True):
            if index in saved["state"]:
                optimizer.state[parameter] = _uncast(
                    optimizer.state[parameter], saved["state"][index]
                )


def _uncast(loaded: Any, saved: Any) -> Any:
    if isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        return {key: _uncast(loaded[key], value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(_uncast(x, y) for x, y in zip(loaded, saved, strict=True))
    return loaded
