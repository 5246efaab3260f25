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

from eigenstep import Spectral

from .problems import Problem, equal

SETTINGS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "float64": (torch.float64, {}),
    "bfloat16 weights": (torch.bfloat16, {}),
    "bfloat16 basis": (torch.bfloat16, {"basis_dtype": torch.bfloat16}),
    "bfloat16 state": (torch.bfloat16, {"state_dtype": torch.bfloat16, "residual": True}),
    "float32 with bfloat16 state": (torch.float32, {"state_dtype": torch.bfloat16}),
    "everything else": (
        torch.float32,
        {
            "grafting": "adam",
            "residual": True,
            "structure": "axes",
            "max_dim": 5,
            "interval": [(0, 1), (5, 3)],
        },
    ),
    "per parameter": (torch.float32, {"foreach": False, "lr": torch.tensor(0.02)}),
}

Copy = Callable[[Problem, Spectral], tuple[Problem, Spectral]]


def build(problem: Problem, options: dict[str, Any]) -> Spectral:
    """Two groups, so that a copy has to keep them apart."""
    groups = [
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
    other = build(fresh, {"structure": optimizer.param_groups[0]["structure"]})
    other.load_state_dict(checkpoint["optimizer"])
    return fresh, other


def by_loading_into_itself(problem: Problem, optimizer: Spectral) -> tuple[Problem, Spectral]:
    twin = copy.deepcopy(problem)
    other = build(twin, {})
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
class TestContinuing:
    def test_is_bit_equal(self, setting: str, copied: Copy) -> None:
        dtype, options = SETTINGS[setting]
        problem = Problem(dtype=dtype)
        optimizer = build(problem, options)
        problem.descend(optimizer, 5)
        twin, other = copied(problem, optimizer)
        assert equal(problem.snapshot(), twin.snapshot())
        problem.descend(optimizer, 5)
        twin.descend(other, 5)
        assert equal(problem.snapshot(), twin.snapshot())
        for w, v in zip(problem.parameters, twin.parameters, strict=True):
            mine, theirs = optimizer.state[w], other.state[v]
            assert {name: t.dtype for name, t in mine.items()} == {
                name: t.dtype for name, t in theirs.items()
            }
            assert all(torch.equal(t, theirs[name]) for name, t in mine.items())

    def test_the_copy_is_independent(self, setting: str, copied: Copy) -> None:
        dtype, options = SETTINGS[setting]
        problem = Problem(dtype=dtype)
        optimizer = build(problem, options)
        problem.descend(optimizer, 3)
        weights, state = problem.snapshot(), copy.deepcopy(optimizer.state_dict()["state"])
        twin, other = copied(problem, optimizer)
        twin.descend(other, 3)
        assert equal(problem.snapshot(), weights)
        now = optimizer.state_dict()["state"]
        assert all(
            torch.equal(t, now[index][name])
            for index, own in state.items()
            for name, t in own.items()
        )


class TestStateDict:
    def test_holds_plain_tensors_and_types_only(self) -> None:
        problem = Problem()
        optimizer = Spectral(problem.parameters)
        problem.descend(optimizer, 1)
        saved = optimizer.state_dict()
        assert all(
            type(t) is torch.Tensor for state in saved["state"].values() for t in state.values()
        )
        plain = (bool, int, float, str, list, tuple, torch.dtype, type(None))
        assert all(
            isinstance(value, plain) for group in saved["param_groups"] for value in group.values()
        )

    def test_size_on_disk_is_the_size_of_the_state(self, tmp_path: Path) -> None:
        """Views into stacks are saved once, not once for each parameter."""
        model = nn.Sequential(*[nn.Linear(48, 48) for _ in range(6)])
        optimizer = Spectral(model.parameters())
        model(torch.randn(2, 48)).sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        state = sum(
            t.numel() * t.element_size() for own in optimizer.state.values() for t in own.values()
        )
        assert (tmp_path / "state.pt").stat().st_size < 1.1 * state + 50_000

    def test_number_formats_are_kept(self) -> None:
        w = nn.Parameter(torch.randn(6, 4).bfloat16())
        w.grad = torch.randn(6, 4).bfloat16()
        optimizer = Spectral([w], basis_dtype=torch.bfloat16)
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        dtypes = {name: t.dtype for name, t in optimizer.state[w].items()}
        assert dtypes["basis_0"] == torch.bfloat16
        assert (
            dtypes["eigs_0"]
            == dtypes["momentum"]
            == dtypes["second_moment"]
            == dtypes["scale"]
            == torch.float32
        )

    def test_older_checkpoints_get_the_defaults_of_newer_options(self) -> None:
        problem = Problem()
        optimizer = Spectral(problem.parameters, basis_lr=0.3)
        problem.descend(optimizer, 2)
        saved = optimizer.state_dict()
        del saved["param_groups"][0]["basis_lr"]
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["basis_lr"] == 0.3
        problem.descend(optimizer, 2)

    def test_names_survive(self) -> None:
        model = nn.Linear(4, 2)
        optimizer = Spectral(model.named_parameters())
        other = Spectral(model.named_parameters())
        other.load_state_dict(optimizer.state_dict())
        assert [item.name for item in other.summary()] == ["weight", "bias"]

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (
                lambda s: s["state"][0].pop("basis_1"),
                r"state of group 0 #0 must have the entries .*basis_1",
            ),
            (
                lambda s: s["state"][0].update(eigs_0=torch.ones(1, 1, 5)),
                r"eigs_0 of group 0 #0 must have shape",
            ),
            (
                lambda s: s["state"][1].update(step=1),
                r"step of group 0 #1 must have shape \(1,\), got \(\)",
            ),
            (
                lambda s: s["param_groups"].append(s["param_groups"][0]),
                "different number of parameter groups",
            ),
        ],
        ids=["missing", "wrong shape", "no tensor", "wrong groups"],
    )
    def test_a_checkpoint_that_does_not_fit_changes_nothing(
        self, spoil: Callable[[Any], Any], message: str
    ) -> None:
        problem = Problem([(6, 4), (5,)])
        optimizer = Spectral(problem.parameters)
        problem.descend(optimizer, 2)
        twin = copy.deepcopy((problem, optimizer))
        saved = copy.deepcopy(optimizer.state_dict())
        spoil(saved)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        problem.descend(optimizer, 2)
        twin[0].descend(twin[1], 2)
        assert equal(problem.snapshot(), twin[0].snapshot())

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
