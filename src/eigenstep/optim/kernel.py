"""The optimizer's arithmetic: one batched step for a stack of same-shaped tensors, no parameter in
sight.

A stack holds ``b`` gradients, each of ``k`` blocks with axes ``n0, ..., nl``, as one tensor ``(b,
k, n0, ..., nl)``. Its curvature is ``S = alpha S0 x ... x Sl``, one factor for each axis; the
factor of the first axis is block-diagonal with one block for each of the ``k``, all other factors
are shared by the blocks. A step

1. turns the gradient into the eigenbasis and averages it there: momentum;
2. projects it to ``W`` of each axis, from which ``eigenstep.core.step.learn`` learns eigenvalues
   and rotations;
3. divides the momentum by the ``p``-th root of the eigenvalues and turns it back.

Gradients enter divided by a number of their own size, and of ``alpha`` the square root is kept:
multiplying the loss by a constant changes nothing (a power of two, not even a bit), and no gradient
is too large or too small to be squared. Nothing here reads a number back to the host, so a step
never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.step import (
    HALF,
    ROTATIONS,
    TURNING,
    Turning,
    accumulation_dtype,
    cayley,
    exp,
    largest,
    learn,
    matmul,
    normalize,
    quadratic,
    reorthonormalize,
    running_rate,
    truncated_cayley,
    truncated_exp,
)
from .state import Rates, Rule, State, products_of_eigs

Turns = Mapping[int, Tensor]
"""For some axes, a matrix to turn it by: a basis ``B`` or a rotation ``Q``, shape ``(b, k or 1, n,
n)``.
"""

LARGEST = {
    dtype: largest(accumulation_dtype(dtype)) for dtype in (torch.float64, torch.float32, *HALF)
}
"""Numbers up to which sums of many cannot overflow, for each format of the state and of the bases.
"""
FAINT = 1e-8
"""Gradients this much smaller than ``sqrt(alpha)`` count as if they were zero."""
GAP = 0.1
"""Relative gap below which the paper's rotations count eigenvalues as equal; it leaves that open,
and less is worse.
"""
# times the size of Adam's step, if its entries were alike, is what steps are lengthened to at most
LONGEST = 3.0
# of a gradient, net, against the momentum, and it gets no weight of its own; all of it up to a
# tenth
NO_TRUST = 0.6
# of the mean square of a step is added to that of its rows and columns, lest faint ones grow at
# will
UNEVEN = 0.1
CAP = 0.5
"""Longest generator, as ``||N^2||_F^(1/2)``, for maps that are not exact: a Newton-Schulz step
mends what they bend.
"""


def step(
    gradient: Tensor,
    curvature: Tensor | None,
    state: State,
    rule: Rule,
    rates: Rates,
    turn: bool,
    given: Tensor | None = None,
) -> Tensor:
    """Learn from a stack of gradients and return the stack of directions ``S^(-1/p) M`` to go
    against.

    Args: gradient: ``G``, shape ``(b, k, n0, ..., nl)``. curvature: vectors whose outer products
        sum up to it, shape ``(b, k, n0, ..., nl, K)``; by default the gradient. state: the stack's
        state, changed in place. rule: what to do. rates: decay rates and damping. turn: whether the
        bases turn in this step. given: which elements of the stack have other curvature than the
        gradient's, shape ``(b,)``; by default none.
    """
    state["step"] += 1
    bases = {}
    for axis in range(gradient.ndim - 2):
        if f"basis_{axis}" in state:
            bases[axis] = state[f"basis_{axis}"]
    plain = _within_range(gradient, state, bases)
    rotated = rotate(plain, bases)
    rate, trust = running_rate(rates.beta2, state["step"], rule.start), None
    if "gain" in state:
        # Steps of unit entries, sign(G), lower the loss by the sum of magnitudes, which is smaller
        # in the eigenbasis: how much? The order of a sum must not depend on how a gradient lies in
        # memory, hence flat; zero is no news.
        plain = plain.flatten(1).abs_()
        before, after = plain.sum(1), torch.abs(rotated.flatten(1), out=plain).sum(1)
        state["gain"].lerp_(
            torch.where(after > 0, before / after, state["gain"]).clamp_min_(1.0), rate
        )
        if "agreement" in state:
            # Gradients that oppose the momentum again and again come from steps across a valley,
            # not from noise: more weight on the newest makes the swings worse, and a longer memory
            # averages them out.
            along = (
                torch.sign(state["momentum"].to(plain.dtype).flatten(1), out=plain)
                .mul_(rotated.flatten(1))
                .sum(1)
            )
            state["agreement"].lerp_(
                torch.where(after > 0, along / after, state["agreement"]), rate
            )
            trust = ((NO_TRUST + state["agreement"]) / 0.5).clamp_(0.0, 1.0)
    del plain  # memory is short while bases turn
    if "momentum" in state:
        # If second moments forgot their first terms more than twice as fast, steps would grow where
        # gradients vanish.
        weight = running_rate(rates.beta1, state["step"], max(min(rule.start, 1.0), rule.start / 2))
        weight = weight if trust is None else weight * (1 + trust) / 2
        weight = weight.view(-1, *[1] * (rotated.ndim - 1)).to(state["momentum"].dtype)
        state["momentum"].lerp_(rotated.to(weight.dtype), weight)
    turns: dict[int, Tensor] = {}
    if turn or not rule.eigenvalues_wait:
        samples = (
            rotated[..., None]
            if curvature is None
            else rotate(_within_range(curvature, state, bases), bases)
        )
        samples, past = _whiten(samples, state, rule, rates)
        turns = _learn(samples, past, state, rule, rates, rate, bases if turn else {})
        del samples
    if rule.turn_first:
        rotated = rotate(rotated, turns)
        _turn(
            turns,
            bases,
            state,
            rule,
            given,
            rotated * rate.sqrt().view(-1, *[1] * (rotated.ndim - 1)),
        )
    direction = _precondition(rotated, state, rule, rates, trust)
    del rotated
    if (
        rule.root != 2
    ):  # steps are of any size: not beyond what can be turned back, and what weights can hold
        most = min(largest(gradient.dtype), largest(direction.dtype))
        direction = direction.clamp(-most, most)
    direction = rotate(direction, bases, back=True)
    if (
        "gain" in state
    ):  # cut in the eigenbasis already, which stretches steps a little while it waits to be mended
        size = torch.linalg.vector_norm(
            direction, dim=tuple(range(1, direction.ndim)), keepdim=True
        )
        direction.mul_((direction[0].numel() ** 0.5 / size).clamp_max_(1.0))
    if not rule.turn_first:
        _turn(turns, bases, state, rule, given)
    if "graft" in state or rule.clip is not None:
        direction = _limit(direction, gradient, bases, state, rule, rates)
    return direction


def _within_range(x: Tensor, state: State, bases: Turns) -> Tensor:
    """Return numbers in the format of the arithmetic, cut where sums of them could overflow or
    scales would vanish.
    """
    wide = state["scale"].dtype
    most = min(LARGEST[wide], LARGEST[next(iter(bases.values())).dtype if bases else wide])
    x = x.to(wide).clamp(-most, most)
    return torch.hardshrink(x, 1 / most, out=x)


def rotate(x: Tensor, turns: Turns, back: bool = False) -> Tensor:
    """Return ``x``, which may have a trailing axis of samples, with axes multiplied by ``B^T``, or
    ``B`` to go back.
    """
    dtype = x.dtype
    for axis, matrix in turns.items():
        x, matrix = x.to(matrix.dtype), matrix.mT if back else matrix
        if axis == 0:  # block by block
            x = matmul(matrix.mT, x.flatten(3) if x.ndim > 3 else x[..., None]).view_as(x)
        else:  # shared by the blocks
            moved = x.movedim(axis + 2, -1)
            x = matmul(moved.flatten(1, -2), matrix[:, 0]).view(moved.shape).movedim(-1, axis + 2)
    return x.to(dtype)


def _whiten(samples: Tensor, state: State, rule: Rule, rates: Rates) -> tuple[Tensor, Tensor]:
    """Return samples in units in which their squares are safe, and the factor that takes ``alpha``
    to these units.

    The unit is the largest entry, or ``sqrt(alpha)`` if all entries are far smaller; from here on
    it is the scale. The first samples that are not all zero set ``alpha`` to their mean square.
    """
    axes, whitened = tuple(range(1, samples.ndim)), samples.abs()
    unit = torch.maximum(whitened.amax(axes), FAINT * state["scale"])  # faster than a norm
    if not rule.relative_damping:
        unit = torch.maximum(unit, rates.damping.sqrt())
    unit = torch.where(unit > 0, unit, 1.0)
    torch.div(samples, unit.view(-1, *[1] * (samples.ndim - 1)), out=whitened)
    size = torch.linalg.vector_norm(whitened, dim=axes) / samples.shape[1:-1].numel() ** 0.5
    # Whose square is still a number, however large the newest samples are
    least = torch.finfo(unit.dtype).tiny ** 0.5
    scale = torch.where(state["scale"] > 0, (state["scale"] / unit).clamp_min(least), size)
    torch.mul(unit, scale > 0, out=state["scale"])
    return whitened, torch.where(scale > 0, scale, 1.0).square_()


def _learn(
    samples: Tensor,
    past: Tensor,
    state: State,
    rule: Rule,
    rates: Rates,
    rate: Tensor,
    bases: Turns,
) -> dict[int, Tensor]:
    """Learn ``d`` of each axis, ``alpha`` and corrected eigenvalues, using samples up; return
    rotations of bases.
    """
    axes = range(samples.ndim - 3)
    unit, pace, inverses = past[:, None, None], rate[:, None, None], []
    for axis in axes:
        inverses.append(state[f"eigs_{axis}"].reciprocal())
    level = _damping(past, state, rule, rates, axes)
    common = level[:, None, None]
    turning = _turning(rule, rates, state, bases) if bases else TURNING
    square = None if len(bases) == len(axes) else _squares(samples.clone() if bases else samples)
    learned, turns = [], {}
    for axis in axes:
        damping = common
        for other in axes:
            if other != axis:
                damping = (damping * inverses[other].mean((1, 2), keepdim=True)).clamp_max_(
                    LARGEST[past.dtype]
                )
        residual = state.get(f"residual_{axis}")
        found = learn(
            unit * state[f"eigs_{axis}"],
            _project(samples, axis, inverses)
            if axis in bases
            else _project_diagonal(square, axis, inverses),
            rate=pace,
            decay=rule.decay,
            damping=damping,
            residual=None if residual is None else residual.mul_(unit[..., None]),
            positive=exp if rule.maps == "exact" else truncated_exp,
            turning=turning,
        )
        learned.append(found.eigs.flatten(1))
        if found.turn is not None and found.speed is not None:
            turns[axis] = found.turn
            state[f"speed_{axis}"].copy_(found.speed.clamp_max(LARGEST[past.dtype]))
        if residual is not None and found.residual is not None:
            residual.copy_(found.residual)
    change = _normalize(learned, state)
    if "second_moment" in state:
        square = _squares(samples) if square is None else square
        shrink, column = (-change).exp(), (-1, *[1] * (square.ndim - 1))
        state["second_moment"].mul_(((1 - rule.decay * rate) * past * shrink).view(column))
        state["second_moment"].addcmul_(
            square.add_(level.view(column)), (rate * shrink).view(column)
        )
    return turns


def _normalize(learned: list[Tensor], state: State) -> Tensor:
    """Keep eigenvalues scaled to product one, and return the logarithm of the factor by which
    ``alpha`` grows.
    """
    values, log_means = normalize(learned)
    # No farther than the scale can grow, or second moments would be in other units than it.
    change = torch.minimum(
        log_means.mean(0), 2 * (state["scale"] / LARGEST[state["scale"].dtype]).log().neg()
    )
    for axis in range(len(learned)):
        state[f"eigs_{axis}"].copy_(values[axis].view_as(state[f"eigs_{axis}"]))
        if f"residual_{axis}" in state:
            residual = state[f"residual_{axis}"].mul_((-log_means[axis]).exp()[:, None, None, None])
            # Without gradients it may decay more slowly than its unit, for ever.
            largest = residual.abs().amax((1, 2, 3), keepdim=True)
            residual.mul_(1 / (largest * FAINT).clamp_min(1.0))
    state["scale"].mul_((change / 2).exp())
    return change


def _turning(rule: Rule, rates: Rates, state: State, bases: Turns) -> Turning:
    """Return how bases turn."""
    state["turns"] += 1
    basis_beta, cap = 1 - rates.basis, CAP
    rotation: Any = ROTATIONS[rule.rotation] if isinstance(rule.rotation, str) else rule.rotation
    if (
        rule.rotation == "normalized"
    ):  # the paper's: one average for all, and a rotation whose length is set already
        basis_beta, cap, rotation = rates.beta2, 1.0, partial(rotation, rate=rates.basis, gap=GAP)
    elif rule.rotation == "moore_penrose":
        rotation = partial(rotation, gap=GAP)
    maps: dict[str, Any] = {
        "exact": cayley,
        "truncated": partial(truncated_cayley, cap=cap),
        "quadratic": partial(quadratic, cap=cap),
    }
    return Turning(
        rotation,
        maps[rule.maps] if isinstance(rule.maps, str) else rule.maps,
        running_rate(basis_beta, state["turns"], rule.start)[:, None, None],
        dtype=next(iter(bases.values())).dtype,
    )


def _project(samples: Tensor, axis: int, inverses: list[Tensor]) -> Tensor:
    """Return ``W`` of an axis: the mean over all other axes of products, divided by the others'
    eigenvalues.
    """
    left, right = samples, samples
    for other, inverse in enumerate(inverses):
        if other != axis:
            left = left * inverse.view(
                *inverse.shape[:2], *[1] * other, -1, *[1] * (samples.ndim - 3 - other)
            )
    if axis == 0:
        left, right = left.flatten(3).mT, right.flatten(3).mT
    else:
        left = left.movedim(axis + 2, -1).flatten(1, -2)[:, None]
        right = right.movedim(axis + 2, -1).flatten(1, -2)[:, None]
    return matmul(left.mT, right).div_(right.shape[-2] / samples.shape[-1])


def _project_diagonal(square: Tensor | None, axis: int, inverses: list[Tensor]) -> Tensor:
    """Return ``diag(W)`` of an axis: the mean over all other axes of squares, divided by the
    others' eigenvalues.
    """
    assert square is not None
    # axes vanish one by one, the last and the first in turn, so that no others need be moved
    total = square
    for inverse in reversed(inverses[axis + 1 :]):
        total = (total.flatten(1, -2) @ inverse.mT).view(total.shape[:-1])
    for inverse in inverses[:axis]:
        product = inverse.flatten(1)[:, None] @ total.flatten(1, 2).flatten(2)
        total = product.view(len(total), 1, *total.shape[3:])
    return total / (square.numel() / total.numel())


def _squares(samples: Tensor) -> Tensor:
    """Return the sum of the samples' squares, entry by entry, in their place."""
    return samples.square_()[..., 0] if samples.shape[-1] == 1 else samples.square_().sum(-1)


