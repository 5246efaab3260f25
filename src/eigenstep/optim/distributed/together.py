"""How a step of many ranks begins: all compare what they are about to do, and new parameters get owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..inspect import candidate_of
from ..options import GO, initial_state
from ..state import State
from . import agreement
from .sharded_state import own_part
from .sharding import Candidate, Directions, Sharding

Groups = Sequence[dict[str, Any]]
Name = Callable[[Tensor], str]


def begin(
    sharding: Sharding, groups: Groups, states: Mapping[Tensor, State], look: Callable[[], Any], name: Name
) -> tuple[Any, Any, int]:
    """Decide with all other ranks on a step; raise on all of them if it is impossible on one.

    Args:
        sharding: who owns what.
        groups: the optimizer's parameter groups.
        states: the optimizer's state.
        look: checks the gradients of this rank; returns what the step needs and its verdict, or raises an error.
        name: tells a parameter's name.

    Returns:
        What ``look`` returned, but with the verdict of all ranks.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return *look()[:2], GO  # the ranks were compared before; replaying a graph runs nothing of this
    error: Exception | None = None
    candidates: dict[Tensor, Candidate] = {}
    work = samples = None
    try:
        work, samples, verdict = look()
        candidates = _candidates(sharding, groups)
    except Exception as mistake:
        error, verdict = mistake, agreement.REFUSED + dist.get_rank()
    verdict = sharding.agree(groups, GO if verdict is None else verdict, candidates)
    if error is not None:
        raise error
    if verdict >= agreement.DIFFERENT:
        raise ValueError(agreement.sentence(verdict))
    if verdict == GO:
        for group in groups:
            for param in candidates.keys() & set(group["params"]):
                own = states[param] or initial_state(group, param, sharding.layout(param))
                states[param].update(own_state(own, sharding, param, name(param)))
    return work, samples, verdict


def own_state(state: Mapping[str, Tensor], sharding: Sharding, param: Tensor, name: str) -> State:
    """Return the state of the pieces of a parameter that are stepped here, so that all ranks have the same names."""
    start, total, layout = sharding.part(param)
    return {key: own_part(tensor, start, layout.pieces, total, name) for key, tensor in state.items()}


def directions_here(arranged: Callable[..., Any], compute: Callable[..., list[Tensor]]) -> Directions:
    """Return what computes the steps of the parts that this rank owns, stack by stack.

    Args:
        arranged: puts parameters into stacks.
        compute: computes the steps of a stack, given gradients.
    """

    def directions(own: list[Tensor], gradients: list[Tensor], tag: int) -> list[Tensor]:
        given, found = dict(zip(own, gradients, strict=True)), dict[Tensor, Tensor]()
        for stack in arranged(own, tag):
            steps = compute(stack, [given.pop(param) for param in stack.params])
            found.update(zip(stack.params, steps, strict=True))
        return [found[param] for param in own]

    return directions


def _candidates(sharding: Sharding, groups: Groups) -> dict[Tensor, Candidate]:
    """Return the parameters that have no owner yet and may need one."""
    found = {}
    for group in groups:
        for param in group["params"]:
            if param not in sharding and param.numel() and (param.requires_grad or param.grad is not None):
                found[param] = candidate_of(group, param)
    return found
