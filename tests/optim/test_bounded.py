"""No stream of gradients makes the default step large: a Hypothesis test over streams, and the
worst ones by name.

A second moment that forgets at most twice as fast as the momentum, and that is never below its
square, bounds every entry of a step in the eigenbasis (the inequality of Cauchy and Schwarz). AdamW
with the same betas is the yardstick.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from eigenstep import Spectral, Turning
from eigenstep.core.step import moore_penrose

LR = 1e-3
Stream = list[Tensor]


class Moves(NamedTuple):
    """In units of the learning rate: how far the weights are in the end, the longest step, and the
    way they went.
    """

    total: float
    longest: float
    way: float


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) / LR


def moves(make: Callable[[list[nn.Parameter]], Optimizer], stream: Stream) -> Moves:
    w = nn.Parameter(torch.zeros_like(stream[0]))
    optimizer = make([w])
    steps = []
    for gradient in stream:
        before = w.detach().clone()
        w.grad = gradient.clone()
        optimizer.step()
        steps.append(rms(w.detach() - before))
    return Moves(rms(w.detach()), max(steps), sum(steps))


def compare(
    stream: Stream, betas: tuple[float, float] = (0.95, 0.95), **options: object
) -> tuple[Moves, Moves]:
    ours = moves(lambda w: Spectral(w, LR, betas, weight_decay=0.0, **options), stream)  # type: ignore[arg-type]
    return ours, moves(lambda w: AdamW(w, LR, betas, weight_decay=0.0), stream)


def noise(shape: tuple[int, int], seed: int) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.randn(shape, generator=generator)


def active_then_zero(
    shape: tuple[int, int], active: int, steps: int, fresh: Callable[[], Tensor]
) -> Stream:
    return [fresh() if step < active else torch.zeros(shape) for step in range(steps)]


def named_streams(shape: tuple[int, int], seed: int) -> dict[str, Stream]:
    fresh = noise(shape, seed)
    rows = shape[0]
    zero = torch.zeros(shape)
    row = torch.arange(rows)[:, None]
    base = fresh()
    streams = {f"{k} steps, then zero": active_then_zero(shape, k, 200, fresh) for k in (1, 5, 100)}
    streams |= {
        "1, then 1e-6": [fresh() * (1.0 if t == 0 else 1e-6) for t in range(100)],
        "5 % of the entries": [fresh() * (fresh() > 1.645) for _ in range(100)],
        "spikes": [fresh() * (1e4 if t % 17 == 16 else 1.0) for t in range(100)],
        "one huge spike": [fresh() * (1e6 if t == 50 else 1.0) for t in range(100)],
        "fading": [fresh() * 0.7**t for t in range(100)],
        "growing": [fresh() * 1.3**t for t in range(100)],
        "rows in turn": [fresh() * (row == t % rows) for t in range(100)],
        "a late expert": [zero if t < 50 else fresh() for t in range(100)],
        "on and off": [fresh() if t // 10 % 2 == 0 else zero for t in range(100)],
        "constant": [base] * 100,
        "noise": [fresh() for _ in range(100)],
    }
    return streams


NAMES = list(named_streams((2, 2), 0))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, (16, 8)) for name in NAMES),
        *((name, (48, 32)) for name in NAMES[::4]),
        *((name, (16, 64)) for name in NAMES[1::4]),
    ],
    ids=str,
)
def test_named_streams(name: str, shape: tuple[int, int]) -> None:
    ours, adamw = compare(named_streams(shape, seed=0)[name])
    assert ours.longest <= 3
    assert ours.total <= 3 * adamw.total


@pytest.mark.parametrize(
    ("recipe", "betas"), [(Spectral, (0.9, 0.99)), (Spectral.fast, (0.0, 0.95))], ids=str
)
def test_other_momenta(betas: tuple[float, float], recipe: Callable[..., Spectral]) -> None:
    for name, stream in named_streams((24, 16), 0).items():
        ours = moves(lambda w: recipe(w, LR, betas=betas, weight_decay=0.0), stream)
        adamw = moves(lambda w: AdamW(w, LR, betas, weight_decay=0.0), stream)
        assert ours.longest <= max(3, 1.5 * adamw.longest), name
        assert ours.total <= 3 * max(adamw.total, 0.1 * adamw.way), name


@pytest.mark.parametrize(
    ("betas", "nesterov"),
    [
        ((0.0, 0.9), 1.0),
        ((0.95, 0.95), 0.2),
        ((0.95, 0.95), True),
        ((0.9, 0.99), 1.0),
        ((0.9, 0.99), 0.2),
    ],
    ids=str,
)
def test_any_weight_of_the_newest_gradient(
    betas: tuple[float, float], nesterov: float | bool
) -> None:
    for name, stream in named_streams((16, 12), 1).items():
        ours = moves(
            lambda w: Spectral(w, LR, betas, weight_decay=0.0, nesterov=nesterov, grafting=False),
            stream,
        )
        assert ours.longest <= entry_bound(betas, nesterov), name


def entry_bound(betas: tuple[float, float], nesterov: float | bool) -> float:
    """The promise: what an entry of a step can be at most in the eigenbasis, in learning rates."""
    newest = 1.0 if betas[0] == 0 else 1 - betas[0] if nesterov is True else nesterov
    ratio = max(1.0, (1 - betas[0]) ** 2 / (1 - betas[1]) / (1 - betas[0] ** 2 / betas[1])) ** 0.5
    return 1.01 * ((1 - newest) * ratio + newest / (1 - betas[1]) ** 0.5)


def test_an_expert_that_is_routed_once() -> None:
    """Its gradients are zero from then on, beside experts of the same shape that go on learning."""
    fresh = noise((64, 32), 0)
    experts = [nn.Parameter(torch.zeros(64, 32)) for _ in range(4)]
    optimizer = Spectral(experts, LR, weight_decay=0.0)
    for step in range(200):
        for index, expert in enumerate(experts):
            expert.grad = fresh() if index or step == 0 else torch.zeros(64, 32)
        optimizer.step()
    yardstick = moves(
        lambda w: AdamW(w, LR, (0.95, 0.95), weight_decay=0.0),
        active_then_zero((64, 32), 1, 200, fresh),
    )
    assert rms(experts[0].detach()) <= 3 * yardstick.total


def test_single_entries_of_sparse_gradients() -> None:
    for seed in range(3):
        fresh = noise((64, 32), seed)
        w = nn.Parameter(torch.zeros(64, 32))
        optimizer = Spectral([w], LR, weight_decay=0.0)
        for _ in range(100):
            before = w.detach().clone()
            w.grad = fresh() * (fresh() > 1.645)
            optimizer.step()
            assert (w.detach() - before).abs().max() <= 10 * LR


PARTS = st.sampled_from(
    ["noise", "zero", "same", "sparse", "row", "column", "rank one", "opposite"]
)
SIZES = st.sampled_from([1.0, 1.0, 1.0, 1e-6, 1e-3, 1e4, 1e12])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(2, 24), st.integers(2, 24)),
    parts=st.lists(
        st.tuples(PARTS, SIZES, st.integers(1, 25), st.sampled_from([1.0, 0.7, 1.2])),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 1000),
    betas=st.sampled_from([(0.95, 0.95), (0.9, 0.95), (0.9, 0.99)]),
)
@example((2, 2), [("opposite", 1.0, 4, 1.2), ("noise", 1.0, 6, 1.0)], 0, (0.95, 0.95))
@example((2, 2), [("opposite", 1.0, 2, 1.0), ("zero", 1.0, 5, 1.0)], 2, (0.95, 0.95))
@example((3, 2), [("opposite", 1.0, 2, 1.0), ("noise", 1e-6, 6, 1.0)], 0, (0.9, 0.95))
def test_any_stream(
    shape: tuple[int, int],
    parts: list[tuple[str, float, int, float]],
    seed: int,
    betas: tuple[float, float],
) -> None:
    check_stream(shape, parts, seed, betas)


def check_stream(
    shape: tuple[int, int],
    parts: list[tuple[str, float, int, float]],
    seed: int,
    betas: tuple[float, float],
) -> None:
    fresh = noise(shape, seed)
    rows, columns = shape
    base = fresh()
    stream = []
    for kind, size, length, trend in parts:
        for t in range(length):
            gradient = {
                "noise": fresh(),
                "zero": torch.zeros(shape),
                "same": base,
                "sparse": fresh() * (fresh() > 1.3),
                "row": fresh() * (torch.arange(rows) == t % rows)[:, None],
                "column": fresh() * (torch.arange(columns) == t % columns),
                "rank one": torch.outer(fresh()[:, 0], fresh()[0]),
                "opposite": base * (-1) ** t,
            }[kind]
            stream.append(gradient * size * trend**t)
    ours, adamw = compare(stream, betas)
    assert ours.longest <= 3
    # AdamW's steps can cancel by chance, so that its weights end where they began: the length of
    # its way is what there is to compare with. The examples above end three times as far as AdamW.
    assert ours.total <= 3 * adamw.way


def test_one_huge_batch_does_not_throw_the_weights_away() -> None:
    """A gradient a million times as large as the others: the loss must not rise."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 64, generator=generator)
    labels = (inputs[:, :8] @ torch.randn(8, 5, generator=generator)).argmax(-1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5)
        )
    optimizer = Spectral(model.parameters(), 3e-3, weight_decay=0.0)
    losses = []
    for step in range(100):
        batch = torch.randint(512, (32,), generator=generator)
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        for w in model.parameters():
            w.grad = w.grad * 1e6 if step == 60 and w.grad is not None else w.grad
        optimizer.step()
        losses.append(float(nn.functional.cross_entropy(model(inputs), labels).detach()))
    assert max(losses[60:]) <= 1.05 * losses[59]
    assert losses[59] < 0.8 * losses[0]


