"""State in 16 and 8 bits: what is lost, and what is not."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigenstep import Spectral, Turning
from eigenstep.optim import Fused, formats
from eigenstep.optim.batches import MatrixBatch

from .test_bounded import EXTREMES, LR, compare, moves, named_streams
from .test_contract import assert_same_state

EIGHT = {"state_dtype": torch.int8}
MATRICES = [(48, 32), (48, 32), (40, 100), (67, 71), (8, 4), (1100, 33), (2000,), (7,)]


def parameters(shapes: list[tuple[int, ...]] = MATRICES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def go(params: list[nn.Parameter], optimizer: Spectral, first: int, last: int) -> list[Tensor]:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step + 1)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach().clone() for param in params]


def stored(x: Tensor, name: str, step: int) -> Tensor:
    """Return what comes back of numbers that were packed."""
    times = torch.full((len(x),), float(step))
    state = formats.packed({"step": times, name: torch.zeros_like(x)})
    formats.pack_(state, {"step": times, name: x})
    return formats.unpack(state)[name]


class TestCodes:
    @pytest.mark.parametrize("shape", [(2, 1, 2000), (1, 1, 37, 61)], ids=str)
    def test_errors_are_small_and_vanish_on_average(self, shape: tuple[int, ...]) -> None:
        momentum = torch.randn(shape) * torch.logspace(0, -3, shape[-1])
        for name, x in (("momentum", momentum), ("second_moment", momentum.square())):
            found = torch.stack([stored(x, name, step) for step in range(100)])
            least = x.abs().max() * 2.0**-15  # less is lost
            assert ((found - x).abs() <= x.abs() / 8 + least).all()
            assert ((found.mean(0) - x).abs() <= x.abs() / 100 + least).all()
            assert (found * x >= 0).all()

    def test_nothing_is_as_it_was(self) -> None:
        assert (stored(torch.zeros(2, 1, 64, 32), "momentum", 1) == 0).all()
        assert (stored(torch.zeros(2, 1, 64, 32), "second_moment", 1) == 0).all()

    def test_second_moments_never_vanish_beside_others(self) -> None:
        """Where one did, the momentum would be divided by nothing."""
        x = torch.zeros(1, 1, 64, 32)
        x[..., 0] = 1e8
        found = stored(x, "second_moment", 1)
        assert (found > 0).all()
        assert (found[..., 1:] <= 1e8 * 2.0**-31).all()

    def test_slow_averages_arrive(self) -> None:
        """Changes of a thousandth a step, which are far less than the last bit."""
        x, target = torch.ones(1, 1, 1024), torch.linspace(0.1, 1.0, 1024)
        exact = x
        for step in range(2000):
            exact = exact.lerp(target, 1e-3)
            x = stored(x.lerp(target, 1e-3), "second_moment", step)
        assert ((x / exact - 1).abs().mean()) <= 0.06
        assert (x.mean() / exact.mean()).item() == pytest.approx(1.0, abs=0.01)


class TestTwoBytes:
    """How second moments of matrices are kept by default."""

    @pytest.mark.parametrize("options", [{}, {"state_dtype": torch.bfloat16}], ids=str)
    def test_averages_of_any_speed_are_those_of_float32(self, options: dict[str, Any]) -> None:
        """Rounded to the nearest number, an average that changes little would stand still."""
        levels = []
        kept = []
        for formats_of_state in (options, {"state_dtype": torch.float32}):
            params = [nn.Parameter(torch.zeros(32, 32))]
            schedule = [(0, 1000)]
            optimizer = Spectral(params, betas=(0.0, 0.999), interval=schedule, **formats_of_state)
            go(params, optimizer, 0, 20)
            for step in range(20, 270):  # gradients fade, and averages with them
                generator = torch.Generator().manual_seed(step)
                params[0].grad = 0.1 * torch.randn(32, 32, generator=generator)
                optimizer.step()
            state = optimizer.state[params[0]]
            kept.append(state["second_moment"].dtype)
            levels.append(state["second_moment"].double().mean() * state["scale"].double() ** 2)
        assert kept == [torch.bfloat16, torch.float32]
        assert (levels[0] / levels[1]).item() == pytest.approx(1.0, abs=0.02)

    def test_rounding_is_right_on_average_and_never_beyond_the_format(self) -> None:
        x = torch.logspace(-30, 38, 64 * 64, dtype=torch.float64).float().view(1, 1, 64, 64)
        x[..., 0, 0], x[..., -1, -1] = 0.0, torch.finfo(torch.float32).max
        kept = formats.rounded({"second_moment": torch.zeros_like(x), "step": torch.zeros(1)})
        assert kept["second_moment"].dtype == torch.bfloat16
        total = torch.zeros_like(x, dtype=torch.float64)
        for step in range(256):
            newest = {"second_moment": x.clone(), "step": torch.tensor([float(step)])}
            formats.pack_(kept, newest)
            found = formats.unpack(kept)["second_moment"]
            assert found.isfinite().all()
            assert ((found - x).abs() <= x / 128).all()
            total += found
        inside = x < torch.finfo(torch.bfloat16).max
        assert torch.allclose((total / 256)[inside], x[inside].double(), rtol=1e-4, atol=0.0)

    def test_steps_are_those_of_float32(self) -> None:
        """But for roundings."""
        moved = []
        for dtype in (None, torch.float32):
            params = parameters()
            ends = go(params, Spectral(params, state_dtype=dtype), 0, 40)
            starts = parameters()
            steps = [(w - start).flatten() for w, start in zip(ends, starts, strict=True)]
            moved.append(torch.cat(steps))
        assert (moved[0] - moved[1]).norm() <= 0.01 * moved[1].norm()

    @pytest.mark.parametrize("width", [256, 768])
    def test_state_takes_16_bytes_a_weight(self, width: int) -> None:
        assert state_bytes([(3 * width, width), *block(width)]) <= 16


def block(width: int) -> list[tuple[int, ...]]:
    """Return shapes of a transformer's weights."""
    return [(width, width), (4 * width, width), (width, 4 * width), (4 * width,)]