def _damping(past: Tensor, state: State, rule: Rule, rates: Rates, axes: range) -> Tensor:
    """Return the paper's ``lambda`` in the units of whitened samples, shape ``(b,)``."""
    if not rule.relative_damping:
        return (
            rates.damping.sqrt() / torch.where(state["scale"] > 0, state["scale"], 1.0)
        ).square()
    level = rates.damping * past
    for axis in axes:
        level = (level * state[f"eigs_{axis}"].mean((1, 2))).clamp_max_(LARGEST[past.dtype])
    return level


def _turn(
    turns: Turns,
    bases: Turns,
    state: State,
    rule: Rule,
    given: Tensor | None,
    newest: Tensor | None = None,
) -> None:
    """Turn the bases, ``B <- B Q``, and with them the momentum, which lives in their coordinates.

    Second moments stay those of the old coordinates, and never below the square of the momentum in
    the new ones: without this, steps could be of any size. Nor are they below that of the
    ``newest`` gradient, if it is stepped along in the new coordinates; it comes times the root of
    its weight in them. Both hold where curvature is not ``given``.
    """
    for axis, q in turns.items():
        turned = matmul(bases[axis], q)
        bases[axis].copy_(reorthonormalize(turned) if rule.reorthonormalize else turned)
    moments = [] if newest is None else [newest]
    if "momentum" in state and turns:
        state["momentum"].copy_(rotate(state["momentum"], turns))
        moments.append(state["momentum"])
    if "second_moment" in state and turns:
        scale = state["scale"] if given is None else torch.where(given, torch.inf, state["scale"])
        scale = torch.where(scale > 0, scale, torch.inf).view(
            -1, *[1] * (state["second_moment"].ndim - 1)
        )
        for moment in moments:
            state["second_moment"].clamp_min_((moment / scale).square_())


