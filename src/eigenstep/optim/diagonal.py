"""Parameters without a basis: AdamW's rule, for all of a group in a few calls.

Adam's two averages are kept with their bias corrected, so that the correction is a rate that
falls::

    m <- m + w1 (g - m),   v <- v + w2 (g^2 - v),   w = (1 - beta) / (1 - beta^t),
    step = m / (sqrt(v) + eps)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import storage
from .state import State
from .user_curvature import equal_vectors

if TYPE_CHECKING:
    from .stacks import Member

Gradients = Mapping[Tensor, Any]
Group = Mapping[str, Any]
Counts = dict[tuple[Tensor, int], int]
"""How often a parameter stepped, or its bases turned if it has some, by the number of one of its
layouts.
"""
CHUNK = 2**18
"""On a CPU, so many entries are stepped at a time: what is computed on the way then stays in its
cache.
"""


class Diagonals:
    """Parameters without bases, of one number format and device, in flat tensors: many small ones
    share one.
    """

    def __init__(
        self, members: Sequence[Member], states: Mapping[Tensor, State], counts: Counts
    ) -> None:
        """Gather the members' states, and leave views of them in ``states``; ``counts`` says of
        steps taken.
        """
        keys = [(member.param, member.part) for member in members]
        packed = storage.is_packed(states[members[0].param], members[0].suffix)  # all are, or none
        self._flats: list[_Flat] = []
        for count in sorted({counts[key] for key in keys}):
            some: list[Member] = []
            room = CHUNK
            for key, member in zip(keys, members, strict=True):
                if counts[key] == count:
                    size = states[member.param]["second_moment" + member.suffix].numel()
                    if some and (
                        packed or size > room
                    ):  # in 8 bits, units are those of one parameter
                        self._flats.append(_Flat(some, states, counts))
                        some, room = [], CHUNK
                    some.append(member)
                    room -= size
            self._flats.append(_Flat(some, states, counts))
        self.members = [member for flat in self._flats for member in flat.members]

    def second_moments(self) -> list[tuple[Tensor, list[int]]]:
        """Return second moments of all members in order, many in one tensor, and the sizes of the
        members in it.
        """
        return [(flat.state["second_moment"], flat.sizes) for flat in self._flats]

    def step(self, group: Group, gradients: Gradients, samples: Mapping[Tensor, Tensor]) -> bool:
        """Move the parameters without making steps first, if that is possible, and tell whether it
        was.

        Args: group: the options. gradients: those of these parameters, and maybe others. samples:
            for some parameters, vectors whose squares replace those of the gradient, on the last
            axis.
        """
        lr, wide = group["lr"], self._flats[0].state["step"].dtype
        params = [member.param for member in self.members if not member.suffix]
        decay, special = (
            group["weight_decay"],
            group["clip"] is not None or len(params) < len(self.members),
        )
        if (
            special
            or isinstance(lr, Tensor)
            or isinstance(decay, Tensor)
            or group["cautious_weight_decay"]
        ):
            return False
        if not all(param.dtype == wide and param.is_contiguous() for param in params):
            return False
        for flat in self._flats:
            whole = [member.param.view(-1) for member in flat.members]
            for part, numerator, denominator in flat.learn(group, gradients, samples):
                weights = whole if len(whole) > 1 else [whole[0][part]]
                sizes = [weight.numel() for weight in weights]
                fractions = torch.split(numerator, sizes), torch.split(denominator, sizes)
                if decay:
                    torch._foreach_mul_(weights, 1 - lr * decay)
                torch._foreach_addcdiv_(weights, *fractions, lr if group["maximize"] else -lr)
        return True

    def directions(
        self, group: Group, gradients: Gradients, samples: Mapping[Tensor, Tensor]
    ) -> list[Tensor]:
        """Return the steps, before the learning rate; the arguments are those of ``step``."""
        found: list[Tensor] = []
        for flat in self._flats:
            parts = [
                numerator / denominator
                for _, numerator, denominator in flat.learn(group, gradients, samples)
            ]
            found += torch.split(torch.cat(parts) if len(parts) > 1 else parts[0], flat.sizes)
        if group["clip"] is not None:
            sizes = [x.norm() / x.numel() ** 0.5 for x in found]
            return [
                x * (group["clip"] / size.clamp_min(group["clip"]))
                for x, size in zip(found, sizes, strict=True)
            ]
        return found


class _Flat:
    """Parameters that have taken equally many steps, and will."""

    def __init__(
        self, members: list[Member], states: Mapping[Tensor, State], counts: Counts
    ) -> None:
        self.members, self._counts = members, counts
        self.sizes = [
            states[member.param]["second_moment" + member.suffix].numel() for member in members
        ]
        self.state: State = {}
        first = states[members[0].param]
        self._packed = storage.is_packed(first, members[0].suffix)
        if self._packed:  # then there is no other, and each of its units has units of its own
            self.state = {
                n: first[n + members[0].suffix]
                for n in storage.ADAM
                if n + members[0].suffix in first
            }
            return
        for name in ("step", "momentum", "second_moment"):
            if name + members[0].suffix in states[members[0].param]:
                parts = [states[member.param][name + member.suffix] for member in members]
                self.state[name] = _joined([part.flatten() for part in parts])
                views = torch.split(self.state[name], [part.numel() for part in parts])
                for member, part, view in zip(members, parts, views, strict=True):
                    states[member.param][name + member.suffix] = view.view(part.shape)

    def learn(
        self, group: Group, gradients: Gradients, samples: Mapping[Tensor, Tensor]
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Learn from gradients; give out, part by part, the numerators and denominators of the
        steps.
        """
        state, members, params = self.state, self.members, [member.param for member in self.members]
        beta1, beta2 = group["betas"]
        weights = self._weights(beta1, beta2, group["capturable"])
        cut = [
            m.plan.split(gradients[m.param], m.part) if m.suffix else gradients[m.param]
            for m in members
        ]
        gradient = _joined([x.reshape(-1) for x in cut])
        given, vectors = equal_vectors(params, samples, gradients) if samples else None, None
        if given is not None:
            cut = [m.plan.split(x, m.part) for m, x in zip(members, given, strict=True)]
            vectors = _joined([x.reshape(-1, x.shape[-1]) for x in cut])
        away = self._packed or group["offload"]
        # What several share is no longer
        step = CHUNK if away or gradient.device.type == "cpu" else sys.maxsize
        # Of an element of the state
        entries = len(gradient) // len(state["step"]) if self._packed else 1
        for start in range(0, len(gradient) // entries, max(1, step // entries)):
            rows = slice(start, start + max(1, step // entries))
            part = slice(rows.start * entries, rows.stop * entries)
            kept = {name: tensor[rows] for name, tensor in state.items() if name != "step"}
            chunk = storage.opened(kept, gradient.device) if away else kept
            newest = None if vectors is None else vectors[part]
            flat = {name: tensor.view(-1) for name, tensor in chunk.items()} if away else chunk
            fraction = _learn(gradient[part], newest, flat, weights, state["step"].dtype, group)
            if away:
                storage.close(kept, chunk, state["step"][rows])
            yield part, *fraction

    def _weights(self, beta1: float, beta2: float, capturable: bool) -> list[Any]:
        """Return the weights of the newest terms of both averages; numbers, unless the host must
        not know them.
        """
        self.state["step"] += 1
        for member in self.members:
            self._counts[member.param, member.part] += 1
        count = (
            self.state["step"][0]
            if capturable
            else self._counts[self.members[0].param, self.members[0].part]
        )
        return [(1 - beta) / (1 - beta**count) for beta in (beta1, beta2)]


def _learn(
    gradient: Tensor,
    vectors: Tensor | None,
    state: State,
    weights: Sequence[Any],
    wide: torch.dtype,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """Take a flat gradient into the averages, in place, and return numerator and denominator of the
    step.

    Averages are in ``state``, and their newest terms have ``weights``. If there are ``vectors``, on
    the last axis, they are squared instead of the gradient. ``wide`` is the number format of the
    arithmetic.
    """
    first, second = weights
    gradient = _within_range(gradient, wide, group)
    numerator = gradient
    if "momentum" in state:
        numerator = state["momentum"].to(wide).lerp_(gradient, first)
        state["momentum"].copy_(numerator)  # at no cost if they are the same tensor
    average = state["second_moment"].to(wide).mul_(1 - group["decay"] * second)
    for vector in [gradient] if vectors is None else _within_range(vectors, wide, group).unbind(-1):
        if isinstance(second, Tensor):
            average.addcmul_(vector * second, vector)
        else:
            average.addcmul_(vector, vector, value=second)
    state["second_moment"].copy_(average)
    grafted = group["grafting"] in ("adam", "rms")  # a step of AdamW's size: its own
    root = average.sqrt() if group["root"] == 2 or grafted else average.pow(1 / group["root"])
    return numerator, root.add_(max(group["eps"], torch.finfo(wide).tiny))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _within_range(x: Tensor, wide: torch.dtype, group: Group) -> Tensor:
    """Return numbers in the format of the arithmetic, cut where squares could overflow; zero for
    what is none.
    """
    most = torch.finfo(wide).max ** 0.5 / 16
    x = x.nan_to_num(0.0, 0.0, 0.0) if group["nonfinite"] == "ignore" else x
    return x.to(wide).clamp(-most, most)