def state_bytes(shapes: list[tuple[int, ...]], **options: Any) -> float:
    """Return the memory of state for each weight."""
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    total = sum(report.state_bytes for report in Spectral(params, **options).summary())
    return total / sum(param.numel() for param in params)


@pytest.mark.parametrize("name", named_streams((2, 2), 0))
def test_steps_are_bounded(name: str) -> None:
    ours, adamw = compare(named_streams((36, 32), seed=0)[name], **EIGHT)
    assert ours.longest <= 3
    assert ours.total <= 3 * adamw.total


@pytest.mark.parametrize(
    ("betas", "structure"),
    [((0.9, 0.99), "auto"), ((0.0, 0.95), "auto"), ((0.9, 0.95), "diagonal")],
    ids=str,
)
def test_other_momenta(betas: tuple[float, float], structure: str) -> None:
    streams = named_streams((40, 32), 0)
    made = {"betas": betas, "weight_decay": 0.0, "structure": structure}
    for name in ("1, then 1e-6", "5 % of the entries", "spikes", "rows in turn"):
        ours = moves(lambda w: Spectral(w, LR, **made, **EIGHT), streams[name])
        wide = moves(lambda w: Spectral(w, LR, **made), streams[name])
        assert ours.longest <= max(3, 1.3 * wide.longest), name
        assert ours.total <= max(0.1, 1.3 * wide.total, 0.2 * wide.way), name


@pytest.mark.parametrize("first", [[], [(50304, 768)]], ids=["vit", "gpt"])
def test_memory_of_usual_shapes(first: list[tuple[int, ...]]) -> None:
    """Also told before the first step, and of weights that are nowhere."""
    assert state_bytes([*first, *block(768) * 4], max_ratio=1.5, **EIGHT) <= 6


def test_small_ones_stay_as_they_were() -> None:
    wide = parameters([(8, 4), (7,)])
    eight = parameters([(8, 4), (7,)])
    ours = go(eight, Spectral(eight, turning=Turning(dtype=torch.float32), **EIGHT), 0, 5)
    for w, expected in zip(ours, go(wide, Spectral(wide), 0, 5), strict=True):
        assert torch.equal(w, expected)


def test_checkpoints_go_on_with_the_same_bits() -> None:
    params = parameters()
    optimizer = Spectral(params, **EIGHT)
    middle = go(params, optimizer, 0, 4)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    end = go(params, optimizer, 4, 8)
    file.seek(0)
    again = [nn.Parameter(w) for w in middle]
    other = Spectral(again)  # the checkpoint knows better
    other.load_state_dict(torch.load(file, weights_only=True))
    for w, expected in zip(go(again, other, 4, 8), end, strict=True):
        assert torch.equal(w, expected)
    copied, twin = copy.deepcopy((params, optimizer))
    for w, expected in zip(go(copied, twin, 8, 10), go(params, optimizer, 8, 10), strict=True):
        assert torch.equal(w, expected)


