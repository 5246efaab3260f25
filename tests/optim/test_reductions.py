"""Special settings are known methods; and the batched step is the core's one update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from eigenstep import Diagonal, Full, Kronecker, OuterProducts, Spectral, Turning
from eigenstep.core.step import (
    bounded,
    moore_penrose,
    quadratic,
    truncated_cayley,
    truncated_exp,
)
from eigenstep.core.update import update
from eigenstep.optim.batches import split

from .layouts import laid_out

LR = 0.01


def drive(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Feed gradients to the only parameter and return each change of it, divided by the learning
    rate.
    """
    parameter = optimizer.param_groups[0]["params"][0]
    changes = []
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = gradient.clone()
        optimizer.step()
        changes.append((before - parameter.detach()) / LR)
    return changes


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=torch.float64))


def gradients(*shape: int, steps: int = 40) -> Tensor:
    """Return gradients whose entries differ in size by orders of magnitude."""
    return (
        torch.randn(steps, *shape, dtype=torch.float64)
        * torch.randn(shape, dtype=torch.float64).mul(2).exp()
    )


def similar(*shape: int) -> Tensor:
    """Return gradients whose entries have about one size: damping says nothing beside them."""
    signs = torch.randn(40, *shape, dtype=torch.float64).sign()
    return signs * (0.5 + torch.rand(40, *shape, dtype=torch.float64))


PLAIN: dict[str, Any] = {
    "lr": LR,
    "betas": (0.9, 0.95),
    "damping": 0.0,
    "weight_decay": 0.0,
    "nesterov": 0.0,
    "grafting": False,
}
VECTOR: dict[str, Any] = {**PLAIN, "eigenvalues": "kronecker"}
"""By these eigenvalues, vectors follow the rule of matrices, with all its options."""
PAPER: dict[str, Any] = {"lr": LR, "weight_decay": 0.0, "damping": 1e-30, "clip": None}
"""Constant rates."""


class TestKnownMethods:
    @pytest.mark.parametrize(("shape", "beta1"), [((9,), 0.9), ((2, 3, 4), 0.0)], ids=str)
    def test_diagonal_is_adam(self, shape: tuple[int, ...], beta1: float) -> None:
        """With beta1 = 0 this is RMSprop with bias correction."""
        w = parameter(*shape)
        gs = gradients(*shape)
        twin = nn.Parameter(w.detach().clone())
        options: dict[str, Any] = {"lr": LR, "betas": (beta1, 0.95), "eps": 0.0}
        drive(Spectral([w], structure="diagonal", weight_decay=0.0, **options), gs)
        drive(torch.optim.Adam([twin], **options), gs)
        assert_close(w, twin, rtol=0, atol=1e-12)

    def test_nesterov_is_nadam(self) -> None:
        """After NAdam's warm-up of the momentum, which is over soon with this decay."""
        w, gs = parameter(9), gradients(9, steps=400)
        nesterov = drive(Spectral([w], **{**VECTOR, "nesterov": True}), gs)
        twin = torch.optim.NAdam(
            [nn.Parameter(w.detach().clone())], LR, (0.9, 0.95), eps=0.0, momentum_decay=1.0
        )
        assert_close(nesterov[-1], drive(twin, gs)[-1], rtol=1e-6, atol=1e-6)

    def test_weight_of_the_newest_gradient(self) -> None:
        """Quasi-hyperbolic momentum: a mean of two of Adam's steps, with and without momentum."""
        w = parameter(9)
        gs = similar(9)
        steps = {}
        for nesterov in (0.0, 0.2, 1.0):
            twin = nn.Parameter(w.detach().clone())
            steps[nesterov] = drive(Spectral([twin], **{**VECTOR, "nesterov": nesterov}), gs)
        for mixed, momentum, newest in zip(steps[0.2], steps[0.0], steps[1.0], strict=True):
            assert_close(mixed, 0.8 * momentum + 0.2 * newest, rtol=1e-9, atol=1e-9)
        twin = nn.Parameter(w.detach().clone())
        rms = torch.optim.Adam([twin], lr=LR, betas=(0.0, 0.95), eps=0.0)
        for newest, adam in zip(steps[1.0], drive(rms, gs), strict=True):
            assert_close(newest, adam, rtol=1e-9, atol=1e-9)

    def test_weight_decay_is_adamw(self) -> None:
        w = parameter(9)
        gs = similar(9)
        twin = nn.Parameter(w.detach().clone())
        drive(Spectral([w], **{**VECTOR, "weight_decay": 0.3}), gs)
        drive(torch.optim.AdamW([twin], lr=LR, betas=(0.9, 0.95), eps=0.0, weight_decay=0.3), gs)
        assert_close(w, twin, rtol=0, atol=1e-10)

    def test_diagonal_without_bias_correction_is_rmsprop(self) -> None:
        """Both start from the same second moment; torch starts it at 0, so the first gradient
        primes ours alike.
        """
        w, gs = parameter(9), gradients(9)
        optimizer = Spectral.paper([w], betas=(0.0, 0.95), **PAPER)
        second_moment = gs[0].square().mean()
        for g, change in zip(gs, drive(optimizer, gs), strict=True):
            second_moment = 0.95 * second_moment + 0.05 * g.square()
            assert_close(change, g / second_moment.sqrt(), rtol=1e-9, atol=1e-9)

    def test_decay_zero_is_adagrad(self) -> None:
        w, gs = parameter(9), gradients(9)
        optimizer = Spectral.paper([w], gamma=0.0, betas=(0.0, 0.5), **PAPER)
        total = 0.5 * gs.square().cumsum(0) + gs[0].square().mean()
        for g, sums, change in zip(gs, total, drive(optimizer, gs), strict=True):
            assert_close(change, g / sums.sqrt(), rtol=1e-9, atol=1e-9)

    def test_root_of_one_over_infinity_is_momentum(self) -> None:
        w, gs = parameter(4, 5), gradients(4, 5)
        twin = nn.Parameter(w.detach().clone())
        drive(Spectral.paper([w], root=1e12, exact=True, **PAPER), gs)
        drive(torch.optim.SGD([twin], lr=LR, momentum=0.9, dampening=0.9), [gs[0] * 0.1, *gs[1:]])
        assert_close(w, twin, rtol=0, atol=1e-6)

    def test_clip_limits_the_root_mean_square(self) -> None:
        w, gs = parameter(6, 4), gradients(6, 4)
        plain = drive(Spectral([nn.Parameter(w.detach().clone())], **PLAIN), gs)
        clipped = drive(Spectral([w], clip=0.7, **PLAIN), gs)
        sizes = torch.stack([step.square().mean().sqrt() for step in plain])
        assert (sizes > 0.7).any()
        assert (sizes < 0.7).any()
        for long, short, size in zip(plain, clipped, sizes, strict=True):
            assert_close(short, long * (0.7 / size).clamp(max=1.0), rtol=1e-8, atol=1e-10)


