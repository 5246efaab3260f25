"""What cannot work is refused in a sentence."""

from __future__ import annotations

import pytest

from .ranks import Results

SENTENCES = {
    "other weights": "different weights for parameter 0",
    "other gradients": "wrap the model in DistributedDataParallel or fully_shard",
    "other shapes": "same parameters in the same order on all ranks",
    "curvature": "curvature cannot be given while ranks share the work",
    "nan ddp": "NaN or infinite entries; nothing was changed",
    "nan fsdp2": "NaN or infinite entries; nothing was changed",
    "other sets of gradients": "gradients for different parameters",
    "partial sums": "must be sharded or replicated, not a partial sum",
    "stripes": "must be contiguous parts that make up the whole",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_all_ranks_say_what_is_wrong(found: Results, name: str) -> None:
    for rank in found["mistakes", 2]:
        message, unchanged = rank[name]
        assert SENTENCES[name] in message
        assert unchanged


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_all_ranks_skip(found: Results, kind: str) -> None:
    assert all(rank[f"skip {kind}"] for rank in found["mistakes", 2])
