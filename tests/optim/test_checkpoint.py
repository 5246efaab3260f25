"""Saving and loading: whatever way the optimizer is copied, it continues as if nothing had
happened, bit for bit.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eigenstep import Spectral, Turning
from eigenstep.core.step import cayley
from eigenstep.optim import Fused

from .problems import Problem, equal
from .test_contract import assert_same_state

SETTINGS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "float64": (torch.float64, {}),
    "bfloat16 weights": (torch.bfloat16, {}),
    "bfloat16 bases": (torch.bfloat16, {"turning": Turning(dtype=torch.bfloat16)}),
    "bfloat16 state": (torch.float32, {"state_dtype": torch.bfloat16}),
    "everything else": (
        torch.float32,
        {
            "grafting": False,
            "max_dim": 5,
            "interval": [(0, 1), (5, 3)],
            "lr": torch.tensor(0.02),
            "fused": Fused(batch_dims=0),
            "turning": Turning(rotation="normalized", map=cayley, rate=0.3),
        },
    ),
}

Copy = Callable[[Problem, Spectral], tuple[Problem, Spectral]]


def build(problem: Problem, options: dict[str, Any]) -> Spectral:
    """Two groups, so that a copy has to keep them apart."""
    groups: list[dict[str, Any]] = [
        {"params": problem.parameters[:6]},
        {"params": problem.parameters[6:], "betas": (0.8, 0.9)},
    ]
    return Spectral(groups, **{"lr": 0.02, **options})


def by_state_dict(problem: Problem, optimizer: Spectral) -> tuple[Problem, Spectral]:
    """As people resume training: a new model and optimizer, then weights and state from a file."""
    file = io.BytesIO()
    torch.save({"weights": problem.snapshot(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    fresh = Problem(dtype=problem.parameters[0].dtype)
    with torch.no_grad():
        for w, saved in zip(fresh.parameters, checkpoint["weights"], strict=True):
            w.copy_(saved)
    # Functions are not in files.
    other = build(fresh, {"turning": optimizer.param_groups[0]["turning"]})
    other.load_state_dict(checkpoint["optimizer"])
    return fresh, other


def by_loading_into_itself(problem: Problem, optimizer: Spectral) -> tuple[Problem, Spectral]:
    twin = copy.deepcopy(problem)
    other = build(twin, {"turning": optimizer.param_groups[0]["turning"]})
    twin.descend(other, 2)  # has a state already, which must go
    for w, saved in zip(twin.parameters, problem.parameters, strict=True):
        w.data.copy_(saved.data)
    other.load_state_dict(optimizer.state_dict())
    return twin, other


def by_deepcopy(problem: Problem, optimizer: Spectral) -> tuple[Problem, Spectral]:
    return copy.deepcopy((problem, optimizer))


def by_pickle(problem: Problem, optimizer: Spectral) -> tuple[Problem, Spectral]:
    return pickle.loads(pickle.dumps((problem, optimizer)))


@pytest.mark.parametrize("copied", [by_state_dict, by_loading_into_itself, by_deepcopy, by_pickle])
@pytest.mark.parametrize("setting", SETTINGS)
def test_copies_go_on_bit_for_bit_and_are_independent(setting: str, copied: Copy) -> None:
    dtype, options = SETTINGS[setting]
    problem = Problem(dtype=dtype)
    optimizer = build(problem, options)
    problem.descend(optimizer, 5)
    weights = problem.snapshot()
    state = copy.deepcopy(optimizer.state_dict())
    twin, other = copied(problem, optimizer)
    assert equal(weights, twin.snapshot())
    twin.descend(other, 5)
    assert equal(weights, problem.snapshot())
    assert_same_state(state, optimizer.state_dict())
    problem.descend(optimizer, 5)
    assert equal(problem.snapshot(), twin.snapshot())
    assert_same_state(optimizer.state_dict(), other.state_dict())
    for w, v in zip(problem.parameters, twin.parameters, strict=True):
        for name, tensor in optimizer.state[w].items():
            assert tensor.dtype == other.state[v][name].dtype


class TestStateDict:
    def test_holds_plain_tensors_and_types_only(self) -> None:
        problem = Problem()
        optimizer = Spectral(problem.parameters, fused=Fused(batch_dims=0))
        problem.descend(optimizer, 1)
        saved = optimizer.state_dict()
        tensors = [t for state in saved["state"].values() for t in state.values()]
        assert all(type(t) is torch.Tensor for t in tensors)
        (group,) = saved["param_groups"]
        values = [*group.pop("turning").values(), *group.pop("fused").values(), *group.values()]
        plain = (bool, int, float, str, list, tuple, torch.dtype, type(None))
        assert all(isinstance(value, plain) for value in values)

    def test_size_on_disk_is_the_size_of_the_state(self, tmp_path: Path) -> None:
        """Views into stacks are saved once, not once for each parameter."""
        model = nn.Sequential(*[nn.Linear(48, 48) for _ in range(6)])
        optimizer = Spectral(model.parameters())
        model(torch.randn(2, 48)).sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        tensors = [t for state in optimizer.state.values() for t in state.values()]
        state = sum(t.numel() * t.element_size() for t in tensors)
        assert (tmp_path / "state.pt").stat().st_size < 1.1 * state + 50_000

    def test_number_formats_are_kept(self) -> None:
        w = nn.Parameter(torch.randn(6, 4).bfloat16())
        w.grad = torch.randn(6, 4).bfloat16()
        optimizer = Spectral([w], turning=Turning(dtype=torch.bfloat16))
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        dtypes = {name: t.dtype for name, t in optimizer.state[w].items()}
        assert dtypes["basis_0"] == torch.bfloat16
        others = {dtypes[name] for name in ("eigs_0", "momentum", "second_moment", "scale")}
        assert others == {torch.float32}

    def test_older_checkpoints_get_the_defaults_of_newer_options(self) -> None:
        problem = Problem()
        optimizer = Spectral(problem.parameters, damping=0.3)
        problem.descend(optimizer, 2)
        saved = optimizer.state_dict()
        del saved["param_groups"][0]["damping"]
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["damping"] == 0.3
        problem.descend(optimizer, 2)

    def test_names_survive(self) -> None:
        model = nn.Linear(4, 2)
        optimizer = Spectral(model.named_parameters())
        other = Spectral(model.named_parameters())
        other.load_state_dict(optimizer.state_dict())
        assert [item.name for item in other.summary()] == ["weight", "bias"]

    def test_another_optimizers_checkpoint(self) -> None:
        problem = Problem([(6, 4), (5,)])
        adam = torch.optim.AdamW(problem.parameters)
        problem.descend(adam, 1)
        with pytest.raises(ValueError, match="got exp_avg, exp_avg_sq, step"):
            Spectral(problem.parameters).load_state_dict(adam.state_dict())

    def test_hooks_run(self) -> None:
        problem = Problem([(5,)])
        optimizer = Spectral(problem.parameters)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
        optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
        problem.descend(optimizer, 1)
        optimizer.load_state_dict(optimizer.state_dict())
        assert seen == ["before", "after", "saved", "loaded"]