def _precondition(
    rotated: Tensor, state: State, rule: Rule, rates: Rates, trust: Tensor | None = None
) -> Tensor:
    """Return the step in the eigenbasis, all zero as long as no curvature was seen.

    It is the momentum, with more weight on the newest gradient as far as there is ``trust`` in it,
    or that gradient alone if there is no momentum, divided by the eigenvalues to the power ``1/p``,
    evened out, and lengthened until it descends as fast as Adam's, but never beyond a root mean
    square of one. It takes the place of the gradient.
    """
    direction = momentum = state["momentum"].to(rotated.dtype) if "momentum" in state else rotated
    if "second_moment" in state:
        spectrum = state["second_moment"].to(rotated.dtype)
    else:
        spectrum = products_of_eigs(state, rotated.ndim - 2)
    tiny = torch.finfo(spectrum.dtype).tiny
    spectrum = spectrum.clamp_min(tiny)
    scale = state["scale"].view(-1, *[1] * (spectrum.ndim - 1))
    unit = torch.where(scale > 0, scale, torch.inf)
    root = spectrum.sqrt_() if rule.root == 2 else spectrum.pow_(1 / rule.root).clamp_min_(tiny)
    most = _longest(momentum / unit, root) if "gain" in state else None
    if rule.nesterov and "momentum" in state:
        newest = 1 - rates.beta1 if rule.nesterov is True else rule.nesterov
        newest = newest if trust is None else newest * trust.view_as(scale)
        direction = rotated.lerp_(momentum, 1 - newest)
    direction = torch.div(direction, root.mul_(unit).clamp_min_(tiny), out=rotated)
    if most is not None:  # sizes beyond the number format count as too large
        size = torch.linalg.vector_norm(
            direction, dim=tuple(range(1, direction.ndim)), keepdim=True
        ).clamp_min(tiny)
        same = _even_out(direction, size, root) if direction.ndim > 3 else 1.0
        longer = torch.minimum(state["gain"].view_as(size), (most / size).clamp_min(1.0))
        direction.mul_(same * torch.minimum(longer, direction[0].numel() ** 0.5 / size))
    if rule.root != 2:
        # Of alpha^(1/p) = scale^(2/p) the rest: in one factor, it could leave the range of the
        # number format.
        direction.div_(scale.pow(2 / rule.root - 1).clamp_min_(tiny))
    return direction


