"""Files that are damaged at random: every reader says so in a sentence."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigenstep.optim import Spectral
from eigenstep.search import Search

from ..console import UserError
from ..extras import load_history, save_history
from ..train import checkpoint
from .training import check, same

SPOILS: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x * torch.nan,
    lambda x: x.to(torch.complex64),
    lambda x: x.to(torch.float16),
    lambda x: x.to(torch.int16),
    lambda x: x[..., None],
    lambda x: x.to("meta"),
    Tensor.to_sparse,
    Tensor.tolist,
    lambda _: None,
)
"""What no entry of an optimizer's state can be."""


def damage_files(chance: np.random.Generator) -> dict[str, int]:
    """Write a checkpoint, a history and a state, damage them, and try to read them."""
    with tempfile.TemporaryDirectory() as name:
        folder, noticed = Path(name), 0
        weights = torch.from_numpy(chance.standard_normal((5, 7)))
        path = checkpoint.save(folder, 1, {"weights": weights, "step": 1, "text": "ä"})
        check(
            torch.equal(checkpoint.load(path)["weights"], weights),
            "a checkpoint is not what was saved",
        )
        whole = path.read_bytes()
        for _ in range(5):
            path.write_bytes(_damaged(chance, whole))
            try:
                checkpoint.load(path)
            except UserError:
                noticed += 1
            else:
                check(path.read_bytes() == whole, "a damaged checkpoint was read")
        noticed += _damage_history(chance, folder / "history.npz")
    return {
        "damaged files": 10,
        "damage noticed": noticed,
        "damaged states": _damage_states(chance),
    }


def _damage_states(chance: np.random.Generator) -> int:
    """Spoil an entry of an optimizer's state in every way: each is refused, and nothing changes."""
    weight = torch.nn.Parameter(torch.zeros(40, 32))
    dtype, offload = (None, torch.int8)[chance.integers(2)], bool(chance.integers(2))
    optimizer = Spectral([weight], state_dtype=dtype, offload=offload)
    weight.grad = torch.from_numpy(chance.standard_normal((40, 32))).float()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    whole = optimizer.state_dict(bases=bool(chance.integers(2)))
    name = str(chance.choice(list(whole["state"][0])))
    for spoil in SPOILS:
        own = {**whole["state"][0], name: spoil(whole["state"][0][name])}
        try:
            optimizer.load_state_dict({**whole, "state": {0: own}})
        except ValueError:
            check(
                same(optimizer.state_dict(), before),
                f"a state with a spoiled {name} was refused but changed something",
            )
        else:
            raise AssertionError(f"a spoiled {name} of a state was accepted")
    return len(SPOILS)


def _damage_history(chance: np.random.Generator, path: Path) -> int:
    search, noticed = Search(np.zeros(3), 1.0, seed=0), 0
    for _ in range(3):
        points = np.asarray(search.ask())
        search.tell(points, (points**2).sum(-1))
    save_history(search.history, path)
    whole = path.read_bytes()
    for _ in range(5):
        path.write_bytes(_damaged(chance, whole))
        try:
            load_history(path)  # a byte between its entries may mean nothing
        except ValueError:
            noticed += 1
    return noticed


def _damaged(chance: np.random.Generator, whole: bytes) -> bytes:
    """Flip bits, cut, lengthen or exchange."""
    place, other = (int(chance.integers(len(whole))) for _ in range(2))
    way = chance.integers(4)
    if way == 0:
        return (
            whole[:place]
            + bytes([whole[place] ^ (1 << int(chance.integers(8)))])
            + whole[place + 1 :]
        )
    if way == 1:
        return whole[:place]
    if way == 2:
        return whole[:place] + chance.bytes(int(chance.integers(1, 100))) + whole[place:]
    return whole[:place] + whole[other : other + 64] + whole[place + 64 :]
