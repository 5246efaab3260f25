"""What the ranks do; the tests look at what comes back."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from eigenstep.optim.distributed.collectives import ShardedRound
from eigenstep_lab.console import UserError
from eigenstep_lab.cost import runs as cost_runs
from eigenstep_lab.train import trainer
from eigenstep_lab.train.settings import Settings
from many_processes.cases import KINDS, prepare
from many_processes.ranks import on_ranks


@on_ranks(4, 2)
def costs(_):
    """What a rank computes, keeps and sends in a step of a GPT of 12 layers, and gradients that it
    puts together.
    """
    found, own_gradients, sizes = {}, ShardedRound.own_gradients, [0]

    def noting(self, coming):
        whole = own_gradients(self, coming)
        sizes.append(sum(gradient.numel() * gradient.element_size() for gradient in whole.values()))
        return whole

    with mock.patch.object(ShardedRound, "own_gradients", noting):
        for kind in KINDS[dist.get_world_size()]:
            if kind != "sideways":
                sizes[1:] = []
                found[kind] = {
                    **cost_runs.trained(prepare(cost_runs.gpt(32), kind)),
                    "gradients": max(sizes),
                }
    return found


POEM = "the quick brown fox jumps over the lazy dog. " * 40
RUN: dict[str, Any] = {
    "train_for": "8 steps",
    "warmup": "2 steps",
    "length": 8,
    "batch": 8,
    "test_batches": 1,
    "log_every": "4 steps",
    "evaluate_every": "8 steps",
    "checkpoint_every": "3 steps",
    "threads": 1,
    "device": "cpu",
}
"""A run of `eigenstep train` that takes a second or two."""
NETWORK = {"width": 16, "depth": 1, "heads": 2}


def run_settings(folder, **changes):
    """Settings of a short run, whose text goes to a folder."""
    text = folder / "poem.txt"
    if not text.exists():
        text.write_text(POEM)
    return Settings(**{**RUN, "data": str(text), "model_option": NETWORK, **changes})


@on_ranks(2)
def runs(place):
    """Runs of `eigenstep train`, undisturbed."""
    if dist.get_rank() == 0:
        run_settings(place)
    dist.barrier()
    for way in ("ddp", "fsdp2"):
        for optimizer in ("spectral", "adamw"):
            trainer.train(
                run_settings(place, parallel=way, optimizer=optimizer), place / f"{optimizer}-{way}"
            )
        # The same batches in two parts each.
        trainer.train(run_settings(place, parallel=way, accumulate=2), place / f"parts-{way}")
    settings, asked = run_settings(place, parallel="fsdp2"), dist.get_rank() == 1
    assert trainer.train(settings, place / "stopped", stop=lambda: asked).step == 1
    assert trainer.train(settings, place / "stopped").step == 8
    with pytest.raises(UserError, match="batch must be a multiple of 2 processes, got 9"):
        trainer.train(run_settings(place, batch=9), place / "odd")
    with pytest.raises(UserError, match="muon cannot step sharded weights"):
        trainer.train(run_settings(place, optimizer="muon", parallel="fsdp2"), place / "muon")
