"""Checkpoints: what is loaded is checked first, so that a file that does not fit changes nothing.

What is checked is what a file can have wrong by mistake: names, shapes, number formats, and numbers
that are not finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.checks import check_number
from .distributed.sharded_state import ShardedState
from .formats import SCALARS, UNIT, State, initial_state, is_matrix
from .layout import plan_of
from .options import LAYOUT, Options, check_names, names_of, plain, restored
from .portrait import PORTRAIT, with_bases, without_bases

if TYPE_CHECKING:
    from .spectral import Spectral

WIDE = (*SCALARS, "eigs", "speed")
"""First words of the names of what is always float32 or float64."""
VECTOR_NAMES = {"step", "momentum", "second_moment", "momentum" + UNIT, "second_moment" + UNIT}
"""What there may be of a parameter without bases."""


def to_save(saved: dict[str, Any], optimizer: Spectral, bases: bool) -> dict[str, Any]:
    """Put plain types in place of typed options, and say which parts of the state are here."""
    saved["param_groups"] = [plain(group) for group in saved["param_groups"]]
    if not bases:
        saved["state"] = {index: without_bases(state) for index, state in saved["state"].items()}
    sharding = optimizer._sharding
    if sharding is None:
        return saved
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, state in saved["state"].items():
        if params[index] in sharding:
            start, total, _ = sharding.units(params[index])
            saved["state"][index] = {
                name: ShardedState(value, start, total) for name, value in state.items()
            }
    return saved


@contextmanager
def loading(optimizer: Spectral, state_dict: Mapping[str, Any]) -> Iterator[None]:
    """While an optimizer loads a checkpoint, check all of it first, and keep tensors as they are.

    That is not left to torch, which copies functions, and casts state to the parameter's format:
    that would ruin eigenvalues.
    """
    check_outline(state_dict)
    loaded = Loaded([], {})

    def check(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        content = read(given, optimizer)
        loaded.groups.extend(content.groups)
        loaded.states.update(content.states)
        return {"state": {}, "param_groups": content.groups}

    def keep(_: Optimizer) -> None:
        for group, content in zip(optimizer.param_groups, loaded.groups, strict=True):
            group.update({name: content[name] for name in ("turning", "fused") if name in content})
        optimizer.state.update(loaded.states)
        optimizer._prepare()

    # After the user's hooks that change what is loaded, and before those that look at it.
    hooks = (
        optimizer.register_load_state_dict_pre_hook(check),
        optimizer.register_load_state_dict_post_hook(keep, prepend=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Loaded:
    """What a checkpoint holds for an optimizer."""

    def __init__(self, groups: list[dict[str, Any]], states: dict[Tensor, State]) -> None:
        """Take parameter groups, and the state of what is stepped here."""
        self.groups = groups
        self.states = states


def read(state_dict: Mapping[str, Any], optimizer: Spectral) -> Loaded:
    """Return the content of a checkpoint, all of which must fit the optimizer."""
    saved_groups, saved_state = check_outline(state_dict)
    wanted = len(optimizer.param_groups)
    if len(saved_groups) != wanted:
        raise ValueError(
            f"state_dict has a different number of parameter groups, {len(saved_groups)}, than the "
            f"optimizer, {wanted}"
        )
    content = Loaded([], {})
    for index, (saved, group) in enumerate(zip(saved_groups, optimizer.param_groups, strict=True)):
        restored_group = _checked_group(saved, group, optimizer, index)
        content.groups.append(restored_group)
        merged = {**optimizer.defaults, **restored_group}
        kind = optimizer.options_kind
        options = kind(**{name: merged[name] for name in names_of(kind)})
        for key, param in zip(saved["params"], group["params"], strict=True):
            if saved_state.get(key):
                content.states[param] = _loaded_state(saved_state[key], param, options, optimizer)
    known = {key for group in saved_groups for key in group["params"]}
    strange = saved_state.keys() - known
    if strange:
        raise ValueError(
            f"state_dict has state for {min(map(str, strange))}, which is in none of its parameter "
            "groups"
        )
    return content


def _loaded_state(state: Any, param: Tensor, options: Options, optimizer: Spectral) -> State:
    """Return the state of what is stepped here of a parameter, on its device."""
    name = optimizer._name(param)
    whole = initial_state(options, plan_of(options, param.shape), param.dtype, "meta")
    portrayed = isinstance(state, dict) and any(str(key).startswith(PORTRAIT) for key in state)
    _check_state(state, without_bases(whole) if portrayed else whole, name)
    sharding = optimizer._sharding
    if sharding is not None and param in sharding:
        state = sharding.own_state(state, param, name)
    here = {key: value.to(param.device, copy=True) for key, value in state.items()}
    return with_bases(here, whole) if portrayed else here


def check_outline(state_dict: Any) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """Return the two parts of a checkpoint, raise unless they look like these at all."""
    given = state_dict if isinstance(state_dict, Mapping) else {}
    groups = given.get("param_groups")
    state = given.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict):
        raise ValueError(
            "state_dict must be a dictionary with param_groups and state, as state_dict() returns "
            "it"
        )
    for index, group in enumerate(groups):
        _check_group_outline(group, index)
    for key, entries in state.items():
        names = {str(entry).split(".")[0] for entry in entries} if entries else set()
        if names and not is_matrix(dict.fromkeys(names)) and not names <= VECTOR_NAMES:  # type: ignore[arg-type]
            got = ", ".join(sorted(map(str, entries)))
            raise ValueError(
                f"state_dict is not one of Spectral: state of {key} must have the entry scale, got "
                f"{got}"
            )
    return groups, state


def _check_group_outline(group: Any, index: int) -> None:
    if not isinstance(group, dict) or not isinstance(group.get("params"), list):
        raise ValueError(
            f"state_dict does not fit: group {index} must be a dictionary with a list of params"
        )
    try:
        hash(tuple(group["params"]))
    except TypeError:
        raise ValueError(
            f"state_dict does not fit: params of group {index} must be numbers or names"
        ) from None


def _checked_group(
    saved: dict[str, Any], present: Mapping[str, Any], optimizer: Spectral, index: int
) -> dict[str, Any]:
    """Return a parameter group in its own types, raise unless it is possible and fits."""
    if len(saved["params"]) != len(present["params"]):
        raise ValueError(
            f"state_dict does not fit: group {index} must have {len(present['params'])} "
            f"parameters, got {len(saved['params'])}"
        )
    count = saved.get("count", 0)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(
            f"state_dict does not fit: count of group {index} must be a whole number, got {count!r}"
        )
    kind = optimizer.options_kind
    try:
        group = restored(saved, present)
        check_names(group, kind)
        merged = {**optimizer.defaults, **group}
        kind(**{name: merged[name] for name in names_of(kind)})
        for name in ("lr", "weight_decay"):
            value = merged[name]
            check_number(value.item() if isinstance(value, Tensor) else value, name, 0.0)
    except Exception as error:  # whatever a file may hold
        raise ValueError(
            f"state_dict does not fit: group {index} is impossible: {error}"
        ) from error
    if optimizer._sharding is not None:
        _check_layout_kept(group, present, index)
    return group


def _check_layout_kept(group: Mapping[str, Any], present: Mapping[str, Any], index: int) -> None:
    if any(group.get(name, present[name]) != present[name] for name in LAYOUT):
        raise ValueError(
            f"state_dict does not fit: {', '.join(LAYOUT)} of group {index} cannot change while "
            "ranks share the work; make a new optimizer with those of the checkpoint"
        )


def _check_state(state: Any, expected: State, name: str) -> None:
    """Raise unless a parameter's state has the tensors that its options ask for."""
    if not isinstance(state, dict) or set(state) != set(expected):
        got = (
            ", ".join(sorted(map(str, state))) if isinstance(state, dict) else type(state).__name__
        )
        raise ValueError(
            f"state_dict does not fit: state of {name} must have the entries "
            f"{', '.join(sorted(expected))}, got {got}"
        )
    wide = set()
    for key, tensor in expected.items():
        value = state[key]
        problem = _problem(value, tensor)
        here = value.local if isinstance(value, ShardedState) else value
        if not problem and key.startswith(WIDE) and UNIT not in key:
            wide.add(here.dtype)
            if len(wide) > 1 or here.dtype == torch.bfloat16:
                names = ", ".join(WIDE)
                problem = f"be float32 or float64, the same for {names}, got {here.dtype}"
        if problem:
            raise ValueError(f"state_dict does not fit: {key} of {name} must {problem}")


FORMATS: Sequence[torch.dtype] = (torch.float64, torch.float32, torch.bfloat16)


def _problem(value: Any, expected: Tensor) -> str | None:
    """Say what an entry of the state must be but is not."""
    shape = tuple(getattr(value, "shape", ()))
    here = value.local if isinstance(value, ShardedState) else value
    if not isinstance(here, Tensor):
        return f"be a tensor, got {type(here).__name__}"
    if shape != tuple(expected.shape):
        return f"have shape {tuple(expected.shape)}, got {shape}"
    if here.layout != torch.strided or here.is_meta:
        return f"have all its numbers, got {here.layout} on {here.device}"
    allowed = FORMATS if expected.dtype.is_floating_point else (expected.dtype,)
    if here.dtype not in allowed:
        return f"be one of {', '.join(map(str, allowed))}, got {here.dtype}"
    if here.is_floating_point() and not torch.isfinite(here).all():
        return "be finite, but has NaN or infinite entries"
    return None
