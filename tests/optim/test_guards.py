"""What could do harm is refused in a sentence, before anything is changed; and what is not needed
is not kept.
"""

from __future__ import annotations

import copy
import io
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eigenstep
from eigenstep import Spectral, Turning
from eigenstep.core.step import (
    bounded,
    cayley,
    moore_penrose,
    normalized,
    truncated_cayley,
)
from eigenstep.optim import Fused

from .problems import Problem, equal
from .test_contract import assert_same_state

Saved = dict[str, Any]


def trained(**options: Any) -> tuple[Problem, Spectral]:
    """A matrix and a vector after two steps."""
    problem = Problem([(6, 4), (5,)])
    optimizer = Spectral(problem.parameters, **options)
    problem.descend(optimizer, 2)
    return problem, optimizer


def in_group(**changes: Any) -> Callable[[Saved], None]:
    return lambda saved: saved["param_groups"][0].update(changes)


def in_state(name: str, change: Callable[[Tensor], Any]) -> Callable[[Saved], None]:
    return lambda saved: saved["state"][0].update({name: change(saved["state"][0][name])})


def with_nan(tensor: Tensor) -> Tensor:
    """Spoil one entry."""
    tensor = tensor.clone()
    tensor.view(-1)[-1] = math.nan
    return tensor


DAMAGE: dict[str, tuple[Callable[[Saved], Any], str]] = {
    "rate": (in_group(lr=torch.tensor(math.nan)), "lr must be finite"),
    "turning": (in_group(turning={"map": "bogus"}), "map must be one of"),
    "count": (in_group(count=-1), "count of group 0 must be a whole number, got -1"),
    "unknown option": (in_group(weigth_decay=0.0), "did you mean weight_decay"),
    "no group": (lambda s: s["param_groups"].pop(), "different number of parameter groups, 0,"),
    "no groups": (lambda s: s.pop("param_groups"), "a dictionary with param_groups and state"),
    "state of nobody": (
        lambda s: s["state"].update({9: s["state"][0]}),
        "state for 9, which is in none of its",
    ),
    "missing": (
        lambda s: s["state"][0].pop("basis_1"),
        r"state of group 0 #0 must have the entries .*basis_1",
    ),
    "shape": (
        in_state("eigs_0", lambda eigs: eigs[..., :-1]),
        r"eigs_0 of group 0 #0 must have shape \(1, 1, 6\), got \(1, 1, 5\)",
    ),
    "nan": (in_state("momentum", with_nan), "momentum of group 0 #0 must be finite"),
    "integers": (in_state("step", Tensor.int), "step of .* got torch.int32"),
    "two formats": (in_state("scale", Tensor.double), "float32 or float64, the same for step"),
    "sparse": (in_state("momentum", Tensor.to_sparse), "must have all its numbers, got torch.spa"),
}


class TestDamagedCheckpoints:
    @pytest.mark.parametrize("name", DAMAGE)
    def test_change_nothing(self, name: str) -> None:
        spoil, message = DAMAGE[name]
        problem, optimizer = trained()
        before = copy.deepcopy(optimizer.state_dict())
        saved = copy.deepcopy(before)
        spoil(saved)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        assert_same_state(optimizer.state_dict(), before)
        twin, other = trained()
        problem.descend(optimizer, 2)
        twin.descend(other, 2)
        assert equal(problem.snapshot(), twin.snapshot())

    @pytest.mark.parametrize("given", [None, 3, {"state": {}}], ids=str)
    def test_something_else(self, given: Any) -> None:
        _, optimizer = trained()
        with pytest.raises(ValueError, match="must be a dictionary with param_groups and state"):
            optimizer.load_state_dict(given)

    def test_hooks_may_mend_what_is_loaded(self) -> None:
        _, optimizer = trained(lr=0.5)
        saved = copy.deepcopy(optimizer.state_dict())
        in_group(lr=math.nan)(saved)
        seen = []

        def mend(_: Any, given: Saved) -> Saved:
            return {
                **given,
                "param_groups": [{**group, "lr": 0.25} for group in given["param_groups"]],
            }

        optimizer.register_load_state_dict_pre_hook(mend)
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert seen == [2]


