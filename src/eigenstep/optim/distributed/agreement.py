"""What ranks tell each other before every step, so that all of them take it, or none.

Each rank sends a few numbers to the ranks that it shares parameters with, in one small all-reduce:
what is wrong here, if anything, and digests of what must be the same everywhere. Ranks that differ
learn so at once and on all sides; without that, some would wait for messages that never come.
"""

from __future__ import annotations

import datetime
import hashlib
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..options import Options, plain

GO, SKIP, RAISE = range(3)
"""What to do about the gradients of a step: take it, leave it out, or raise an error."""
SENTENCES: Mapping[str, str] = {
    "gradients": "have gradients for different parameters, so they cannot step together: give "
    "every rank a gradient "
    "of each parameter that any rank trains, zeros if need be",
    "steps": "have taken different numbers of steps, so they cannot step together: load the same "
    "checkpoint on all",
    "rates": "have different learning rates, so they cannot step together: set the same on all",
    "options": "have different options in their parameter groups, so they cannot step together: "
    "set the same on all",
    "parameters": "have different parameters, so they cannot share the work: give the optimizer "
    "the same parameters in "
    "the same groups and the same order on all ranks",
}
"""What may differ between ranks, from the least to the most fundamental. Their verdicts follow
those on gradients.
"""
DIFFERENT = RAISE + 1
REFUSED = DIFFERENT + len(SENTENCES)
"""Verdicts from here on: rank 0, 1, ... cannot take the step."""
GRACE, LONGEST = 10.0, datetime.timedelta(minutes=30)
"""How long to wait for a rank that steps other parameters but none of a group's, and for one that
has not stepped.
"""
MASK = 2**62 - 1
"""Digests have so many bits, so that they can be negated."""


def digest(content: object) -> int:
    """Return a number that is the same on all ranks for what prints the same, and hardly ever for
    anything else.
    """
    return int.from_bytes(hashlib.blake2b(repr(content).encode(), digest_size=8).digest()) & MASK


def digest_rates(rates: Sequence[float | Tensor]) -> int | Tensor:
    """Return a digest of learning rates; a tensor if one is on a device, which need not be waited
    for.
    """
    total: int | Tensor = 0
    for rate in rates:
        if isinstance(rate, Tensor) and rate.device.type != "cpu":
            bits: int | Tensor = rate.detach().reshape(()).double().view(torch.int64)
        else:
            (bits,) = struct.unpack("<q", struct.pack("<d", float(rate)))
        total = total * 1000003 + bits & MASK
    return total


def statement(
    groups: Sequence[tuple[Mapping[str, Any], Options]],
    shared: Collection[Tensor],
    new: Collection[Tensor],
) -> dict[str, int | Tensor]:
    """Return digests of everything in which ranks must agree, one for each sentence.

    Args:
        groups: parameter groups and their options.
        shared: the parameters that these ranks share.
        new: parameters that get owners in this step.
    """
    parameters = []
    flags = bytearray()
    settings = []
    steps = []
    rates = []
    for group, options in groups:
        mine = [param for param in group["params"] if param in shared]
        if mine:
            parameters.append([(*param.shape, param.dtype) for param in mine])
            flags += bytes((param.grad is not None) + 2 * (param in new) for param in mine)
            settings.append(_printable(options))
            steps.append(group["count"])
            rates.append(options.lr)
    digests = {"gradients": flags, "steps": steps, "options": settings, "parameters": parameters}
    return {
        "rates": digest_rates(rates),
        **{name: digest(content) for name, content in digests.items()},
    }


def _printable(options: Options) -> dict[str, Any]:
    """Return options but the learning rate, in a form that prints the same on all ranks."""
    printable = plain(vars(options))
    del printable["lr"]
    for name, value in printable.items():
        if isinstance(value, float):
            printable[name] = float(value)  # not one of numpy's
    return printable


def vote(
    verdict: int | Tensor,
    again: bool,
    said: Mapping[str, int | Tensor],
    device: torch.device,
    group: dist.ProcessGroup,
) -> tuple[int, bool]:
    """Return the verdict of all ranks, and whether to vote again; their largest numbers show
    whether all say the same.

    ``again`` tells whether this rank may hear of more from others later; what is ``said`` is empty
    if it was settled.
    """
    numbers: list[int | Tensor] = [verdict, int(again)]
    for name in SENTENCES:
        numbers += [said.get(name, 0), -said.get(name, 0)]
    sent = torch.tensor([0 if isinstance(x, Tensor) else x for x in numbers], device=device)
    for index, number in enumerate(numbers):
        if isinstance(number, Tensor):
            sent[index] = number
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=group)
    worst, more, *most = sent.tolist()
    different = [
        DIFFERENT + index
        for index in range(len(SENTENCES))
        if most[2 * index] != -most[2 * index + 1]
    ]
    return max([worst, *different]), bool(more)


def absent(group: dist.ProcessGroup) -> list[int]:
    """Tell others that this rank steps parameters of a group, and return those of its ranks that
    only step others.

    These would be waited for in vain. Who steps what is written down in the store by which the
    ranks found each other.
    """
    store, ranks = dist.distributed_c10d._get_default_store(), dist.get_process_group_ranks(group)
    for key in (f"{group.group_name}/", ""):
        store.set(f"eigenstep/{key}{dist.get_rank()}", "steps")
    store.wait([f"eigenstep/{rank}" for rank in ranks], LONGEST)
    end = time.monotonic() + GRACE
    while missing := [
        rank for rank in ranks if not store.check([f"eigenstep/{group.group_name}/{rank}"])
    ]:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return missing


def sentence(verdict: int) -> str:
    """Say why a step is not taken, given a verdict from ``DIFFERENT`` on."""
    if verdict >= REFUSED:
        return (
            f"rank {verdict - REFUSED} cannot take this step, its own error says why; nothing "
            "was changed"
        )
    return f"the ranks {list(SENTENCES.values())[verdict - DIFFERENT]}"
