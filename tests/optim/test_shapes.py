"""One parameter that holds several matrices steps exactly as these would; whatever its sides,
matrices have bases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eigenstep import Spectral
from eigenstep.optim import Fused

from .layouts import laid_out

LR = 0.01
STEPS = 20
Cut = Callable[[Tensor], Sequence[Tensor]]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def distance(
    shape: tuple[int, ...], cut: Cut, together: dict[str, Any], alone: dict[str, Any]
) -> float:
    """Return how far one parameter's weights and those of its parts are at most apart."""
    whole = nn.Parameter(random(*shape))
    mixing = random(shape[-1], shape[-1])  # the last axis is far from isotropic
    parts = [nn.Parameter(part.clone()) for part in cut(whole.detach())]
    optimizers = Spectral([whole], LR, **together), Spectral(parts, LR, **alone)
    apart = 0.0
    for _ in range(STEPS):
        whole.grad = random(*shape) @ mixing
        for part, own in zip(parts, cut(whole.grad), strict=True):
            part.grad = own.clone()
        for optimizer in optimizers:
            optimizer.step()
        for part, own in zip(parts, cut(whole.detach()), strict=True):
            apart = max(apart, (part.detach() - own).abs().max().item())
    return apart


class TestMatricesOfTheirOwn:
    @pytest.mark.parametrize(
        ("shape", "options"),
        [
            ((3, 4, 6), {"max_dim": 3}),
            ((3, 13, 5), {}),
            ((3, 3, 2), {"structure": "full"}),
            ((3, 6, 4), {"eigenvalues": "kronecker"}),
            ((3, 5, 2, 2), {"clip": 0.5}),
        ],
        ids=str,
    )
    def test_stacked(self, shape: tuple[int, ...], options: dict[str, Any]) -> None:
        together = {**options, "fused": Fused(batch_dims=1)}
        assert distance(shape, torch.unbind, together, options) < 1e-12

    def test_stacked_without_being_told(self) -> None:
        assert distance((3, 20, 16), torch.unbind, {}, {}) < 1e-12

    def test_stacked_twice(self) -> None:
        together = {"fused": Fused(batch_dims=2)}
        assert distance((2, 3, 6, 4), lambda x: list(x.flatten(0, 1)), together, {}) < 1e-12

    @pytest.mark.parametrize("sizes", [(4, 4, 4), (6, 3, 3), (7, 1, 5)], ids=str)
    @pytest.mark.parametrize("axis", [0, 1])
    def test_fused(self, sizes: tuple[int, ...], axis: int) -> None:
        shape = (sum(sizes), 5) if axis == 0 else (5, sum(sizes))
        for options in ({}, {"max_dim": 3}):
            fused = {"fused": Fused(sizes, axis=axis), **options}
            assert distance(shape, lambda x: torch.split(x, sizes, axis), fused, options) < 1e-12

    @pytest.mark.parametrize(
        ("sizes", "heads", "lengths"),
        [((12,), 4, [3] * 4), ((8, 4), (4, 2), [2] * 6), ((8, 6), (2, 3), [4, 4, 2, 2, 2])],
        ids=str,
    )
    def test_heads(self, sizes: tuple[int, ...], heads: Any, lengths: list[int]) -> None:
        """Also where keys have fewer heads than queries, or others."""
        fused = {"fused": Fused(sizes, heads)}
        assert distance((sum(sizes), 5), lambda x: torch.split(x, lengths), fused, {}) < 1e-12

    def test_fused_experts(self) -> None:
        fused = {"fused": Fused([4, 4], batch_dims=1)}
        assert distance((3, 8, 5), lambda x: [y for e in x for y in e.chunk(2)], fused, {}) < 1e-12

    def test_what_is_fused_decides_what_is_an_embedding(self) -> None:
        """1536 rows of 32 would be one; three matrices of 512 are not."""
        assert laid_out((1536, 32)).describe().startswith("diag")
        assert laid_out((1536, 32), fused=Fused((512, 512, 512))).describe().startswith("3 times")

    @pytest.mark.parametrize(
        ("shape", "count"), [((5,), 1), ((3, 4), 2), ((), 1), ((2, 3, 4), 5)], ids=str
    )
    @pytest.mark.parametrize("structure", ["auto", "full"])
    def test_where_all_axes_count_there_are_only_numbers(
        self, shape: tuple[int, ...], count: int, structure: str
    ) -> None:
        """Such as biases of experts, in their weights' group: nothing is mixed across experts."""
        plan = laid_out(shape, structure=structure, fused=Fused(batch_dims=count))
        assert plan.describe() == f"diag {torch.Size(shape).numel()}"

    def test_biases_of_a_group_stay_vectors(self) -> None:
        bias = nn.Parameter(random(12))
        bias.grad = random(12)
        optimizer = Spectral([bias], fused=Fused([4, 4, 4], 2))
        optimizer.step()
        assert optimizer.summary()[0].structure == "diag 12"

    @pytest.mark.parametrize(
        ("shape", "structure"),
        [
            ((8, 3072, 768), "8 times (2 blocks of 1536 x 768)"),
            ((1, 197, 768), "2 blocks of 384 x 197"),
            ((1, 64, 5), "diag 320"),
            ((64, 32, 3), "96 x 64"),
            ((768, 48, 128), "4 blocks of 1536 x 768"),
            ((4, 64, 32), "4 times (64 x 32)"),
            ((4, 48, 16), "4 times (2 blocks of 24 x 16)"),
            ((512, 1024, 2048), "512 times (2048 x 1024)"),
        ],
        ids=str,
    )
    def test_experts_are_recognized_and_convolutions_are_not(
        self, shape: tuple[int, ...], structure: str
    ) -> None:
        assert laid_out(shape, max_dim=2048).describe() == structure

    def test_no_convolution_of_several_outputs_is_taken_for_experts(self) -> None:
        """Kernels up to 128, and outputs that are more than a quarter of it, or of the inputs."""
        lengths = itertools.product((1, 16, 40, 64, 100, 256), (1, 3, 16, 20, 64, 128))
        for inputs, kernel in lengths:
            for outputs in (1, 2, 4, 16, 18, 64, 300):
                if 4 * outputs > min(inputs, kernel):
                    shape = (outputs, inputs, kernel)
                    assert laid_out(shape) == laid_out(shape, fused=Fused(batch_dims=0))

    @pytest.mark.parametrize(
        ("fused", "message"),
        [
            ({"sizes": [4, 4]}, "sizes of Fused must add up to the length 6 of axis 0"),
            ({"sizes": [4, 2], "heads": 4}, "heads of Fused must divide each of the parts"),
            ({"sizes": [4, 2], "heads": [2]}, "heads of Fused must divide each of the parts"),
            ({"sizes": [6, 0]}, "sizes of Fused must be None or positive"),
            ({"heads": True}, "heads of Fused must be None or positive"),
            ({"batch_dims": -1}, "batch_dims of Fused must be"),
            ({"axis": 2}, "axis of Fused must be 0 or 1"),
        ],
        ids=str,
    )
    def test_mistakes(self, fused: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Spectral([nn.Parameter(torch.ones(6, 4))], fused=Fused(**fused))

    def test_what_cannot_be_cut(self) -> None:
        with pytest.raises(ValueError, match=r"Fused\(axis=1\) needs matrices"):
            laid_out((6, 4, 2), fused=Fused([4, 4], axis=1))
        with pytest.raises(ValueError, match='need structure="auto" or "kronecker", got "full"'):
            laid_out((6, 4), structure="full", fused=Fused([3, 3]))


class TestOrderOfAxes:
    """Long sides are cut so that blocks hold the longest axis whole, such as the channels of a
    convolution.
    """

    @pytest.mark.parametrize(
        ("shape", "last"),
        [
            ((8, 12, 3, 3), 1),
            ((6, 3, 9), 2),
            ((4, 6, 6), 2),
            ((3, 2, 2, 7, 3), 3),
        ],
        ids=str,
    )
    def test_is_that_of_a_matrix(self, shape: tuple[int, ...], last: int) -> None:
        options = {"structure": "kronecker", "max_ratio": 1.0}
        cut: Cut = lambda x: [x.movedim(last, -1).flatten(1)]  # noqa: E731
        assert distance(shape, cut, options, options) == 0

    def test_stacked(self) -> None:
        cut: Cut = lambda x: [member.movedim(1, -1).flatten(1) for member in x]  # noqa: E731
        alone = {"max_ratio": 1.0}
        together = {"fused": Fused(batch_dims=1), **alone}
        assert distance((3, 4, 6, 2, 2), cut, together, alone) < 1e-12


class TestUnevenSides:
    @pytest.mark.parametrize("shape", [(4, 13), (7, 7), (5, 3, 3), (11, 2)], ids=str)
    def test_equal_blocks_are_matrices_of_their_own(self, shape: tuple[int, ...]) -> None:
        """Blocks of one length share a factor: the layout says which parts to compare with."""
        options: dict[str, Any] = {"max_dim": 4, "max_ratio": None}
        plan = laid_out(shape, **options)
        assert len(plan.layouts) > 1
        assert plan.axis == 0

        def cut(x: Tensor) -> list[Tensor]:
            parts = []
            for matrix in x.reshape(plan.units, *plan.matrix):
                for layout in plan.layouts:
                    parts.append(matrix[slice(*layout.rows), slice(*layout.cols)])
            return parts

        assert distance(shape, cut, options, options) < 1e-12

    @pytest.mark.parametrize("structure", ["auto", "kronecker"])
    def test_cost_does_not_depend_on_divisibility(self, structure: str) -> None:
        reports = []
        for rows in (50257, 50304):
            table = nn.Parameter(torch.empty(rows, 128, device="meta"))
            reports += Spectral([table], structure=structure).summary()
        odd, even = reports
        assert abs(odd.state_bytes - even.state_bytes) <= 0.01 * even.state_bytes
        assert abs(odd.flops - even.flops) <= 0.01 * even.flops

    @pytest.mark.parametrize("structure", ["auto", "kronecker"])
    def test_padding_changes_nothing_that_matters(self, structure: str) -> None:
        """A prime number of rows, and one row more that is never used: the share that padding
        50,257 to 50,304 adds.
        """
        losses = []
        for rows in (1031, 1032):
            generator = torch.Generator().manual_seed(0)
            target = torch.randn(1031, 32, generator=generator) @ torch.randn(
                32, 32, generator=generator
            )
            table = nn.Parameter(torch.zeros(rows, 32))
            optimizer = Spectral([table], 0.1, weight_decay=0.0, structure=structure)
            for _ in range(60):
                seen = torch.randint(1031, (400,), generator=generator)
                optimizer.zero_grad()
                (table[seen] - target[seen]).square().mean().backward()
                optimizer.step()
            losses.append((table[:1031] - target).square().mean().item())
        assert losses[0] == pytest.approx(losses[1], rel=0.01)
        assert losses[0] < 0.8 * target.square().mean().item()


class TestDiagonal:
    @pytest.mark.parametrize("maximize", [False, True])
    @pytest.mark.parametrize("kind", ["dense", "zeros", "rare rows", "missing"])
    @pytest.mark.parametrize("chunk", [3, 1 << 18])
    def test_is_adamw(
        self, maximize: bool, kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("eigenstep.optim.batches.CHUNK", chunk)
        ours = [nn.Parameter(random(*shape)) for shape in [(4, 5), (), (7,), (2, 3, 4)]]
        theirs = [nn.Parameter(w.detach().clone()) for w in ours]
        options: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.97), "eps": 1e-6, "weight_decay": 0.1}
        spectral = Spectral(ours, structure="diagonal", maximize=maximize, **options)
        adamw = torch.optim.AdamW(theirs, foreach=True, maximize=maximize, **options)
        for step in range(STEPS):
            for at, (w, twin) in enumerate(zip(ours, theirs, strict=True)):
                gradient = random(*w.shape)
                if kind == "zeros" and step % 3:
                    gradient.zero_()
                if kind == "rare rows" and w.ndim:
                    gradient[torch.rand(len(w)) > 0.1] = 0
                missing = kind == "missing" and (step + at) % 3 == 0
                w.grad, twin.grad = (None, None) if missing else (gradient, gradient.clone())
            spectral.step()
            adamw.step()
            for w, twin in zip(ours, theirs, strict=True):
                assert (w - twin).abs().max() < 1e-12

    @pytest.mark.parametrize(
        "options",
        [
            {"clip": 1e6},
            {"lr": torch.tensor(LR, dtype=torch.float64)},
            {"capturable": True, "interval": 1, "nonfinite": "ignore"},
        ],
        ids=str,
    )
    def test_every_way_to_move_is_the_same(self, options: dict[str, Any]) -> None:
        """At once, or by steps that are made first, or counted on a device."""
        ours = nn.Parameter(torch.ones(7, dtype=torch.float64))
        theirs = nn.Parameter(torch.ones(7, dtype=torch.float64))
        spectral = Spectral([ours], **{"lr": LR, "betas": (0.9, 0.95), **options})
        adamw = torch.optim.AdamW([theirs], LR, (0.9, 0.95))
        for _ in range(STEPS):
            ours.grad = random(7)
            theirs.grad = ours.grad.clone()
            spectral.step()
            adamw.step()
        assert (ours - theirs).abs().max() < 1e-12

    def test_embeddings_are_diagonal(self) -> None:
        text = Spectral([nn.Parameter(torch.empty(50_000, 768, device="meta"))]).summary()[0]
        assert text.structure == f"diag {50_000 * 768}"
        assert text.flops == 0
        assert text.state_bytes <= 8 * 50_000 * 768 + 1024

    def test_huge_gradients_do_not_freeze(self) -> None:
        w = nn.Parameter(torch.zeros(3))
        optimizer = Spectral([w], LR)
        w.grad = torch.full((3,), 1e30)
        optimizer.step()
        w.grad = torch.ones(3)
        before = w.detach().clone()
        for _ in range(2000):
            optimizer.step()
        assert torch.isfinite(w).all()
        assert (w - before).abs().min() > LR


def test_flattened_parameters_are_noticed() -> None:
    flat = nn.Parameter(torch.zeros(600_000))
    with pytest.warns(UserWarning, match=r"600,000 entries .* FSDP2"):
        Spectral([nn.Parameter(torch.zeros(3)), flat])


def test_long_vectors_that_are_meant_are_fine(recwarn: pytest.WarningsRecorder) -> None:
    Spectral([nn.Parameter(torch.zeros(600_000))], structure="diagonal")
    Spectral([nn.Parameter(torch.zeros(50_000)), nn.Parameter(torch.zeros(1000, 1000))])
    assert not recwarn.list
