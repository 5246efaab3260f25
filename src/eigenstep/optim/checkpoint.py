"""Checkpoints are files, and files are not trusted: what is loaded is checked before anything is
changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.checks import check_number
from .distributed.sharded_state import ShardedState
from .distributed.sharding import Sharding
from .options import (
    CUSTOM,
    CUSTOM_PREFIX,
    LAYOUT,
    check_group,
    custom_name,
    fixed,
    initial_state,
    plan_of,
)
from .portrait import PORTRAIT, with_bases, without_bases
from .state import State
from .storage import ADAM, UNIT, home

Groups = Sequence[Mapping[str, Any]]
Name = Callable[[Tensor], str]

POSITIVE = ("eigs", "gain")
NONNEGATIVE = ("step", "turns", "scale", "speed", "second", "graft", "unit")
WHOLE = ("step", "turns")
WIDE = ("step", "turns", "scale", "speed", "eigs", "gain", "agreement")
"""What the entries of a parameter's state must be, by the first word of their names; ``WIDE`` has
one number format.
"""
FORMATS = (torch.float64, torch.float32, torch.bfloat16)
LOOSE = {True: 0.5, False: 2.0}
"""How far the squares of a basis' singular values may be from one, whether it is mended at times or
never.
"""


def to_save(
    saved: dict[str, Any], groups: Groups, sharding: Sharding | None, bases: bool
) -> dict[str, Any]:
    """Put names in place of functions, so that files need not hold code, and say which parts of the
    state are here.
    """
    for group in saved["param_groups"]:
        group.update({name: custom_name(group[name]) for name in CUSTOM if callable(group[name])})
    if not bases:
        saved["state"] = {index: without_bases(own) for index, own in saved["state"].items()}
    if sharding is not None:
        params = [param for group in groups for param in group["params"]]
        for index, own in saved["state"].items():
            if params[index] in sharding:
                start, total, _ = sharding.units(params[index])
                saved["state"][index] = {
                    name: ShardedState(value, start, total) for name, value in own.items()
                }
    return saved


@contextmanager
def loading(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    name: Name,
    sharding: Sharding | None,
    prepare: Callable[[], None],
) -> Iterator[None]:
    """While an optimizer loads a checkpoint, check all of it first and keep its tensors and
    functions as they are.

    That is not left to torch, which copies functions, and casts state to the parameter's format:
    that would ruin eigenvalues. When everything is in place, ``prepare`` is called.
    """
    check_outline(state_dict)
    functions: list[dict[str, Any]] = []
    states: dict[Tensor, State] = {}

    def check(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        groups, found = read(given, optimizer.param_groups, optimizer.defaults, name, sharding)
        functions.extend({key: group[key] for key in CUSTOM if key in group} for group in groups)
        states.update(found)
        return {"state": {}, "param_groups": groups}

    def keep(_: Optimizer) -> None:
        for group, own in zip(optimizer.param_groups, functions, strict=True):
            group.update(own)
        optimizer.state.update(states)
        prepare()

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


def read(
    state_dict: Mapping[str, Any],
    groups: Groups,
    defaults: Mapping[str, Any],
    name: Name,
    sharding: Sharding | None,
) -> tuple[list[dict[str, Any]], dict[Tensor, State]]:
    """Return parameter groups and the state of what is stepped here from a checkpoint, all of which
    must be right.

    The groups and the defaults are the optimizer's own.
    """
    saved_groups, saved_state = check_outline(state_dict)
    if (got := len(saved_groups)) != (wanted := len(groups)):
        raise ValueError(
            f"state_dict has a different number of parameter groups, {got}, than the optimizer, "
            f"{wanted}"
        )
    found: dict[Tensor, Mapping[str, Tensor]] = {}
    whole: dict[Tensor, State] = {}  # what files without bases leave out
    host: set[Tensor] = set()
    new_groups, seen = [], set()
    for index, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if (got := len(saved["params"])) != (wanted := len(group["params"])):
            raise ValueError(
                f"state_dict does not fit: group {index} must have {wanted} parameters, got {got}"
            )
        new_groups.append(_checked_group(saved, group, defaults, index))
        options = {**defaults, **new_groups[-1]}
        for key, param in zip(saved["params"], group["params"], strict=True):
            seen.add(key)
            host.update([param] if options["offload"] else [])
            if own := saved_state.get(key):
                expected = initial_state(options, param, plan_of(options, param), device="meta")
                if isinstance(own, dict) and any(str(entry).startswith(PORTRAIT) for entry in own):
                    whole[param], expected = expected, without_bases(expected)
                _check_state(own, expected, name(param), options["reorthonormalize"])
                found[param] = own
    if strange := saved_state.keys() - seen:
        raise ValueError(
            f"state_dict has state for {min(map(str, strange))}, which is in none of its parameter "
            "groups"
        )
    if sharding is not None:
        for index, (new, old) in enumerate(zip(new_groups, groups, strict=True)):
            if fixed({**old, **new}) != fixed(old):
                raise ValueError(
                    f"state_dict does not fit: {', '.join(LAYOUT)} of group {index} cannot change "
                    "while ranks share "
                    "the work; make a new optimizer with those of the checkpoint"
                )
        found.update(
            {p: sharding.own_state(own, p, name(p)) for p, own in found.items() if p in sharding}
        )
    states: dict[Tensor, State] = {}
    for p, own in found.items():
        here = with_bases(
            {key: value.to(p.device, copy=True) for key, value in own.items()}, whole.get(p, {})
        )
        states[p] = {key: value.to(home(key, p.device, p in host)) for key, value in here.items()}
    return new_groups, states


def check_outline(state_dict: Any) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """Return the two parts of a checkpoint, raise unless they look like these at all."""
    given = state_dict if isinstance(state_dict, Mapping) else {}
    groups, state = given.get("param_groups"), given.get("state")
    if not isinstance(groups, list) or not isinstance(state, dict):
        raise ValueError(
            "state_dict must be a dictionary with param_groups and state, as state_dict() returns "
            "it"
        )
    for index, group in enumerate(groups):
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
    for key, own in state.items():
        names = {str(entry).split(".")[0] for entry in own} if isinstance(own, dict) else set()
        if names and "scale" not in names and not names <= set(ADAM):
            got = ", ".join(map(str, sorted(own, key=str)))
            raise ValueError(
                f"state_dict is not one of Spectral: state of {key} must have the entry scale, got "
                f"{got}"
            )
    return groups, state


def _checked_group(
    saved: dict[str, Any], own: Mapping[str, Any], defaults: Mapping[str, Any], index: int
) -> Any:
    """Return a parameter group with functions in place of their names, raise unless its options are
    possible.
    """
    found = dict(saved)
    for name in CUSTOM:
        text = found.get(name)
        if isinstance(text, str) and text.startswith(CUSTOM_PREFIX):
            if not callable(own[name]) or custom_name(own[name]) != text:
                raise ValueError(
                    f"state_dict does not fit: {name} of group {index} was a function, {text!r}; "
                    "make the optimizer "
                    "with that function before loading"
                )
            found[name] = own[name]
    count = found.get("count", 0)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(
            f"state_dict does not fit: count of group {index} must be a whole number, got {count!r}"
        )
    try:
        check_group({**defaults, **found})
        for name in ("lr", "weight_decay"):
            value = found.get(name, 0.0)
            check_number(value.item() if isinstance(value, Tensor) else value, name, 0.0)
    except Exception as error:  # whatever a file may hold
        raise ValueError(
            f"state_dict does not fit: group {index} is impossible: {error}"
        ) from error
    return found


def _check_state(state: Any, expected: State, name: str, mended: bool) -> None:
    """Raise unless a parameter's state has the tensors that its options ask for, with numbers that
    are possible.
    """
    if not isinstance(state, dict) or set(state) != set(expected):
        got = (
            ", ".join(map(str, sorted(state, key=str)))
            if isinstance(state, dict)
            else type(state).__name__
        )
        raise ValueError(
            f"state_dict does not fit: state of {name} must have the entries "
            f"{', '.join(sorted(expected))}, got {got}"
        )
    wide: set[torch.dtype] = set()
    for key, tensor in expected.items():
        value, kind = state[key], "unit" if UNIT in key else re.split("[_.]", key)[0]
        shape = tuple(getattr(value, "shape", ()))
        problem = (
            None
            if shape == tuple(tensor.shape)
            else f"have shape {tuple(tensor.shape)}, got {shape}"
        )
        here = value.local if isinstance(value, ShardedState) else value
        problem = problem or _problem(kind, here, tensor.dtype, mended)
        wide |= {here.dtype} if kind in WIDE and not problem else set()
        if problem or len(wide) > 1 or torch.bfloat16 in wide:
            problem = (
                problem
                or f"be float32 or float64, the same for {', '.join(WIDE)}, got {here.dtype}"
            )
            raise ValueError(f"state_dict does not fit: {key} of {name} must {problem}")


def _problem(kind: str, value: Any, dtype: torch.dtype, mended: bool) -> str | None:
    """Say what an entry of the state must be but is not."""
    if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_meta):
        return f"have all its numbers, got {value.layout} on {value.device}"
    if not dtype.is_floating_point:  # codes
        return (
            None
            if getattr(value, "dtype", None) == dtype
            else f"be {dtype}, got {getattr(value, 'dtype', value)}"
        )
    if not isinstance(value, Tensor) or value.dtype not in FORMATS:
        got = getattr(value, "dtype", type(value).__name__)
        return (
            f"be a real floating-point tensor, got {got}, not one of {', '.join(map(str, FORMATS))}"
        )
    if not torch.isfinite(value).all():
        return "be finite, but has NaN or infinite entries"
    if kind in POSITIVE and not (value > 0).all():
        return "be positive"
    if kind in NONNEGATIVE and not (value >= 0).all():
        return "not be negative"
    if kind == "agreement" and not (value.abs() <= 1).all():
        return "be between -1 and 1"
    if kind in WHOLE and not (value == value.floor()).all():
        return "be a whole number"
    if kind == "basis" and not defect(value) < LOOSE[mended]:
        return "be nearly orthogonal"
    return None


def defect(basis: Tensor) -> float:
    """Return about how far the squares of the singular values of bases, ``(*batch, n, n)``, are
    from one, at most.

    A few steps of the power method with ``B^T B - I`` cost next to nothing beside products of whole
    bases.
    """
    if not basis.numel():
        return 0.0
    basis = basis.detach().cpu().double()
    probes = torch.randn(
        basis.shape[-1], 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    size = torch.linalg.vector_norm(probes, dim=-2, keepdim=True)
    for _ in range(4):
        probes = probes / size.clamp_min(torch.finfo(torch.float64).tiny)
        probes = basis.mT @ (basis @ probes) - probes
        size = torch.linalg.vector_norm(probes, dim=-2, keepdim=True)
    return size.max().item()
