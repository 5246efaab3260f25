"""What cannot work is refused in a sentence."""

from __future__ import annotations

import pytest
import torch

from . import stacked
from .ranks import Results

SENTENCES = {
    "other weights": "different weights for parameter 0",
    "other gradients": "wrap the model in DistributedDataParallel or fully_shard",
    "other shapes": "the same parameters in the same groups and the same order on all ranks",
    "curvature": "curvature cannot be given while ranks share the work",
    "nan ddp": "NaN or infinite entries; nothing was changed",
    "nan fsdp2": "NaN or infinite entries; nothing was changed",
    "other sets of gradients": "gradients for different parameters",
    "partial sums": "must be sharded or replicated, not a partial sum",
    "stripes": "must be contiguous parts that make up the whole",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_all_ranks_say_what_is_wrong(ranks: Results, name: str) -> None:
    for rank in ranks["mistakes", 2]:
        message, unchanged = rank[name]
        assert SENTENCES[name] in message
        assert unchanged


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_all_ranks_skip(ranks: Results, kind: str) -> None:
    assert all(rank[f"skip {kind}"] for rank in ranks["mistakes", 2])


DIFFERENCES = {
    "no gradient": "gradients for different parameters",
    "no gradient at all": "gradients for different parameters",
    "no first gradient": "gradients for different parameters",
    "another rate": "different learning rates",
    "another rate in a tensor": "different learning rates",
    "another option": "different options",
    "another count": "different numbers of steps",
    "one more group": "different parameters",
    "other order": "different parameters",
    "sparse": "rank 1 cannot take this step",
    "another layout": "rank 1 cannot take this step",
}
OWN = {
    "sparse": "dense gradients",
    "another layout": "fused cannot change after the first step",
}
"""What the rank says that is to blame."""


@pytest.mark.parametrize("name", DIFFERENCES)
def test_all_ranks_hear_of_a_difference_at_once(ranks: Results, name: str) -> None:
    for rank, results in enumerate(ranks["differences", 2]):
        message, seconds = results[name]
        assert (OWN.get(name, DIFFERENCES[name]) if rank else DIFFERENCES[name]) in message
        assert seconds < 10


def test_rates_may_be_tensors_and_gradients_may_be_missing_everywhere(ranks: Results) -> None:
    first, second = (rank["went on"] for rank in ranks["differences", 2])
    assert all(torch.equal(a, b) and (a < 1).all() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("axes", [("row",), ("row", "column")], ids=str)
def test_subgroups_decide_together(ranks: Results, axes: tuple[str, ...]) -> None:
    """Ranks 2 and 3 share a row, 1 and 3 a column; without columns the other row can go on."""
    for rank, results in enumerate(ranks["subgroups", 4]):
        concerned = len(axes) == 2 or rank % 2 == 1
        assert results["stepped", axes]
        assert results["skipped", axes] == concerned
        assert ("options", axes) in results if concerned else ("options", axes) not in results
        assert "different options" in results.get(("options", axes), "different options")


def test_a_rank_without_any_parameters_of_a_mesh_is_noticed(ranks: Results) -> None:
    for rank, (message, seconds, unchanged) in enumerate(ranks["absent", 4]):
        assert ("ranks [3] have none" if rank == 2 else "rank 2 cannot take this step") in message
        assert seconds < 15
        assert unchanged


@pytest.mark.parametrize("name", stacked.DIFFERENCES)
def test_experts_and_fused_weights_are_compared_as_well(ranks: Results, name: str) -> None:
    for message, seconds, unchanged in (rank[name] for rank in ranks["stacked_differences", 2]):
        assert (
            "for different parameters" if "gradients" in name else "different options"
        ) in message
        assert seconds < 10
        assert unchanged
