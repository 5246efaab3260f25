"""Streams of gradients made to throw weights away, with the defaults: steps and moves stay within
their bounds.

What they have in common: something that was learned from one part of a stream is wrong for the
next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from eigenstep import Spectral, Turning
from eigenstep.core.step import moore_penrose
from eigenstep.optim import Fused

from .test_bounded import LR, Stream, moves, noise

STEPS, HALF = 150, 75
BETAS = (0.9, 0.95)


def _pattern(row: Tensor, column: Tensor) -> Tensor:
    return row[:, :1] @ column[:1]


def _flip(t: int) -> int:
    return (-1) ** t


def _signs(fresh: Callable[[], Tensor]) -> dict[str, Stream]:
    base = fresh()
    one = _pattern(fresh(), fresh())
    zero = torch.zeros_like(base)
    ones = torch.ones_like(base)
    then = [fresh() for _ in range(STEPS)]
    return {
        "alternating": [base * _flip(t) for t in range(STEPS)],
        "alternating rank one, then noise": [
            one * _flip(t) if t < HALF else then[t] for t in range(STEPS)
        ],
        "noise, alternating rank one, then zero": [
            then[t] if t < 50 else one * _flip(t) if t < 100 else zero for t in range(STEPS)
        ],
        "ones, then noise": [ones if t < HALF else then[t] for t in range(STEPS)],
        "checkerboard": [_checks(base) * _flip(t // 10) for t in range(STEPS)],
        "faster and faster": [base * math.cos(t * t / 40) for t in range(STEPS)],
        "random walk": list(torch.stack(then).cumsum(0)),
    }


def _checks(like: Tensor) -> Tensor:
    return (-1.0) ** (torch.arange(like.shape[0])[:, None] + torch.arange(like.shape[1]))


def _ranks(fresh: Callable[[], Tensor]) -> dict[str, Stream]:
    one = _pattern(fresh(), fresh())
    zero = torch.zeros_like(one)
    least = min(one.shape)
    five = [_pattern(fresh(), fresh()) for _ in range(5)]

    def low(rank: int) -> Tensor:
        return fresh()[:, :rank] @ fresh()[:rank] / rank**0.5

    def turning(t: int) -> Tensor:
        angle = torch.tensor(0.3 * t)
        return five[0] * angle.cos() + five[1] * angle.sin()

    return {
        "rank one, then zero": [one if t < 50 else zero for t in range(STEPS)],
        "rank one, then faint noise": [one if t < 50 else 1e-4 * fresh() for t in range(STEPS)],
        "rising rank": [low(1 + t * least // STEPS) for t in range(STEPS)],
        "ranks in turn": [low(1 + t % least) for t in range(STEPS)],
        "rank one, in turn, both signs": [five[t % 5] * _flip(t // 5) for t in range(STEPS)],
        "a plane that turns": [turning(t) for t in range(STEPS)],
        "spikes of rank one": [1e6 * one if t % 30 == 29 else fresh() for t in range(STEPS)],
    }


def _places(fresh: Callable[[], Tensor]) -> dict[str, Stream]:
    base = fresh()
    rows, columns = base.shape
    row = torch.arange(rows)[:, None]
    column = torch.arange(columns)
    place = row * columns + column

    def loud(t: int, size: float) -> Tensor:
        return fresh() * torch.where(row == t % rows, size, 1.0)

    return {
        "blocks": [
            fresh() * (row * 4 // rows == t % 4) * (column * 4 // columns == t // 4 % 4)
            for t in range(STEPS)
        ],
        "a row 1e8 times as large, in turn": [loud(t, 1e8) for t in range(STEPS)],
        "a row from 1e8 to 1e-8": [loud(0, 1e8 if t < HALF else 1e-8) for t in range(STEPS)],
        "one column, then another": [
            fresh() * (column == (t < HALF) * (columns - 1)) for t in range(STEPS)
        ],
        "one entry, another each time": [
            fresh()[0, 0] * (place == 7 * t % (rows * columns)) for t in range(STEPS)
        ],
        "rows in another order each time": [base[fresh()[:, 0].argsort()] for t in range(STEPS)],
        "diagonal, then the rest": [
            (row == column).float() if t < HALF else (row != column) * fresh() for t in range(STEPS)
        ],
    }


def _sizes(fresh: Callable[[], Tensor]) -> dict[str, Stream]:
    base = fresh()
    zero = torch.zeros_like(base)
    return {
        "silence, then noise": [zero if t < 100 else fresh() for t in range(STEPS)],
        "long silence, then always the same": [zero if t < 300 else base for t in range(400)],
        "growing by half": [fresh() * 1.5**t for t in range(100)],
        "once in a while": [fresh() if t % 21 == 0 else zero for t in range(STEPS)],
        "heavy tails": [fresh() / (fresh().abs() + 1e-3) for t in range(STEPS)],
    }


def streams(shape: tuple[int, int], seed: int = 0) -> dict[str, Stream]:
    fresh = noise(shape, seed)
    return {**_signs(fresh), **_ranks(fresh), **_places(fresh), **_sizes(fresh)}


WORST = (
    "alternating rank one, then noise",
    "noise, alternating rank one, then zero",
    "a row 1e8 times as large, in turn",
    "rows in another order each time",
    "silence, then noise",
)


@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, (16, 8)) for name in streams((2, 2))), *((name, (40, 56)) for name in WORST)],
    ids=str,
)
def test_moves(name: str, shape: tuple[int, int]) -> None:
    stream = streams(shape)[name]
    ours = moves(lambda w: Spectral(w, LR, weight_decay=0.0), stream)
    adamw = moves(lambda w: AdamW(w, LR, BETAS, weight_decay=0.0), stream)
    assert ours.longest <= 1.001
    assert ours.total <= 3 * adamw.total


MODES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "square blocks": ((24, 12), {"max_ratio": 1.0}),
    "8 bits": ((40, 32), {"state_dtype": torch.int8}),
    "bfloat16 state": ((24, 12), {"state_dtype": torch.bfloat16}),
    "parts": ((24, 8), {"fused": Fused(sizes=(8, 15, 1))}),
    "heads": ((24, 8), {"fused": Fused(heads=3)}),
    "experts": ((3, 16, 16), {}),
    "convolution": ((8, 4, 3, 3), {}),
    "whole": ((6, 5), {"structure": "full"}),
    "one row": ((1, 9), {}),
    "one number": ((1, 1), {}),
    "weight decay": ((16, 8), {"weight_decay": 0.1}),
    "cautious": ((16, 8), {"weight_decay": 0.1, "cautious_weight_decay": True}),
    "adamw's own": ((1024, 32), {}),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str) -> None:
    """Whatever matrices a parameter holds, and however its state is kept."""
    shape, options = MODES[mode]
    named = streams((shape[0], math.prod(shape[1:])))
    rare = mode == "adamw's own"
    decay = options.get("weight_decay", 0.0)
    for name in WORST[:1] if rare else WORST:
        stream = [gradient.reshape(shape) for gradient in named[name]]
        ours = moves(lambda w: Spectral(w, LR, **{"weight_decay": 0.0, **options}), stream)
        adamw = moves(lambda w: AdamW(w, LR, BETAS, weight_decay=decay), stream)
        assert ours.longest <= 1.5, name
        assert ours.total <= 3 * adamw.total, name


@pytest.mark.parametrize("name", WORST)
def test_clipped_steps(name: str) -> None:
    """Products of eigenvalues bound nothing, which is why the paper's recipe clips."""
    stream = streams((16, 8))[name]
    assert moves(lambda w: Spectral.paper(w, LR, weight_decay=0.0), stream).longest <= 1.001