class TestGroups:
    @pytest.mark.parametrize(
        ("key", "hint"),
        [
            ("weigth_decay", "did you mean weight_decay"),
            ("beta", "did you mean betas"),
            ("distributed", "no such option"),
            ("ess", "no such option"),
        ],
    )
    def test_unknown_options(self, key: str, hint: str) -> None:
        with pytest.raises(
            ValueError, match=f"unknown option '{key}' in a parameter group: .*{hint}"
        ):
            Spectral([{"params": [nn.Parameter(torch.ones(2))], key: 0}])

    def test_what_others_put_there(self) -> None:
        known = {
            "initial_lr": 0.1,
            "name": "head",
            "max_lr": 1.0,
            "swa_lr": 0.1,
            "lr_scale": 1.0,
            "base_momentum": 0.1,
        }
        optimizer = Spectral([{"params": [("w", nn.Parameter(torch.ones(2)))], **known}])
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert optimizer.param_groups[0]["name"] == "head"

    @pytest.mark.parametrize(
        "change", [{"structure": "diagonal"}, {"fused": Fused(batch_dims=0, heads=2)}], ids=str
    )
    @pytest.mark.parametrize("how", ["stepped", "loaded", "copied"])
    def test_layouts_are_fixed_once_there_is_state(self, change: dict[str, Any], how: str) -> None:
        problem, optimizer = trained()
        if how == "loaded":
            saved = optimizer.state_dict()
            optimizer = Spectral(problem.parameters)
            optimizer.load_state_dict(saved)
        elif how == "copied":
            problem, optimizer = copy.deepcopy((problem, optimizer))
        optimizer.param_groups[0].update(change)
        before = problem.snapshot()
        with pytest.raises(
            ValueError,
            match=r"structure, max_dim, max_ratio, fused cannot change after the first step",
        ):
            problem.descend(optimizer, 1)
        assert equal(problem.snapshot(), before)

    def test_a_checkpoint_brings_its_own_layout(self) -> None:
        problem, optimizer = trained(max_ratio=1.0)
        other = Spectral(problem.parameters)
        problem.descend(other, 1)
        other.load_state_dict(optimizer.state_dict())
        assert other.param_groups[0]["max_ratio"] == 1.0
        problem.descend(other, 1)

    def test_layouts_may_change_before_the_first_step(self) -> None:
        problem = Problem([(6, 4)])
        optimizer = Spectral(problem.parameters)
        optimizer.param_groups[0]["structure"] = "diagonal"
        problem.descend(optimizer, 1)
        assert [item.structure for item in optimizer.summary()] == ["diag 24"]
        assert "basis_0" not in optimizer.state[problem.parameters[0]]


def half_speed(*arguments: Any, **options: Any) -> Tensor:
    """A user's own rotation."""
    return bounded(*arguments, **options) / 2


def defect(basis: Tensor) -> float:
    """How far a basis is from an orthogonal one."""
    singular_values = torch.linalg.svdvals(basis.double())
    return float((singular_values - 1).abs().max())


class TestBases:
    @pytest.mark.parametrize("rotation", ["bounded", half_speed])
    def test_what_could_destroy_them_is_refused(self, rotation: Any) -> None:
        with pytest.raises(ValueError, match="needs mend=True, for it stretches bases a little"):
            Spectral(
                [nn.Parameter(torch.ones(4, 3))], turning=Turning(rotation=rotation, mend=False)
            )

    @pytest.mark.parametrize(
        "turning",
        [
            Turning(),
            Turning(rate=1.0),
            Turning(rotation=partial(moore_penrose, gap=0.0)),
            Turning(rotation=partial(normalized, rate=1.9), map="truncated_cayley"),
            Turning(rate=1.0, map="truncated_cayley"),
            Turning(map="cayley", mend=False),
        ],
        ids=str,
    )
    def test_what_is_allowed_keeps_them(self, turning: Turning) -> None:
        """On plain noise, turning at every step."""
        w = nn.Parameter(torch.zeros(16, 12))
        optimizer = Spectral([w], interval=1, turning=turning)
        for _ in range(150):
            w.grad = torch.randn(16, 12)
            optimizer.step()
            assert defect(optimizer.state[w]["basis_0"]) < 0.5
        assert torch.isfinite(w).all()


