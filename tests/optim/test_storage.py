"""State in 8 bits, on the host, or without bases (more of these in `test_portrait`): what is lost,
and what is not.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigenstep import Spectral
from eigenstep.optim import storage
from eigenstep.optim.stacks import Stack

from .test_bounded import EXTREMES, LR, compare, moves, named_streams
from .test_contract import assert_same_state

EIGHT = {"state_dtype": torch.int8}
MATRICES = [(48, 32), (48, 32), (40, 100), (67, 71), (8, 4), (1100, 33), (2000,), (7,)]


def parameters(shapes: list[tuple[int, ...]] = MATRICES, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


def go(params: list[nn.Parameter], optimizer: Spectral, first: int, last: int) -> list[Tensor]:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step + 1)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach().clone() for param in params]


def stored(x: Tensor, name: str, step: int) -> Tensor:
    """Return what comes back of numbers that were packed."""
    state = storage.packed({name: torch.zeros_like(x)})
    storage.close(state, {name: x}, torch.full((len(x),), float(step)))
    return storage.opened(state, x.device)[name]


class TestCodes:
    @pytest.mark.parametrize("shape", [(3, 2, 32, 32), (2, 1, 2000), (1, 1, 37, 61)], ids=str)
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
        """Rounded to the nearest number, an average that changes by a thousandth would
        stand still.
        """
        kinds = (options, {"state_dtype": torch.float32})
        two, four = ([nn.Parameter(torch.zeros(32, 32))] for _ in kinds)
        (two_bytes, four_bytes) = (
            Spectral(p, betas=(0.0, 0.999), interval=1000, start=0.0, **o)
            for p, o in zip((two, four), kinds, strict=True)
        )
        go(two, two_bytes, 0, 20)
        go(four, four_bytes, 0, 20)
        for step in range(20, 520):  # gradients fade, and averages with them
            for param, optimizer in ((two, two_bytes), (four, four_bytes)):
                generator = torch.Generator().manual_seed(step)
                param[0].grad = 0.1 * torch.randn(32, 32, generator=generator)
                optimizer.step()
        found, expected = two_bytes.state[two[0]], four_bytes.state[four[0]]
        assert (found["second_moment"].dtype, expected["second_moment"].dtype) == (
            torch.bfloat16,
            torch.float32,
        )
        levels = [
            s["second_moment"].double().mean() * s["scale"].double().square()
            for s in (found, expected)
        ]
        assert (levels[0] / levels[1]).item() == pytest.approx(1.0, abs=0.02)

    def test_rounding_is_right_on_average_and_never_beyond_the_format(self) -> None:
        x = torch.logspace(-30, 38, 64 * 64, dtype=torch.float64).float().view(1, 1, 64, 64)
        x[..., 0, 0], x[..., -1, -1] = 0.0, torch.finfo(torch.float32).max
        kept = storage.rounded({"second_moment": torch.zeros_like(x)})
        assert kept["second_moment"].dtype == torch.bfloat16
        total = torch.zeros_like(x, dtype=torch.float64)
        for step in range(256):
            storage.close(kept, {"second_moment": x.clone()}, torch.tensor([float(step)]))
            found = storage.opened(kept, x.device)["second_moment"]
            assert found.isfinite().all()
            assert ((found - x).abs() <= x / 128).all()
            total += found
        inside = x < torch.finfo(torch.bfloat16).max
        assert torch.allclose((total / 256)[inside], x[inside].double(), rtol=1e-4, atol=0.0)

    def test_steps_are_those_of_float32(self) -> None:
        """But for roundings."""
        two, four = parameters(), parameters()
        moved = [
            torch.cat(
                [
                    (w - start).flatten()
                    for w, start in zip(go(params, made, 0, 40), parameters(), strict=True)
                ]
            )
            for params, made in (
                (two, Spectral(two)),
                (four, Spectral(four, state_dtype=torch.float32)),
            )
        ]
        assert torch.linalg.vector_norm(moved[0] - moved[1]) <= 0.01 * torch.linalg.vector_norm(
            moved[1]
        )

    @pytest.mark.parametrize("width", [256, 384, 768])
    def test_state_takes_16_bytes_a_weight(self, width: int) -> None:
        block = [
            (3 * width, width),
            (width, width),
            (4 * width, width),
            (width, 4 * width),
            (width,),
        ]
        count = sum(torch.Size(size).numel() for size in block)
        reports = Spectral(
            [nn.Parameter(torch.empty(size, device="meta")) for size in block]
        ).summary()
        assert sum(report.state_bytes for report in reports) <= 16 * count


@pytest.mark.parametrize("name", named_streams((2, 2), 0))
def test_steps_are_bounded(name: str) -> None:
    ours, adamw = compare(named_streams((36, 32), seed=0)[name], **EIGHT)
    assert ours.longest <= 3
    assert ours.total <= 3 * adamw.total


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.0, 0.95), (0.9, 0.95)], ids=str)
@pytest.mark.parametrize("structure", ["auto", "diagonal"])
def test_other_momenta(betas: tuple[float, float], structure: str) -> None:
    streams = named_streams((40, 32), 0)
    made = {"betas": betas, "weight_decay": 0.0, "structure": structure}
    for name in ("1, then 1e-6", "1 % of the entries", "spikes", "rows in turn"):
        ours, wide = (
            moves(lambda w, o=o: Spectral(w, LR, **made, **o), streams[name]) for o in (EIGHT, {})
        )
        assert ours.longest <= max(3, 1.3 * wide.longest), name
        assert ours.total <= max(0.1, 1.3 * wide.total, 0.2 * wide.way), name


def test_memory_of_usual_shapes() -> None:
    """Also told before the first step, and of weights that are nowhere."""
    width = 768
    block: list[tuple[int, ...]] = [(width, width)] * 4 + [
        (4 * width, width),
        (width, 4 * width),
        (4 * width,),
    ]
    shapes = {
        "vit": [(width, width), *block * 2, (1000, width)],
        "gpt": [(50304, width), *block * 2],
    }
    for model, sizes in shapes.items():
        count = sum(torch.Size(size).numel() for size in sizes)
        params = [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
        reports = Spectral(params, max_ratio=1.5, **EIGHT).summary()
        assert sum(report.state_bytes for report in reports) <= 6 * count, model


def test_small_ones_stay_as_they_were() -> None:
    wide, eight = ([nn.Parameter(torch.randn(s)) for s in ((8, 4), (7,))] for _ in range(2))
    for w, e in zip(wide, eight, strict=True):
        e.data.copy_(w)
    found = go(eight, Spectral(eight, basis_dtype=torch.float32, **EIGHT), 0, 5)
    for expected, w in zip(go(wide, Spectral(wide), 0, 5), found, strict=True):
        assert torch.equal(w, expected)


@pytest.mark.parametrize("options", [EIGHT, {"offload": True}, {**EIGHT, "offload": True}], ids=str)
@pytest.mark.parametrize("foreach", [None, False])
def test_checkpoints_go_on_with_the_same_bits(
    options: dict[str, Any], foreach: bool | None
) -> None:
    params = parameters()
    optimizer = Spectral(params, foreach=foreach, **options)
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


def test_on_the_host_nothing_changes() -> None:
    one, two = parameters(), parameters()
    expected = go(one, Spectral(one), 0, 5)
    for w, x in zip(go(two, Spectral(two, offload=True), 0, 5), expected, strict=True):
        assert torch.equal(w, x)


def test_gradients_that_come_and_go() -> None:
    """Stacks are arranged anew, and state goes with its parameters."""
    params = parameters()
    optimizer = Spectral(params, **EIGHT)
    go(params, optimizer, 0, 2)
    params[1].grad = None
    optimizer.step()
    go(params, optimizer, 2, 4)
    assert {own["step"].max().item() for own in optimizer.state.values()} == {4.0, 5.0}
    assert optimizer.state[params[1]]["momentum"].dtype == torch.int8


def test_parameters_that_change_rounds_take_their_state_along() -> None:
    """Ranks step large networks in rounds, and which one a parameter is in depends on what else has
    a gradient.
    """
    params = parameters()[:2]
    optimizer = Spectral(params)
    go(params, optimizer, 0, 1)
    (group,), (a, b) = optimizer.param_groups, params

    def rounds(*lists: list[Tensor]) -> None:
        for tag, some in enumerate(lists):
            for stack in optimizer._arranged(group, some, tag):
                assert isinstance(stack, Stack)
                stack.state["momentum"] += 1.0
                stack.state["turns"] += 1
                stack.turned()

    start = optimizer.state[b]["momentum"].clone()
    rounds([a], [b])
    rounds([b])
    rounds([a], [b])
    torch.testing.assert_close(optimizer.state[b]["momentum"], start + 3.0)
    assert optimizer._counts[b, 0] == optimizer.state[b]["turns"][0]


def test_what_cannot_be_is_refused() -> None:
    params = parameters()
    with pytest.raises(ValueError, match="basis_dtype must be None, float64, float32 or bfloat16"):
        Spectral(params, basis_dtype=torch.int8)
    with pytest.raises(ValueError, match="offload=False, which need no host"):
        Spectral(params, capturable=True, interval=1, nonfinite="ignore", offload=True)
    optimizer = Spectral(params, **EIGHT)
    go(params, optimizer, 0, 1)
    saved = optimizer.state_dict()
    saved["state"][0] = {**saved["state"][0], "momentum": saved["state"][0]["momentum"].float()}
    with pytest.raises(
        ValueError, match=r"momentum of group 0 #0 must be torch\.int8, got torch\.float32"
    ):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("sizes", [(1, 11), (11, 1), (1,) * 12], ids=str)
@pytest.mark.parametrize("bases", [True, False], ids=["bases", "no bases"])
def test_single_rows_among_fused_matrices(sizes: tuple[int, ...], bases: bool) -> None:
    """Such a row has no basis and no scale; a checkpoint of it is one of Spectral all the same."""
    w = nn.Parameter(torch.zeros(12, 4))
    optimizer = Spectral([w], split_sizes=sizes)
    w.grad = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    other = Spectral([w], split_sizes=sizes)
    other.load_state_dict(optimizer.state_dict(bases=bases))
    one, two = (each.state_dict(bases=bases) for each in (other, optimizer))
    if bases:
        assert_same_state(one, two)
    else:
        entries = [
            name
            for name in two["state"][0]
            if name.startswith(("step", "turns", "scale", "momentum"))
        ]
        torch.testing.assert_close(
            *({name: found["state"][0][name] for name in entries} for found in (one, two))
        )


DAMAGES: list[tuple[str, Callable[[Tensor], Any], str]] = [
    ("momentum", Tensor.short, "momentum of .* must be torch.int8, got torch.int16"),
    ("momentum", Tensor.float, "momentum of .* must be torch.int8, got torch.float32"),
    ("momentum", Tensor.to_sparse, "momentum of .* must have all its numbers"),
    (
        "second_moment",
        lambda x: x.view(torch.int8),
        "second_moment of .* must be torch.uint8, got torch.int8",
    ),
    (
        "second_moment",
        Tensor.tolist,
        r"second_moment of .* must have shape \(1, 1, 40, 40\), got \(\)",
    ),
    ("momentum_unit", Tensor.neg, "momentum_unit of .* must not be negative"),
    ("momentum_unit", lambda x: x * math.nan, "momentum_unit of .* must be finite"),
    (
        "second_moment_unit",
        lambda x: x[:, :1],
        r"second_moment_unit of .* must have shape \(1, 7\), got \(1, 1\)",
    ),
    ("portrait", lambda x: x * math.nan, "portrait of .* must be finite"),
    (
        "portrait",
        lambda x: x[..., 1:],
        r"portrait of .* must have shape \(1, 1, 40, 40\), got \(1, 1, 40, 39\)",
    ),
    (
        "portrait",
        Tensor.short,
        "portrait of .* must be a real floating-point tensor, got torch.int16",
    ),
]


@pytest.mark.parametrize(
    ("name", "spoil", "message", "bases"),
    [
        (*damage, bases)
        for damage in DAMAGES
        for bases in (True, False)
        if damage[0].startswith("momentum") or bases == damage[0].startswith("second")
    ],
)
@pytest.mark.parametrize("offload", [False, True], ids=["here", "on the host"])
def test_damaged_codes_change_nothing(
    name: str, spoil: Callable[[Tensor], Any], message: str, bases: bool, offload: bool
) -> None:
    w = nn.Parameter(torch.zeros(40, 40))
    optimizer = Spectral([w], state_dtype=torch.int8, offload=offload)
    w.grad = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    before, saved = (
        copy.deepcopy(optimizer.state_dict()),
        copy.deepcopy(optimizer.state_dict(bases=bases)),
    )
    saved["state"][0][name] = spoil(saved["state"][0][name])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_same_state(optimizer.state_dict(), before)


MODES: list[dict[str, Any]] = [
    EIGHT,
    {"offload": True, "state_dtype": torch.bfloat16},
    {**EIGHT, "offload": True, "weight_decay": 0.1, "cautious_weight_decay": True},
    {**EIGHT, "grafting": "adam", "root": 4.0},
    {**EIGHT, "eigenvalues": "kronecker", "clip": 1.0},
]


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_finite_gradients_leave_finite_weights_and_state(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    limits, generator = torch.finfo(dtype), torch.Generator().manual_seed(0)
    for extreme in EXTREMES.values():
        weights = [
            nn.Parameter(torch.zeros(shape, dtype=dtype))
            for shape in ((40, 32), (1500,), (2, 20, 32))
        ]
        optimizer = Spectral(
            [{"params": weights[:1], "num_heads": 2}, {"params": weights[1:]}], LR, **options
        )
        for t in range(6):
            for w in weights:
                draw = torch.randn(w.shape, generator=generator, dtype=torch.float64)
                gradient = extreme(draw, t, limits.max, limits.smallest_normal * limits.eps)
                w.grad = gradient.clamp(-limits.max, limits.max).to(dtype)
            optimizer.step()
            if t == 3:
                optimizer.load_state_dict(optimizer.state_dict(bases=False))
            for w in weights:
                assert torch.isfinite(w).all()
                assert all(torch.isfinite(value).all() for value in optimizer.state[w].values())
