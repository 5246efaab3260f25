"""What could do harm is refused in a sentence, before anything is changed; and what is not needed
is not kept.
"""

from __future__ import annotations

import collections
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
from eigenstep import Spectral
from eigenstep.core.step import bounded, cayley, moore_penrose, quadratic, truncated_cayley
from eigenstep.optim.checkpoint import defect

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


def fill(value: float) -> Callable[[Tensor], Tensor]:
    """Spoil one entry."""

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return change


def twins(tensor: Tensor) -> Tensor:
    """Make two columns equal, which no single entry shows."""
    tensor = tensor.clone()
    tensor[..., 1] = tensor[..., 0]
    return tensor


DAMAGE: dict[str, tuple[Callable[[Saved], Any], str]] = {
    "rate": (in_group(lr=math.nan), "lr must be finite"),
    "rate in a tensor": (in_group(lr=torch.tensor(math.nan)), "lr must be finite"),
    "negative rate": (in_group(lr=torch.tensor(-1.0)), "lr must be finite and at least 0"),
    "rates": (in_group(lr=torch.ones(2)), "one element"),
    "weight decay in a tensor": (
        in_group(weight_decay=torch.tensor(math.nan)),
        "weight_decay must be finite",
    ),
    "betas": (in_group(betas=(2, 3)), r"betas\[0\] must be finite and between 0.0 and 1.0, got 2"),
    "choice": (in_group(maps="bogus"), "maps must be one of"),
    "tensor for a choice": (in_group(maps=torch.ones(2)), "maps must be one of"),
    "interval": (in_group(interval=[(0, math.inf)]), "interval|infinity"),
    "count": (in_group(count=-1), "count of group 0 must be a whole number, got -1"),
    "count in words": (in_group(count="many"), "count of group 0 must be a whole number"),
    "unknown option": (
        in_group(weigth_decay=0.0),
        "'weigth_decay' in a parameter group: did you mean weight_decay",
    ),
    "more parameters": (
        lambda s: s["param_groups"][0]["params"].append(2),
        "group 0 must have 2 parameters, got 3",
    ),
    "no parameters": (
        lambda s: s["param_groups"][0].pop("params"),
        "group 0 must be a dictionary with a list of params",
    ),
    "odd parameters": (in_group(params=[[], []]), "params of group 0 must be numbers or names"),
    "no group": (lambda s: s["param_groups"].pop(), "different number of parameter groups, 0,"),
    "no groups": (
        lambda s: s.pop("param_groups"),
        "must be a dictionary with param_groups and state",
    ),
    "state is a list": (
        lambda s: s.update(state=[]),
        "must be a dictionary with param_groups and state",
    ),
    "state of nobody": (
        lambda s: s["state"].update({9: s["state"][0]}),
        "state for 9, which is in none of its",
    ),
    "no dictionary": (
        lambda s: s["state"].update({0: 3}),
        "state of group 0 #0 must have the entries .* got int",
    ),
    "nan": (in_state("momentum", fill(math.nan)), "momentum of group 0 #0 must be finite"),
    "infinite": (
        in_state("second_moment", fill(math.inf)),
        "second_moment of group 0 #0 must be finite",
    ),
    "complex": (
        in_state("momentum", Tensor.cfloat),
        "momentum of .* must be a real floating-point tensor, got torch.complex",
    ),
    "integers": (
        in_state("step", Tensor.int),
        "step of .* must be a real floating-point tensor, got torch.int32",
    ),
    "numpy": (
        in_state("step", Tensor.numpy),
        "step of .* must be a real floating-point tensor, got float32",
    ),
    "half eigenvalues": (
        in_state("eigs_0", Tensor.bfloat16),
        "eigs_0 of .* must be float32 or float64",
    ),
    "half precision": (
        in_state("momentum", Tensor.half),
        "momentum of .* floating-point tensor, got torch.float16",
    ),
    "a quarter": (
        in_state("basis_0", lambda x: x.to(torch.float8_e4m3fn)),
        "basis_0 of .* tensor, got torch.float8",
    ),
    "two formats": (
        in_state("scale", Tensor.double),
        "must be float32 or float64, the same for step, turns, scale",
    ),
    "sparse": (
        in_state("momentum", Tensor.to_sparse),
        "momentum of .* must have all its numbers, got torch.sparse_coo",
    ),
    "no numbers": (
        in_state("step", lambda x: x.to("meta")),
        "step of .* must have all its numbers, got .* on meta",
    ),
    "negative gain": (in_state("gain", fill(-2.0)), "gain of .* must be positive"),
    "agreement beyond one": (
        in_state("agreement", fill(-1.5)),
        "agreement of .* must be between -1 and 1",
    ),
    "no eigenvalue": (in_state("eigs_0", fill(0.0)), "eigs_0 of .* must be positive"),
    "negative scale": (in_state("scale", fill(-1.0)), "scale of .* must not be negative"),
    "negative moment": (
        in_state("second_moment", fill(-1e-3)),
        "second_moment of .* must not be negative",
    ),
    "half a step": (in_state("step", fill(1.5)), "step of .* must be a whole number"),
    "negative turns": (in_state("turns", fill(-1.0)), "turns of .* must not be negative"),
    "bent basis": (
        in_state("basis_0", lambda b: 1.3 * b),
        "basis_0 of .* must be nearly orthogonal",
    ),
    "twin columns": (in_state("basis_1", twins), "basis_1 of .* must be nearly orthogonal"),
    "no basis": (in_state("basis_0", torch.zeros_like), "basis_0 of .* must be nearly orthogonal"),
}