@pytest.mark.parametrize("sign", [1, -1], ids=["toward zero", "away from zero"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_that_equal_the_weights(sign: int, dtype: torch.dtype) -> None:
    start = noise((16, 8), 3)().to(dtype)
    ends = []
    for make in (Spectral, lambda w, **options: AdamW(w, betas=BETAS, **options)):
        w = nn.Parameter(start.clone())
        optimizer = make([w], lr=0.01, weight_decay=0.0)
        for _ in range(100):
            w.grad = sign * w.detach()
            optimizer.step()
        ends.append((w.detach() - start).float().square().mean().sqrt())
    assert ends[0] <= 3 * ends[1]


@pytest.mark.parametrize("weak", ["noise", "always the same"])
@pytest.mark.parametrize("shape", [(16, 8), (48, 32)], ids=str)
def test_what_the_bound_of_moves_does_not_hold_for(shape: tuple[int, int], weak: str) -> None:
    """Strong gradients that cancel hide weak ones from AdamW, not from the eigenbasis, which is
    what it is for.

    Steps are hardly lengthened there, and single ones are short.
    """
    fresh = noise(shape, 1)
    one = _pattern(fresh(), fresh())
    same = fresh()
    constant = weak == "always the same"
    stream = [one * _flip(t) + 1e-3 * (same if constant else fresh()) for t in range(STEPS)]
    adamw = moves(lambda w: AdamW(w, LR, BETAS, weight_decay=0.0), stream)
    ours = moves(lambda w: Spectral(w, LR, weight_decay=0.0), stream)
    plain = moves(lambda w: Spectral(w, LR, weight_decay=0.0, grafting=False), stream)
    assert ours.longest <= 1.001
    assert ours.total <= 2.5 * plain.total
    assert ours.total <= (15 if constant else 5) * adamw.total


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Spectral, {"turning": Turning(map="cayley")}),
        (Spectral, {"turning": Turning(partial(moore_penrose, gap=0.1), map="cayley")}),
        (Spectral.paper, {"exact": True}),
    ],
    ids=str,
)
def test_exact_maps_with_gradients_near_the_limit(
    kind: type[Spectral], options: dict[str, Any]
) -> None:
    """Second moments stay in the units of the scale, and states finite."""
    fresh = noise((24, 6), 3)
    param = nn.Parameter(torch.zeros(24, 6))
    optimizer = kind([param], 1.0, weight_decay=0.0, **options)
    for t in range(30):
        before = param.detach().clone()
        param.grad = fresh() * (1e30 if t % 6 == 5 else 1e20)
        optimizer.step()
        assert (param.detach() - before).square().mean().sqrt() <= 1.5
        assert all(value.isfinite().all() for value in optimizer.state[param].values())


