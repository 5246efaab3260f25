"""Special settings are known methods; and the batched kernel is the core's one update, parameter by
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from eigenstep import Diagonal, Full, Kronecker, OuterProducts, Spectral
from eigenstep.core.step import (
    Turning,
    bounded,
    cayley,
    exp,
    moore_penrose,
    truncated_cayley,
    truncated_exp,
)
from eigenstep.core.update import update
from eigenstep.optim.layout import plan

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


PLAIN: dict[str, Any] = {
    "grafting": None,
    "lr": LR,
    "betas": (0.9, 0.95),
    "damping": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "start": 1.0,
    "maps": "exact",
}


VECTOR: dict[str, Any] = {
    **PLAIN,
    "maps": "quadratic",
    "eigenvalues": "kronecker",
    "relative_damping": False,
}
VECTOR["damping"] = 1e-30
"""By these eigenvalues, vectors follow the paper's rule as matrices do, with all its options."""


class TestKnownMethods:
    @pytest.mark.parametrize("shape", [(), (9,), (4, 5), (2, 3, 4)], ids=str)
    @pytest.mark.parametrize("beta1", [0.9, 0.0])
    def test_diagonal_is_adam(self, shape: tuple[int, ...], beta1: float) -> None:
        """With beta1 = 0 this is RMSprop with bias correction."""
        w, gs = parameter(*shape), gradients(*shape)
        twin = nn.Parameter(w.detach().clone())
        drive(
            Spectral(
                [w], structure="diagonal", lr=LR, betas=(beta1, 0.95), eps=0.0, weight_decay=0.0
            ),
            gs,
        )
        drive(torch.optim.Adam([twin], lr=LR, betas=(beta1, 0.95), eps=0.0), gs)
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
        w, gs = parameter(9), gradients(9)
        steps = {}
        for nesterov in (0.0, 0.2, 1.0):
            twin = nn.Parameter(w.detach().clone())
            steps[nesterov] = drive(Spectral([twin], **{**VECTOR, "nesterov": nesterov}), gs)
        for mixed, momentum, newest in zip(steps[0.2], steps[0.0], steps[1.0], strict=True):
            assert_close(mixed, 0.8 * momentum + 0.2 * newest, rtol=1e-9, atol=1e-9)
        rms = torch.optim.Adam(
            [nn.Parameter(w.detach().clone())], lr=LR, betas=(0.0, 0.95), eps=0.0
        )
        for newest, adam in zip(steps[1.0], drive(rms, gs), strict=True):
            assert_close(newest, adam, rtol=1e-9, atol=1e-9)

    def test_weight_decay_is_adamw(self) -> None:
        w, gs = parameter(9), gradients(9)
        twin = nn.Parameter(w.detach().clone())
        drive(Spectral([w], **{**VECTOR, "weight_decay": 0.3}), gs)
        drive(torch.optim.AdamW([twin], lr=LR, betas=(0.9, 0.95), eps=0.0, weight_decay=0.3), gs)
        assert_close(w, twin, rtol=0, atol=1e-10)

    def test_diagonal_without_bias_correction_is_rmsprop(self) -> None:
        """Both start from the same second moment; torch starts it at 0, so the first gradient
        primes ours alike.
        """
        w, gs = parameter(9), gradients(9)
        optimizer = Spectral([w], **{**VECTOR, "betas": (0.0, 0.95), "start": 0.0})
        second_moment = gs[0].square().mean()
        for g, change in zip(gs, drive(optimizer, gs), strict=True):
            second_moment = 0.95 * second_moment + 0.05 * g.square()
            assert_close(change, g / second_moment.sqrt(), rtol=1e-9, atol=1e-9)

    def test_decay_zero_is_adagrad(self) -> None:
        w, gs = parameter(9), gradients(9)
        optimizer = Spectral([w], decay=0.0, **{**VECTOR, "betas": (0.0, 0.5), "start": 0.0})
        total = 0.5 * gs.square().cumsum(0) + gs[0].square().mean()
        for g, sums, change in zip(gs, total, drive(optimizer, gs), strict=True):
            assert_close(change, g / sums.sqrt(), rtol=1e-9, atol=1e-9)

    def test_root_of_one_over_infinity_is_momentum(self) -> None:
        w, gs = parameter(4, 5), gradients(4, 5)
        twin = nn.Parameter(w.detach().clone())
        drive(Spectral([w], root=1e12, **{**PLAIN, "start": 0.0}), gs)
        drive(torch.optim.SGD([twin], lr=LR, momentum=0.9, dampening=0.9), [gs[0] * 0.1, *gs[1:]])
        assert_close(w, twin, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("shape", [(9,), (6, 4)], ids=str)
    @pytest.mark.parametrize("grafting", ["adam", "rms"])
    def test_grafting_takes_the_size_and_keeps_the_direction(
        self, grafting: str, shape: tuple[int, ...]
    ) -> None:
        w, gs = parameter(*shape), gradients(*shape)
        # With "exact", eigenvalues would never forget outliers such as these.
        options = {**(VECTOR if len(shape) == 1 else PLAIN), "maps": cayley}
        grafted = drive(Spectral([w], **{**options, "grafting": grafting}), gs)
        plain = drive(Spectral([nn.Parameter(w.detach().clone())], **options), gs)
        betas = (0.9 if grafting == "adam" else 0.0, 0.95)
        sizes = drive(
            torch.optim.Adam([nn.Parameter(w.detach().clone())], lr=LR, betas=betas, eps=0.0), gs
        )
        for ours, direction, size in zip(grafted, plain, sizes, strict=True):
            assert_close(ours.norm(), size.norm(), rtol=1e-7, atol=0)
            assert_close(ours / ours.norm(), direction / direction.norm(), rtol=0, atol=1e-7)

    @pytest.mark.parametrize("root", [1.0, 4.0])
    @pytest.mark.parametrize("grafting", ["adam", "rms"])
    def test_vectors_with_grafting_are_adam_whatever_the_root(
        self, root: float, grafting: str
    ) -> None:
        w, gs = parameter(9), gradients(9)
        twin = nn.Parameter(w.detach().clone())
        drive(Spectral([w], root=root, **{**PLAIN, "grafting": grafting, "eps": 0.0}), gs)
        drive(torch.optim.Adam([twin], lr=LR, betas=(0.9, 0.95), eps=0.0), gs)
        assert_close(w, twin, rtol=0, atol=1e-12)

    def test_grafting_survives_rows_without_gradient(self) -> None:
        """Rows of zeros, as in embeddings: the momentum there is rounding noise, and must not
        count.
        """
        w = nn.Parameter(torch.randn(16, 8))
        gs = torch.randn(30, 16, 8)
        gs[:, 8:] = 0
        optimizer = Spectral([w], **{**PLAIN, "grafting": "adam"})
        twin = torch.optim.Adam(
            [nn.Parameter(w.detach().clone())], lr=LR, betas=(0.9, 0.95), eps=1e-30
        )
        for ours, size in zip(drive(optimizer, gs), drive(twin, gs), strict=True):
            assert_close(ours.norm(), size.norm(), rtol=1e-2, atol=0)

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


LAYOUT: dict[str, Any] = {"structure": "kronecker", "max_dim": 99, "max_ratio": None}


class TestCore:
    """`eigenstep.update` on one matrix at a time, by ordinary linear algebra, is the kernel's
    oracle.
    """

    @pytest.mark.parametrize("rotation", ["bounded", "moore_penrose"])
    @pytest.mark.parametrize("maps", ["exact", "truncated"])
    @pytest.mark.parametrize("residual", [False, True])
    @pytest.mark.parametrize(
        ("shape", "options"),
        [
            ((6, 4), {}),
            ((5,), {"structure": "full"}),
            ((3, 4, 2), {"structure": "axes"}),
            ((3, 4, 2), {"structure": "axes", "max_dim": 3}),
            ((2, 3, 2, 2), {"structure": "axes"}),
            ((12, 4), {"max_ratio": 1.0}),
            ((4, 12), {"max_ratio": 1.0}),
        ],
        ids=str,
    )
    def test_kernel_learns_what_update_learns(
        self,
        shape: tuple[int, ...],
        options: dict[str, Any],
        residual: bool,
        maps: str,
        rotation: str,
    ) -> None:
        whole = plan(shape, **{**LAYOUT, **options})
        (layout,) = whole.layouts
        w, gs = parameter(*shape), gradients(*shape, steps=12)
        optimizer = Spectral(
            [w],
            lr=LR,
            betas=(0.0, 0.9),
            basis_lr=0.2,
            start=0.0,
            interval=1,
            damping=1e-3,
            relative_damping=False,
            rotation=rotation,
            maps=maps,
            eigenvalues="kronecker",
            residual=residual,
            **{**LAYOUT, **options},
        )
        drive(optimizer, gs)

        def blockwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            """Make a function of matrices one of block-diagonal matrices, for the first factor."""

            def of_blocks(*tensors: Tensor) -> Tensor:
                count = layout.blocks if len(tensors[0]) == layout.blocks * layout.sizes[0] else 1
                cut = [t.chunk(count) for t in tensors]
                squares = [
                    [part.chunk(count, -1)[i] if part.ndim == 2 else part for part in parts]
                    for i, parts in enumerate(zip(*cut, strict=True))
                ]
                return torch.block_diag(*[function(*block) for block in squares])

            return of_blocks

        turn = {"bounded": bounded, "moore_penrose": partial(moore_penrose, gap=0.1)}[rotation]
        orthogonal = {"exact": cayley, "truncated": partial(truncated_cayley, cap=0.5)}[maps]
        events = torch.stack([whole.split(g, 0).flatten(0, 2) for g in gs])
        kinds = ["full" if full else "diagonal" for full in layout.full]
        S = Kronecker.identity(events.shape[1:], kinds=kinds, dtype=torch.float64)
        S = Kronecker(events[0].square().mean(), S.factors)
        S = S.with_residual() if residual else S
        for event in events:
            S = update(
                S,
                OuterProducts(event[None]),
                lr=0.1,
                turning=Turning(rate=0.2, rotation=blockwise(turn), map=blockwise(orthogonal)),
                damping=1e-3,
                positive=exp if maps == "exact" else truncated_exp,
            )
        expected = S.dense()
        error = (read_matrix(optimizer.state[w]).dense() - expected).abs().amax()
        assert error <= 1e-9 * expected.abs().amax()