class TestDamping:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize(
        "options", [{"eigenvalues": "kronecker"}, {"structure": "diagonal"}], ids=str
    )
    def test_sparse_gradients_without_any(
        self, options: dict[str, Any], dtype: torch.dtype
    ) -> None:
        for seed in range(3):
            torch.manual_seed(seed)
            w = nn.Parameter(torch.zeros(16, 8, dtype=dtype))
            optimizer = Spectral([w], lr=1.0, weight_decay=0.0, damping=0.0, **options)
            for _ in range(200):
                before = w.detach().clone()
                w.grad = torch.randn(16, 8, dtype=dtype) * (torch.rand(16, 8) < 0.05)
                optimizer.step()
                assert (w - before).abs().amax() < 100


class TestMemory:
    def test_parts_of_stacks_do_not_hold_the_whole(self) -> None:
        """Layers of one shape whose gradients vanish one by one."""
        layers = [nn.Parameter(torch.zeros(32, 32)) for _ in range(24)]
        optimizer = Spectral(layers)
        for layer in layers:
            layer.grad = torch.randn(32, 32)
        for layer in layers:
            optimizer.step()
            layer.grad = None
        tensors = [tensor for own in optimizer.state.values() for tensor in own.values()]
        needed = sum(t.numel() * t.element_size() for t in tensors)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert sum(storages.values()) <= 1.1 * needed
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        assert file.tell() <= 1.1 * needed + 1000 * len(tensors)


class Scaled:
    """A rotation that is not a plain function."""

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        return half_speed(*arguments, **options)


class TestOwnFunctions:
    def test_functions_do_what_names_do(self) -> None:
        runs = []
        for turning in (
            Turning(map="truncated_cayley"),
            Turning(map=truncated_cayley, rotation=bounded),
        ):
            problem, optimizer = trained(turning=turning)
            assert "6x4" in str(optimizer.summary())
            runs.append(problem.snapshot())
        assert equal(*runs)

    @pytest.mark.parametrize("rotation", [half_speed, Scaled()])
    def test_checkpoints_hold_names(self, rotation: Any) -> None:
        turning = Turning(rotation=rotation, map=cayley)
        problem, optimizer = trained(turning=turning)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        names = saved["param_groups"][0]["turning"]
        assert names["rotation"].startswith("custom: ")
        assert names["map"] == "custom: eigenstep.core.step.cayley"
        twin = copy.deepcopy(problem)
        other = Spectral(twin.parameters, turning=turning)
        other.load_state_dict(saved)
        assert other.param_groups[0]["turning"].rotation is rotation
        problem.descend(optimizer, 2)
        twin.descend(other, 2)
        assert equal(problem.snapshot(), twin.snapshot())

    @pytest.mark.parametrize("rotation", ["bounded", bounded])
    def test_other_functions_are_not_taken_for_them(self, rotation: Any) -> None:
        problem, optimizer = trained(turning=Turning(rotation=half_speed))
        other = Spectral(problem.parameters, turning=Turning(rotation=rotation))
        with pytest.raises(
            ValueError,
            match=r"rotation of Turning was a function, 'custom: .*half_speed'; make the",
        ):
            other.load_state_dict(optimizer.state_dict())
        assert other.param_groups[0]["turning"].rotation is rotation

    def test_names_of_functions_are_no_options(self) -> None:
        with pytest.raises(ValueError, match="map must be one of"):
            Turning(map="custom: eigenstep.core.step.cayley")


def test_a_step_is_short() -> None:
    """Newcomers can follow a step: a warm one that turns bases runs few functions in few files."""
    root = str(Path(eigenstep.__file__).parent)
    w = nn.Parameter(torch.randn(8, 4))
    optimizer = Spectral([w])
    files: set[str] = set()
    functions: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and code.co_name[0] != "<":
            files.add(code.co_filename)
            functions.append(code.co_name)

    for _ in range(5):
        w.grad = torch.randn(8, 4)
        files.clear()
        functions.clear()
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            optimizer.step()
        finally:
            sys.setprofile(before)
    assert len(files) <= 5
    assert len(functions) <= 115
