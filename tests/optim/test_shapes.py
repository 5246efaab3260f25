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
from eigenstep.optim.layout import plan

LR, STEPS = 0.01, 50
DEFAULT: dict[str, Any] = {"max_dim": 2048, "max_ratio": 2.0}
Cut = Callable[[Tensor], Sequence[Tensor]]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def correlated(shape: tuple[int, ...]) -> Callable[[], Tensor]:
    """Return what draws gradients whose last axis is far from isotropic."""
    mixing = random(shape[-1], shape[-1])
    return lambda: random(*shape) @ mixing


def distance(
    shape: tuple[int, ...], cut: Cut, together: dict[str, Any], alone: dict[str, Any]
) -> float:
    """Return how far the weights of one parameter, and of one for each of its parts, are at most
    from each other.
    """
    whole, gradient = nn.Parameter(random(*shape)), correlated(shape)
    parts = [nn.Parameter(part.clone()) for part in cut(whole.detach())]
    optimizers = Spectral([whole], LR, **together), Spectral(parts, LR, **alone)
    apart = 0.0
    for _ in range(STEPS):
        whole.grad = gradient()
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
            ((3, 6, 4), {"batch_dims": 1}),
            ((3, 4, 6), {"batch_dims": 1, "max_dim": 3}),
            ((3, 13, 5), {"batch_dims": 1}),
            ((2, 4, 3, 2), {"batch_dims": 1, "structure": "axes"}),
            ((3, 3, 2), {"batch_dims": 1, "structure": "full"}),
            (
                (3, 6, 4),
                {"batch_dims": 1, "eigenvalues": "kronecker", "residual": True, "grafting": "adam"},
            ),
            ((3, 5, 2, 2), {"batch_dims": 1, "clip": 0.5}),
            ((3, 20, 16), {}),
        ],
        ids=str,
    )
    def test_stacked(self, shape: tuple[int, ...], options: dict[str, Any]) -> None:
        alone = {name: value for name, value in options.items() if name != "batch_dims"}
        assert distance(shape, torch.unbind, options, alone) < 1e-12

    def test_stacked_twice(self) -> None:
        assert (
            distance((2, 3, 6, 4), lambda x: list(x.flatten(0, 1)), {"batch_dims": 2}, {}) < 1e-12
        )

    @pytest.mark.parametrize("sizes", [(4, 4, 4), (8, 4, 4), (6, 3, 3), (7, 1, 5)], ids=str)
    @pytest.mark.parametrize("dim", [0, 1])
    @pytest.mark.parametrize("options", [{}, {"max_dim": 3}], ids=str)
    def test_fused(self, sizes: tuple[int, ...], dim: int, options: dict[str, Any]) -> None:
        shape = (sum(sizes), 5) if dim == 0 else (5, sum(sizes))
        fused = {"split_sizes": sizes, "split_dim": dim, **options}
        assert distance(shape, lambda x: torch.split(x, sizes, dim), fused, options) < 1e-12

    @pytest.mark.parametrize(
        ("sizes", "heads"), [((12,), 4), ((8, 4), (4, 2)), ((8, 6), (2, 3))], ids=str
    )
    def test_heads(self, sizes: tuple[int, ...], heads: Any) -> None:
        """Also where keys have fewer heads than queries, or others."""
        counts = [heads] if isinstance(heads, int) else heads
        lengths = [
            size // count for size, count in zip(sizes, counts, strict=True) for _ in range(count)
        ]
        fused = {"split_sizes": sizes, "num_heads": heads}
        assert distance((sum(sizes), 5), lambda x: torch.split(x, lengths), fused, {}) < 1e-12

    def test_fused_experts(self) -> None:
        fused = {"batch_dims": 1, "split_sizes": [4, 4]}
        assert distance((3, 8, 5), lambda x: [y for e in x for y in e.chunk(2)], fused, {}) < 1e-12

    def test_what_is_fused_decides_what_is_an_embedding(self) -> None:
        """1536 rows of 32 would be one; three matrices of 512 are not."""
        sizes = (512, 512, 512)
        assert "times" in plan((1536, 32), split_sizes=sizes, **DEFAULT).describe()
        assert (
            distance((1536, 32), lambda x: torch.split(x, sizes), {"split_sizes": sizes}, {})
            < 1e-12
        )

    @pytest.mark.parametrize(
        ("shape", "count"), [((5,), 1), ((3, 4), 2), ((), 1), ((2, 3, 4), 5)], ids=str
    )
    @pytest.mark.parametrize("structure", ["auto", "full", "axes"])
    def test_where_all_axes_count_there_are_only_numbers(
        self, shape: tuple[int, ...], count: int, structure: str
    ) -> None:
        """Such as biases of experts, in the group of their weights: nothing is mixed across
        experts.
        """
        found = plan(shape, structure=structure, batch_dims=count, **DEFAULT)
        assert found.describe() == f"diag {torch.Size(shape).numel()}"

    def test_biases_of_a_group_stay_vectors(self) -> None:
        bias = nn.Parameter(random(12))
        bias.grad = random(12)
        optimizer = Spectral([bias], split_sizes=[4, 4, 4], num_heads=2)
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
            ((512, 256, 16), "4 blocks of 1024 x 512"),
            ((64, 32, 16, 16), "64 blocks of 128 x 64"),
            ((4, 64, 32), "4 times (64 x 32)"),
            ((4, 48, 16), "4 times (2 blocks of 24 x 16)"),
            ((512, 1024, 2048), "512 times (2048 x 1024)"),
        ],
        ids=str,
    )
    def test_experts_are_recognized_and_convolutions_are_not(
        self, shape: tuple[int, ...], structure: str
    ) -> None:
        assert plan(shape, **DEFAULT).describe() == structure

    def test_no_convolution_of_several_outputs_is_taken_for_experts(self) -> None:
        """Kernels up to 128, and outputs that are more than a quarter of it, or of the inputs."""
        for inputs, kernel in itertools.product(
            (1, 3, 16, 40, 48, 64, 100, 256, 1024), (1, 3, 7, 16, 20, 31, 64, 128)
        ):
            for outputs in (1, 2, 4, 16, 18, 32, 64, 300, 1024):
                if 4 * outputs > min(inputs, kernel):
                    assert plan((outputs, inputs, kernel), **DEFAULT) == plan(
                        (outputs, inputs, kernel), batch_dims=0, **DEFAULT
                    )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"split_sizes": [4, 4]}, "split_sizes must add up to the length 6 of axis 0"),
            ({"split_sizes": [4, 2], "num_heads": 4}, "num_heads must divide each of the parts"),
            ({"split_sizes": [4, 2], "num_heads": [2]}, "num_heads must divide each of the parts"),
            ({"split_sizes": [6, 0]}, "split_sizes must be None or positive"),
            ({"num_heads": True}, "num_heads must be None or positive"),
            ({"batch_dims": -1}, "batch_dims must be"),
            ({"split_dim": 2}, "split_dim must be 0 or 1"),
            ({"split_dim": 1, "split_sizes": [4, 4]}, "split_dim=1 needs matrices"),
            (
                {"structure": "full", "split_sizes": [3, 3]},
                'need structure="auto" or "kronecker", got "full"',
            ),
        ],
        ids=str,
    )
    def test_mistakes(self, options: dict[str, Any], message: str) -> None:
        shape = (6, 4, 2) if "needs" in message else (6, 4)
        with pytest.raises(ValueError, match=message):
            Spectral([nn.Parameter(torch.ones(shape))], **options)