def _even_out(direction: Tensor, size: Tensor, square: Tensor) -> Tensor:
    """Even out the rows and columns of steps in the eigenbasis, in place; return what gives them
    their norms back.

    Muon makes all singular values of a step equal, which takes 15 products. In the eigenbasis it is
    whole rows and columns that are longer than others, and dividing by their root mean squares
    comes close to it without any.
    """
    axes, limits = range(1, direction.ndim), torch.finfo(size.dtype)
    size, factors = size.clamp_max(limits.max), []
    torch.div(
        direction, size, out=square
    ).square_()  # once for all axes; norms of columns take ten times longer
    for axis in axes[1:]:
        # Rows are those of all blocks
        others = (*axes[2:],) if axis == 2 else (*axes[: axis - 1], *axes[axis:])
        share = square.sum(others, keepdim=True)
        factors.append(share.mul_(share[0].numel()).add_(UNEVEN).rsqrt_())
    for factor in factors:
        direction.mul_(factor)
    return size / torch.linalg.vector_norm(direction, dim=tuple(axes), keepdim=True).clamp_(
        limits.tiny, limits.max
    )


def _longest(momentum: Tensor, root: Tensor) -> Tensor:
    """Return the norm of Adam's largest step, with entries of one, or of three times its present
    one if that is less.

    The latter is ``||M|| / sqrt(E ||G||^2)`` if all second moments are alike, in every basis. Thus
    steps along weak gradients that strong ones hide from Adam are not lengthened for what the
    strong ones gain.
    """
    axes, limit = tuple(range(1, root.ndim)), torch.finfo(root.dtype).max
    size = torch.linalg.vector_norm(momentum, dim=axes, keepdim=True).clamp_max(limit)
    size = size / torch.linalg.vector_norm(root, dim=axes, keepdim=True).clamp_max(limit)
    return (LONGEST * size).clamp_max(1.0) * root[0].numel() ** 0.5


