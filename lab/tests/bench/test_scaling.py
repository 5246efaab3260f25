"""The model of what a step costs on many GPUs: against counted operations, and against what it must
add up to.
"""

from __future__ import annotations

import math

import pytest

from eigenstep_lab.bench import scaling
from eigenstep_lab.cost.model import GPUS, MODELS, OPTIMIZERS, Unit, cost, traffic, training_traffic

SHAPES = [(name, tuple(p.shape)) for name, p in scaling.gpt(16).named_parameters()]


@pytest.mark.parametrize(("name", "billions"), [("7 B", 6.738), ("13 B", 13.016), ("70 B", 68.977)])
def test_networks_are_those_of_llama_2(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, abs=1e-3)


@pytest.mark.parametrize("name", ["AdamW", "Spectral", "Spectral.fast", "Muon, distributed"])
def test_model_is_what_is_counted(name: str) -> None:
    found = scaling.compare_single(name, 16)
    assert found["products"] == pytest.approx(found["modeled products"], rel=0.01)
    assert found["state"] == pytest.approx(found["modeled state"], rel=0.05)


@pytest.mark.parametrize("name", [key for key, optimizer in OPTIMIZERS.items() if optimizer.splits])
def test_shares_add_up(name: str) -> None:
    units = OPTIMIZERS[name].units(SHAPES)
    alone, both = cost(units, 1), cost(units, 2)
    assert alone.flops == pytest.approx(sum(u.pieces * u.flops for u in units))
    assert (
        alone.ddp_state == alone.fsdp_state == pytest.approx(sum(u.pieces * u.state for u in units))
    )
    assert alone.ddp_sent == alone.fsdp_sent == 0
    assert alone.flops / 2 * 0.999 <= both.flops <= 0.625 * alone.flops
    assert alone.fsdp_state / 2 * 0.999 <= both.fsdp_state <= 0.625 * alone.fsdp_state
    assert both.fsdp_state <= both.ddp_state


def test_what_is_not_split_is_done_everywhere() -> None:
    found = cost([Unit(2, 3.0, 5.0, 7.0)], 4, splits=False)
    assert (found.flops, found.ddp_state, found.ddp_sent) == (6.0, 10.0, 0.0)
    assert math.isnan(found.fsdp_state)
    assert math.isnan(found.fsdp_sent)


def test_bytes_on_the_wire() -> None:
    """Two ranks of one half each: DDP sends a half; FSDP2 half of a half of the gradient, and as
    much of the step.
    """
    assert traffic(8.0, 2) == (4.0, 4.0)
    assert traffic(8.0, 4, replicas=4)[1] == traffic(8.0, 4)[0], (
        "replicas of a single shard are DDP"
    )
    assert training_traffic(2, 2) == (8.0, 12.0)


def test_verdicts_follow_from_figures() -> None:
    single = {
        "A": {"products": 104.0, "modeled products": 100.0, "state": 9.0, "modeled state": 10.0}
    }
    assert [v.holds for v in scaling.single_verdicts(single)] == [True, False]
    name = "FSDP2, 2 ranks"
    model = scaling.expected(name, SHAPES)
    serial = {
        "flops": 1.7 * model["flops"],
        "state": 1.5 * model["state"],
        "sent": 0.0,
        "collectives": 0.0,
    }
    busy = {**model, "sent": 1.2 * model["sent"], "collectives": 3.0}
    found = list(scaling.ranks_verdicts({name: [busy, busy]}, SHAPES, serial))
    assert [v.holds for v in found] == [True, True, True, False, False]
    assert all(v.scheme == f"Spectral, {name}" for v in found)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_have_all_numbers_of_gpus(name: str) -> None:
    found = scaling.model_costs("124 M", {name: OPTIMIZERS[name]})
    (row,) = scaling.model_table("124 M", found).rows
    assert row[0] == name
    assert all(cell.count("/") == len(GPUS) - 1 for cell in row[1:])