class TestOrderOfAxes:
    """Long sides are cut so that blocks hold the longest axis whole, such as the channels of a
    convolution.
    """

    @pytest.mark.parametrize(
        ("shape", "last"),
        [
            ((8, 12, 3, 3), 1),
            ((4, 9, 5), 1),
            ((6, 3, 9), 2),
            ((4, 3, 5, 2), 2),
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
        assert (
            distance((3, 4, 6, 2, 2), cut, {"batch_dims": 1, "max_ratio": 1.0}, {"max_ratio": 1.0})
            < 1e-12
        )

    def test_steps_are_those_of_the_same_weights(self) -> None:
        """Layouts give back what they took, in its own order."""
        for shape in [(8, 12, 3, 3), (4, 9, 5), (5, 7, 2, 2)]:
            own, x = plan(shape, **DEFAULT), random(*shape)
            torch.testing.assert_close(
                own.join([own.split(x, at) for at in range(len(own.layouts))]), x, rtol=0, atol=0
            )


class TestUnevenSides:
    @pytest.mark.parametrize("shape", [(13, 4), (4, 13), (7, 7), (5, 3, 3), (11, 2)], ids=str)
    def test_equal_blocks_are_matrices_of_their_own(self, shape: tuple[int, ...]) -> None:
        """Blocks of one length share a factor, so the parts to compare with are found by the layout
        itself.
        """
        options: dict[str, Any] = {"max_dim": 4, "max_ratio": None}
        whole = plan(shape, **options)
        assert len(whole.layouts) > 1

        def cut(x: Tensor) -> list[Tensor]:
            matrices = x.reshape(whole.units, *whole.matrix) if whole.axis == 0 else None
            assert matrices is not None
            return [
                m[slice(*own.rows), slice(*own.cols)] for m in matrices for own in whole.layouts
            ]

        assert distance(shape, cut, options, options) < 1e-12

    @pytest.mark.parametrize("rows", [2053, 2048, 4099])
    def test_long_matrices_have_bases(self, rows: int) -> None:
        for layout in plan((rows, rows), **DEFAULT).layouts:
            assert layout.full == (True, True)
            assert min(layout.sizes) > 1000

    def test_cost_does_not_depend_on_divisibility(self) -> None:
        def summary(rows: int, structure: str) -> tuple[float, float]:
            (found,) = Spectral(
                [nn.Parameter(torch.empty(rows, 128, device="meta"))], structure=structure
            ).summary()
            return found.state_bytes, found.flops

        for structure in ("auto", "kronecker"):
            odd, even = summary(50257, structure), summary(50304, structure)
            assert all(abs(a - b) <= 0.01 * b for a, b in zip(odd, even, strict=True))

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
    @pytest.mark.parametrize("shapes", [[(9,)], [(4, 5), (), (7,), (2, 3, 4)]], ids=str)
    @pytest.mark.parametrize("maximize", [False, True])
    @pytest.mark.parametrize("kind", ["dense", "zeros", "rare rows", "missing"])
    @pytest.mark.parametrize("chunk", [3, 1 << 18])
    def test_is_adamw(
        self,
        shapes: list[tuple[int, ...]],
        maximize: bool,
        kind: str,
        chunk: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("eigenstep.optim.diagonal.CHUNK", chunk)
        ours = [nn.Parameter(random(*shape)) for shape in shapes]
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
        "options", [{"clip": 1e6}, {"lr": torch.tensor(LR, dtype=torch.float64)}], ids=str
    )
    def test_every_way_to_move_is_the_same(self, options: dict[str, Any]) -> None:
        """In place, or by steps that are made first: for a limit of their length, or rates on a
        device.
        """
        ours, theirs = (nn.Parameter(torch.ones(7, dtype=torch.float64)) for _ in range(2))
        optimizers = (
            Spectral([ours], **{"lr": LR, "betas": (0.9, 0.95), **options}),
            torch.optim.AdamW([theirs], LR, (0.9, 0.95)),
        )
        for _ in range(STEPS):
            ours.grad = random(7)
            theirs.grad = ours.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        assert (ours - theirs).abs().max() < 1e-12

    def test_capturable_steps_are_the_same(self) -> None:
        ours, theirs = (nn.Parameter(torch.ones(7, dtype=torch.float64)) for _ in range(2))
        captured = Spectral([ours], LR, capturable=True, interval=1, nonfinite="ignore")
        plain = Spectral([theirs], LR)
        for _ in range(STEPS):
            ours.grad = random(7)
            theirs.grad = ours.grad.clone()
            captured.step()
            plain.step()
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
