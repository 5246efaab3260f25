"""Checkpoints: written by any number of ranks, read by any other, and exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .cases import distance, resume
from .checks import END, RESUMED, SAVED
from .ranks import Results


@pytest.mark.parametrize("pair", RESUMED, ids=str)
def test_two_ranks_go_on_from_four(ranks: Results, pair: tuple[str, str]) -> None:
    source = pair[0].replace("async", "ddp")
    losses, weights, _ = ranks["saving", 4][0][source]
    for rank in ranks["resuming", 2]:
        assert rank[pair][0] == pytest.approx(losses, rel=1e-6)
        assert distance(rank[pair][1], weights) <= 1e-5


@pytest.mark.parametrize("source", ["ddp", "fsdp2", "async"])
def test_one_process_goes_on_from_four(ranks: Results, ranks_folder: Path, source: str) -> None:
    losses, weights, _ = ranks["saving", 4][0][source.replace("async", "ddp")]
    mine, trained = resume(
        ranks_folder / "saving" / "4" / source, "serial", torch.float32, SAVED, END
    )
    assert mine == pytest.approx(losses, rel=1e-6)
    assert distance(trained, weights) <= 1e-5


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_all_ranks_have_the_same_names(ranks: Results, kind: str) -> None:
    first, *others = (rank[kind][2] for rank in ranks["saving", 4])
    assert first
    assert all(names == first for names in others)


def test_what_does_not_fit_is_refused(ranks: Results) -> None:
    sentences = {
        "with_another_layout": "fused of group 0 cannot change while ranks share the work",
        "with_nan": "must be finite",
    }
    for rank in ranks["refused_loads", 2]:
        assert len(rank) == 4
        assert all(sentences[name] in message for name, message in rank)


def test_a_whole_state_is_shared_out(ranks: Results) -> None:
    for alone, trained in ranks["whole_states", 2]:
        for weights in trained:
            assert distance(weights, alone) <= 1e-10