def read_matrix(state: dict[str, Tensor]) -> Kronecker:
    """Return the matrix that a parameter's state stands for, as one of the core's structures."""
    factors: list[Full | Diagonal] = []
    for axis in range(sum(name.startswith("eigs_") for name in state)):
        eigs = state[f"eigs_{axis}"][0].flatten()
        basis = state.get(f"basis_{axis}")
        factors.append(Diagonal(eigs) if basis is None else Full(torch.block_diag(*basis[0]), eigs))
    return Kronecker(state["scale"][0].square(), tuple(factors))


def blockwise(count: int, size: int, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a function of matrices one of block-diagonal matrices, for the first factor."""

    def of_blocks(*tensors: Tensor) -> Tensor:
        if len(tensors[0]) != count * size:
            return function(*tensors)
        results = []
        for start in range(0, count * size, size):
            block = slice(start, start + size)
            results.append(
                function(*(t[block] if t.ndim == 1 else t[block, block] for t in tensors))
            )
        return torch.block_diag(*results)

    return of_blocks


@pytest.mark.parametrize(
    ("rotation", "orthogonal"),
    [
        (bounded, quadratic),
        (partial(moore_penrose, gap=0.1), partial(truncated_cayley, cap=0.5)),
    ],
    ids=["bounded", "moore_penrose"],
)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((6, 4), {"max_ratio": None}),
        ((5,), {"structure": "full"}),
        ((12, 4), {"max_ratio": 1.0}),
        ((4, 12), {"max_ratio": 1.0}),
    ],
    ids=str,
)
def test_batches_learn_what_update_learns(
    shape: tuple[int, ...],
    options: dict[str, Any],
    rotation: Callable[..., Tensor],
    orthogonal: Callable[..., Tensor],
) -> None:
    """`eigenstep.update`, on one matrix at a time and by ordinary linear algebra, is the oracle."""
    plan = laid_out(shape, **options)
    (layout,) = plan.layouts
    w = parameter(*shape)
    gs = gradients(*shape, steps=12)
    optimizer = Spectral(
        [w],
        betas=(0.0, 0.9),
        interval=1,
        eigenvalues="kronecker",
        damping=1e-3,
        turning=Turning(rotation=rotation, map=orthogonal, rate=0.2),
        **options,
    )
    drive(optimizer, gs)
    events = torch.stack([split(plan, 0, g).flatten(0, 2) for g in gs])
    S = Kronecker.identity(events.shape[1:], dtype=torch.float64)
    S = Kronecker(events[0].square().mean(), S.factors)
    of_blocks = partial(blockwise, layout.blocks, layout.sizes[0])
    own = Turning(rotation=of_blocks(rotation), map=of_blocks(orthogonal))
    for number, event in enumerate(events, start=1):
        mean = S.scale * math.prod(factor.eigs.mean() for factor in S.factors)
        S = update(
            S,
            OuterProducts(event[None]),
            lr=min(1.0, 0.1 / (1 - 0.9**number)),  # averages that start as means
            turning=replace(own, rate=min(1.0, 0.2 / (1 - 0.8**number))),
            damping=1e-3 * mean,
            positive=truncated_exp,
        )
    expected = S.dense()
    error = (read_matrix(optimizer.state[w]).dense() - expected).abs().amax()
    assert error <= 1e-9 * expected.abs().amax()