class TestDamagedCheckpoints:
    @pytest.mark.parametrize("name", DAMAGE)
    def test_change_nothing(self, name: str) -> None:
        spoil, message = DAMAGE[name]
        problem, optimizer = trained()
        before, saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
        spoil(saved)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        assert_same_state(optimizer.state_dict(), before)
        twin, other = trained()
        problem.descend(optimizer, 2)
        twin.descend(other, 2)
        assert equal(problem.snapshot(), twin.snapshot())

    @pytest.mark.parametrize("given", [None, [], 3, {}, {"state": {}}], ids=str)
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
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))  # type: ignore[arg-type]
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert seen == [2]

    @pytest.mark.parametrize("size", [1, 3, 40])
    def test_defect_is_that_of_the_singular_values(self, size: int) -> None:
        basis = torch.linalg.qr(torch.randn(2, size, size, dtype=torch.float64))[0]
        assert defect(basis) < 1e-12
        basis[1] *= torch.linspace(1, 1.2, size).sqrt() if size > 1 else 1.2**0.5
        assert 0.15 < defect(basis) < 0.2 + 1e-12


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

    def test_nine_axes(self) -> None:
        first, many = nn.Parameter(torch.ones(2, 2, 2)), nn.Parameter(torch.ones([2] * 9))
        with pytest.raises(
            ValueError,
            match=r'structure="axes" takes at most 8 axes, got a parameter of shape \(2, 2',
        ):
            Spectral([first, many], structure="axes")
        optimizer = Spectral([first], structure="axes")
        with pytest.raises(ValueError, match='a group of its own with structure="kronecker"'):
            optimizer.add_param_group({"params": [many]})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": [many], "structure": "kronecker"})

    def test_eight_axes(self) -> None:
        problem = Problem([(2,) * 8])
        history = problem.descend(
            Spectral(problem.parameters, 0.03, structure="axes", interval=2, start=0.0), 4
        )
        assert history[-1][0] < history[0][0]

    @pytest.mark.parametrize(
        "change", [{"structure": "diagonal"}, {"max_dim": 3}, {"max_ratio": 1.0}], ids=str
    )
    @pytest.mark.parametrize("how", ["stepped", "loaded", "copied"])
    def test_layouts_are_fixed_once_there_is_state(self, change: dict[str, Any], how: str) -> None:
        problem, optimizer = trained()
        if how == "loaded":
            saved, optimizer = optimizer.state_dict(), Spectral(problem.parameters)
            optimizer.load_state_dict(saved)
        elif how == "copied":
            problem, optimizer = copy.deepcopy((problem, optimizer))
        optimizer.param_groups[0].update(change)
        before = problem.snapshot()
        with pytest.raises(
            ValueError,
            match=r"structure, max_dim, max_ratio, .*split_dim cannot change after the first",
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


def half_speed(*arguments: Any, **options: Any) -> Tensor:
    """A user's own rotation."""
    return bounded(*arguments, **options) / 2


class TestBases:
    @pytest.mark.parametrize("rotation", ["bounded", "normalized", half_speed])
    def test_what_could_destroy_them_is_refused(self, rotation: Any) -> None:
        with pytest.raises(
            ValueError,
            match='reorthonormalize must be True for maps="quadratic", which stretch bases',
        ):
            Spectral([nn.Parameter(torch.ones(4, 3))], rotation=rotation, reorthonormalize=False)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"basis_lr": 1.0},
            {"maps": partial(quadratic, cap=0.6)},
            {"rotation": "moore_penrose"},
            {"rotation": partial(moore_penrose, gap=0.0)},
            {"rotation": "normalized", "basis_lr": 1.9},
            {"rotation": "normalized", "basis_lr": 1.9, "maps": "truncated"},
            {"basis_lr": 1.0, "maps": "truncated"},
            {"maps": "exact", "reorthonormalize": False},
        ],
        ids=" ".join,
    )
    def test_what_is_allowed_keeps_them(self, options: dict[str, Any]) -> None:
        """On plain noise, turning at every step."""
        torch.manual_seed(0)
        w = nn.Parameter(torch.zeros(16, 12))
        optimizer = Spectral([w], interval=1, **options)
        for _ in range(150):
            w.grad = torch.randn(16, 12)
            optimizer.step()
            assert defect(optimizer.state[w]["basis_0"]) < 1
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

    def test_products_need_some(self) -> None:
        w = nn.Parameter(torch.ones(2, 2))
        with pytest.raises(
            ValueError, match='damping must be greater than 0 for eigenvalues="kronecker"'
        ):
            Spectral.paper([w], damping=0.0)
        with pytest.raises(ValueError, match="hardly seen a gradient"):
            Spectral([w], eigenvalues="kronecker", relative_damping=False, damping=0)


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
        for options in (
            {"maps": "truncated"},
            {"maps": partial(truncated_cayley, cap=0.5), "rotation": bounded},
        ):
            problem, optimizer = trained(**options)
            assert "6x4" in str(optimizer.summary())
            runs.append(problem.snapshot())
        assert equal(*runs)

    @pytest.mark.parametrize("rotation", [half_speed, Scaled()])
    def test_checkpoints_hold_names(self, rotation: Any) -> None:
        options = {"rotation": rotation, "maps": cayley}
        problem, optimizer = trained(**options)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        assert saved["param_groups"][0]["rotation"].startswith("custom: ")
        assert saved["param_groups"][0]["maps"] == "custom: eigenstep.core.step.cayley"
        twin = copy.deepcopy(problem)
        other = Spectral(twin.parameters, **options)
        other.load_state_dict(saved)
        assert other.param_groups[0]["rotation"] is rotation
        problem.descend(optimizer, 2)
        twin.descend(other, 2)
        assert equal(problem.snapshot(), twin.snapshot())

    @pytest.mark.parametrize("own", ["bounded", bounded])
    def test_other_functions_are_not_taken_for_them(self, own: Any) -> None:
        problem, optimizer = trained(rotation=half_speed)
        other = Spectral(problem.parameters, rotation=own)
        with pytest.raises(
            ValueError,
            match=r"rotation of group 0 was a function, 'custom: .*half_speed'; make the",
        ):
            other.load_state_dict(optimizer.state_dict())
        assert other.param_groups[0]["rotation"] is own

    def test_names_of_functions_are_no_options(self) -> None:
        with pytest.raises(
            ValueError,
            match="maps must be one of 'quadratic', 'truncated', 'exact' or a function, got",
        ):
            Spectral([nn.Parameter(torch.ones(2, 2))], maps="custom: eigenstep.core.step.cayley")


def test_a_step_is_short() -> None:
    """Newcomers can follow a step: a warm one that turns bases runs few functions in few files."""
    root = str(Path(eigenstep.__file__).parent)
    w = nn.Parameter(torch.randn(8, 4))
    optimizer = Spectral([w])
    calls: collections.Counter[str] = collections.Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            calls[frame.f_code.co_filename] += 1

    for _ in range(5):
        w.grad = torch.randn(8, 4)
        calls.clear()
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            optimizer.step()
        finally:
            sys.setprofile(before)
    assert len(calls) <= 8
    assert sum(calls.values()) <= 73