def test_gradients_that_come_and_go() -> None:
    """Batches are arranged anew, and state goes with its parameters."""
    params = parameters()
    optimizer = Spectral(params, **EIGHT)
    go(params, optimizer, 0, 2)
    params[1].grad = None
    optimizer.step()
    go(params, optimizer, 2, 4)
    assert {own["step"].max().item() for own in optimizer.state.values()} == {4.0, 5.0}
    assert optimizer.state[params[1]]["momentum"].dtype == torch.int8


def test_parameters_that_change_rounds_take_their_state_along() -> None:
    """Ranks step large networks in rounds, and which one a parameter is in depends on the others
    that have a gradient.
    """
    params = parameters()[:2]
    optimizer = Spectral(params)
    go(params, optimizer, 0, 1)
    a, b = params
    group = optimizer.param_groups[0]

    def arranged(some: list[nn.Parameter], number: int) -> MatrixBatch:
        (batch,) = optimizer._arranged(group, optimizer.options_of(group), some, number)
        assert isinstance(batch, MatrixBatch)
        return batch

    def rounds(*lists: list[nn.Parameter]) -> None:
        for number, some in enumerate(lists):
            batch = arranged(some, number)
            batch.tensors["momentum"] += 1.0
            batch.tensors["turns"] += 1
            optimizer._clock.advance(batch.members)

    start = optimizer.state[b]["momentum"].clone()
    rounds([a], [b])
    rounds([b])
    rounds([a], [b])
    torch.testing.assert_close(optimizer.state[b]["momentum"], start + 3.0)
    (member,) = arranged([b], 1).members
    assert optimizer._clock[member] == optimizer.state[b]["turns"][0] == 4


@pytest.mark.parametrize("sizes", [(1, 11), (1,) * 12], ids=str)
@pytest.mark.parametrize("bases", [True, False], ids=["bases", "no bases"])
def test_single_rows_among_fused_matrices(sizes: tuple[int, ...], bases: bool) -> None:
    """Such a row has no basis and no scale; a checkpoint of it is one of Spectral all the same."""
    w = nn.Parameter(torch.zeros(12, 4))
    optimizer = Spectral([w], fused=Fused(sizes))
    w.grad = torch.randn(12, 4)
    optimizer.step()
    other = Spectral([w], fused=Fused(sizes))
    other.load_state_dict(optimizer.state_dict(bases=bases))
    one = other.state_dict(bases=bases)
    two = optimizer.state_dict(bases=bases)
    if bases:
        assert_same_state(one, two)
        return
    kept = ("step", "turns", "scale", "momentum")
    for name, value in two["state"][0].items():
        if name.startswith(kept):
            torch.testing.assert_close(one["state"][0][name], value)


DAMAGES: list[tuple[str, Callable[[Tensor], Any], str]] = [
    ("momentum", Tensor.float, "momentum of .* must be one of torch.int8, got torch.float32"),
    ("momentum", Tensor.to_sparse, "momentum of .* must have all its numbers"),
    ("momentum_unit", lambda x: x * math.nan, "momentum_unit of .* must be finite"),
    ("portrait", lambda x: x[..., 1:], r"portrait of .* must have shape \(1, 1, 40, 40\), got"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), DAMAGES)
def test_damaged_codes_change_nothing(
    name: str, spoil: Callable[[Tensor], Any], message: str
) -> None:
    w = nn.Parameter(torch.zeros(40, 40))
    optimizer = Spectral([w], **EIGHT)
    w.grad = torch.randn(40, 40)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(optimizer.state_dict(bases=name != "portrait"))
    saved["state"][0][name] = spoil(saved["state"][0][name])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_same_state(optimizer.state_dict(), before)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"weight_decay": 0.1, "cautious_weight_decay": True}),
        (torch.bfloat16, {"root": 4.0}),
        (torch.float16, {"eigenvalues": "kronecker", "clip": 1.0}),
    ],
    ids=str,
)
def test_finite_gradients_leave_finite_weights_and_state(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    limits = torch.finfo(dtype)
    for extreme in EXTREMES.values():
        shapes = ((40, 32), (1500,), (2, 20, 32))
        weights = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        groups = [{"params": weights[:1], "fused": Fused(heads=2)}, {"params": weights[1:]}]
        optimizer = Spectral(groups, LR, **EIGHT, **options)
        for t in range(6):
            for w in weights:
                draw = torch.randn(w.shape, dtype=torch.float64)
                gradient = extreme(draw, t, limits.max, limits.smallest_normal * limits.eps)
                w.grad = gradient.clamp(-limits.max, limits.max).to(dtype)
            optimizer.step()
            if t == 3:
                optimizer.load_state_dict(optimizer.state_dict(bases=False))
            for w in weights:
                assert torch.isfinite(w).all()
                assert all(torch.isfinite(value).all() for value in optimizer.state[w].values())