def _limit(
    direction: Tensor, gradient: Tensor, bases: Turns, state: State, rule: Rule, rates: Rates
) -> Tensor:
    """Give each direction the size of another optimizer's step, and clip its root mean square."""
    if "graft" in state:
        size = _size(direction).clamp_min(torch.finfo(direction.dtype).tiny)
        other = _grafted_step(_within_range(gradient, state, bases), bases, state, rule, rates)
        direction = direction / size * _size(other)
    if rule.clip is not None:
        direction = direction * (rule.clip / _size(direction).clamp_min(rule.clip))
    return direction


def _grafted_step(gradient: Tensor, bases: Turns, state: State, rule: Rule, rates: Rates) -> Tensor:
    """Return the step that Adam or RMSprop would take, before the learning rate."""
    weight = running_rate(rates.beta2, state["step"], min(rule.start, 1.0)).view(
        -1, *[1] * (gradient.ndim - 1)
    )
    # Of the mean square the root is kept: hypot squares what does not fit the number format if
    # squared.
    root = torch.hypot(
        (1 - weight).sqrt() * state["graft"].to(gradient.dtype), weight.sqrt() * gradient
    )
    state["graft"].copy_(root)
    step = gradient
    if rule.grafting == "adam" and "momentum" in state:
        step = rotate(state["momentum"].to(gradient.dtype), bases, back=True)
    # Adam's entries are a few units at most, but momentum that was turned has noise where there was
    # hardly a gradient.
    return torch.where(root > 0, step / root, 0.0).clamp(-10, 10)


def _size(x: Tensor) -> Tensor:
    """Return the root mean square of each element of a stack, shaped to multiply it; entries of any
    size are safe.
    """
    axes = tuple(range(1, x.ndim))
    unit = x.abs().amax(axes, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    return unit * torch.linalg.vector_norm(x / unit, dim=axes, keepdim=True) / x[0].numel() ** 0.5