def test_one_matrix_for_a_whole_parameter_is_bounded_alike() -> None:
    fresh = noise((5, 4), 0)
    param = nn.Parameter(torch.zeros(5, 4))
    optimizer = Spectral([param], LR, weight_decay=0.0, structure="full")
    for t in range(40):
        param.grad = fresh() * (t % 7 == 0)
        optimizer.step()
        state = optimizer.state[param]
        square = (state["momentum"] / state["scale"]).square()
        assert (square <= 1.00001 * state["second_moment"]).all()


def test_roots_below_one_with_tiny_gradients() -> None:
    param = nn.Parameter(torch.zeros(6, 4))
    optimizer = Spectral([param], LR, root=0.5, grafting=False, clip=1.0)
    for _ in range(5):
        param.grad = torch.full((6, 4), 1e-30) * (torch.arange(6) < 2)[:, None]
        optimizer.step()
        assert param.isfinite().all()


def test_bases_that_wait_to_be_mended_stretch_no_step() -> None:
    """Long after the first hundred steps, gradients of rank one that change now and then turn bases
    far.
    """
    fresh = noise((32, 32), 0)
    stream: Stream = []
    for _ in range(38):
        stream += [_pattern(fresh(), fresh())] * 7
    assert moves(lambda w: Spectral(w, LR, weight_decay=0.0), stream).longest <= 1.0001
