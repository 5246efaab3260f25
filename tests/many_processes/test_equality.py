"""However many ranks share the work, and however weights are sharded, training is the same."""

from __future__ import annotations

import pytest
import torch

from eigenstep import Spectral

from .cases import KINDS, Net, Pair, distance, equal, go_on, train, weights
from .checks import GROUPS, NETWORKS, combinations
from .ranks import Results
from .stacked import separate_weights, stepped

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.mark.parametrize(
    ("network", "dtype"), sorted({(key[0], key[2]) for key in combinations(4)}, key=str), ids=str
)
def test_every_way_gives_the_serial_weights(
    ranks: Results, network: str, dtype: torch.dtype
) -> None:
    serial = weights(train(NETWORKS[network], "serial", dtype)[0])
    start = weights(train(NETWORKS[network], "serial", dtype, 0)[0])
    assert distance(start, serial) > 0.05  # far more than any of the differences below
    for world in KINDS:
        for rank in ranks["training", world]:
            for key, trained in rank.items():
                if (key[0], key[2]) == (network, dtype):
                    assert distance(trained, serial) <= TOLERANCE[dtype], (world, key)


def test_all_ranks_have_the_same_bits(ranks: Results) -> None:
    for world in KINDS:
        first, *others = ranks["training", world][:world]
        for rank in others:
            for key, mine in rank.items():
                assert equal(mine, first[key]), key


@pytest.mark.parametrize("name", GROUPS)
def test_options(ranks: Results, name: str) -> None:
    serial = weights(train(Net, "serial", torch.float64, 4, **GROUPS[name])[0])
    for rank in ranks["options", 2]:
        for kind in ("ddp", "fsdp2"):
            assert distance(rank[name, kind], serial) <= TOLERANCE[torch.float64], kind


def test_many_short_rounds(ranks: Results) -> None:
    serial = weights(train(Net, "serial", torch.float64, 4)[0])
    for rank in ranks["rounds", 4]:
        for kind, trained in rank.items():
            assert distance(trained, serial) <= TOLERANCE[torch.float64], kind


def test_random_rounding_is_the_same_on_all_ranks(ranks: Results) -> None:
    first, *others = ranks["rounding", 4]
    for rank in others:
        for kind, trained in rank.items():
            assert equal(trained, first[kind]), kind


def test_ranks_that_do_not_share(ranks: Results) -> None:
    serial = weights(train(Net, "serial", torch.float64, 4)[0])
    for trained, pieces in ranks["independent", 2]:
        assert distance(trained, serial) <= TOLERANCE[torch.float64]
        assert min(pieces) >= 1


def test_tensor_parallelism(ranks: Results) -> None:
    model = Pair().double()
    optimizer = Spectral(model.parameters(), lr=0.01, max_dim=6)
    go_on(model, optimizer, "serial", torch.float64, 0, 6)
    for world in (2, 4):
        for trained in ranks["tensor_parallelism", world]:
            assert distance(trained, weights(model)) <= TOLERANCE[torch.float64], world


def test_stacked_and_fused_weights_step_as_separate_ones(ranks: Results) -> None:
    apart = separate_weights()
    assert distance(stepped(), apart) <= 1e-12
    for rank in ranks["stacked", 2]:
        for kind, trained in rank.items():
            assert distance(trained, apart) <= 1e-12, kind


def test_checkpoints_without_bases(ranks: Results) -> None:
    """Ranks learn the bases of what they step anew; soon weights are nearly the same."""
    for rank in ranks["portraits", 2]:
        for kind in ("fsdp2", "replicated"):
            trained, resumed, bases = rank[kind]
            assert not bases, kind
            assert 0 < distance(trained, resumed) <= 0.01, kind
            assert torch.equal(trained["table"], resumed["table"]), kind


def test_packed_state(ranks: Results) -> None:
    """The work is shared as it is without, and a checkpoint leads to the same bits."""
    alone = stepped(state_dtype=torch.int8)
    for rank in ranks["packed", 2]:
        for kind, (trained, resumed, formats) in rank.items():
            assert distance(trained, alone) <= 1e-3, kind  # a last bit of 8 may differ
            assert equal(trained, resumed), kind
            assert torch.int8 in formats