EXTREMES: dict[str, Callable[[Tensor, int, float, float], Tensor]] = {
    "largest numbers": lambda x, t, most, least: x.sign() * most,
    "smallest numbers": lambda x, t, most, least: x * least * 8,
    "largest and smallest": lambda x, t, most, least: (
        x.clamp(-1, 1) * (most if t % 2 else least * 8)
    ),
    "both in one": lambda x, t, most, least: torch.where(
        x > 0, torch.full_like(x, most), least * x
    ),
    "largest, then zero": lambda x, t, most, least: x.sign() * (most if t == 0 else 0.0),
    "a jump by 1e59": lambda x, t, most, least: x * (1e-30 if t < 5 else 1e29),
    "a fall by 1e59": lambda x, t, most, least: x * (1e29 if t < 5 else 1e-30),
}
OPTIONS: list[dict[str, object]] = [
    {},
    {"betas": (0.0, 0.95)},
    {"eigenvalues": "kronecker", "root": 1.0},
    {"damping": 0.0, "turning": Turning(rate=1.0)},
    {"root": 4.0, "turning": Turning(map="cayley")},
    {"grafting": False, "turning": Turning(dtype=torch.bfloat16)},
    {"grafting": False, "turning": Turning(partial(moore_penrose, gap=0.1), map="cayley")},
    {"state_dtype": torch.bfloat16, "clip": 1.0},
    {"structure": "full"},
    {"root": 1.0, "state_dtype": torch.float64},
    {"exact": True},
    {"exact": True, "structure": "full", "gamma": 0.0},
]
CASES = list(itertools.product(EXTREMES, [torch.float32, torch.float64], OPTIONS))


@pytest.mark.parametrize(("name", "dtype", "options"), CASES[::7], ids=str)
def test_finite_gradients_leave_finite_weights_and_state(
    name: str, dtype: torch.dtype, options: dict[str, object]
) -> None:
    limits = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 4), (5,), (4, 2, 3, 3))
    weights = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    kind: Any = Spectral.paper if "exact" in options else Spectral
    optimizer = kind(weights, LR, **options)
    for t in range(15):
        for w in weights:
            draw = torch.randn(w.shape, generator=generator, dtype=dtype)
            w.grad = EXTREMES[name](draw, t, limits.max, limits.smallest_normal * limits.eps)
        optimizer.step()
        for w in weights:
            assert torch.isfinite(w).all()
            assert all(torch.isfinite(value).all() for value in optimizer.state[w].values())
