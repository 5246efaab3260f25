"""What a rank computes, keeps and sends."""

from __future__ import annotations

import pytest

from eigenstep_lab.cost import runs as cost_runs
from many_processes.cases import KINDS


@pytest.fixture(scope="module")
def serial():
    return cost_runs.trained(cost_runs.gpt(32))


@pytest.fixture(scope="module")
def size():
    """Bytes of all weights."""
    return sum(4 * p.numel() for p in cost_runs.gpt(32).parameters())


def bound(kind, world, size):
    """Fewest bytes that a rank must send, on average, to get `size` bytes of gradients to owners
    and steps back.
    """
    if kind == "ddp":  # owners send what they own to all others
        return size / world * (world - 1)
    replicas = 2 if kind == "hsdp" else 1
    shards = world // replicas
    # Of what a rank owns, it holds one part in `shards`; the rest comes from its replica, and steps
    # go to all replicas.
    return size / world * ((shards - 1) / shards + replicas - 1 / shards)


@pytest.mark.parametrize("world", KINDS)
def test_work_and_memory_are_split(ranks, serial, world):
    for rank in ranks["costs", world]:
        for kind, measured in rank.items():
            for name in ("flops", "state"):
                assert measured[name] <= 1.25 / world * serial[name], (kind, name)


@pytest.mark.parametrize("world", KINDS)
def test_nothing_is_done_twice(ranks, serial, world):
    for kind in ranks["costs", world][0]:
        for name in ("flops", "state"):
            assert sum(rank[kind][name] for rank in ranks["costs", world][:world]) == pytest.approx(
                serial[name], 1e-9
            )


@pytest.mark.parametrize("world", KINDS)
def test_bytes_on_the_wire(ranks, size, world):
    for rank in ranks["costs", world]:
        for kind, measured in rank.items():
            assert measured["sent"] <= 1.1 * bound(kind, world, size), kind
            assert measured["collectives"] <= 3


@pytest.mark.parametrize("world", KINDS)
def test_no_rank_holds_all_gradients(ranks, size, world):
    for rank in ranks["costs", world]:
        for kind, measured in rank.items():
            if kind != "ddp":  # which gives all gradients to every rank by itself
                assert 0 < measured["gradients"] <= 1.25 / world * size, kind


def test_one_process_sends_nothing(serial):
    assert serial["sent"] == 0
