"""Hiera (Ryali et al., 2023), a hierarchical vision transformer of plain blocks.

Each stage after the first begins by merging squares of 2 × 2 tokens into one of twice the width: in
the attention, the merged token's query is the maximum of the four queries ("query pooling"). In the
early stages, where tokens are many, a token sees only its own mask unit: a square of tokens that
merging turns into a single token in the last stage.

Tokens are sorted once, so that the four that will merge always stand side by side, and so do all
tokens of a mask unit. Merging and attention within units are then a matter of reshaping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..console import UserError
from .transformers import initialize


def merging_order(rows: int, columns: int, merges: int) -> Tensor:
    """Sort a grid of tokens for merging: unit by unit, then quarter by quarter.

    Args:
        rows: Rows of the grid, a multiple of 2^merges.
        columns: Columns of the grid, a multiple of 2^merges.
        merges: How often 2 × 2 tokens will be merged; a unit has 2^merges × 2^merges tokens.
    """
    halves = [2] * merges
    side = 2**merges
    grid = torch.arange(rows * columns).reshape(rows // side, *halves, columns // side, *halves)
    # The binary digits of row and column take turns, those that count most first.
    turns = [axis for level in range(merges + 1) for axis in (level, merges + 1 + level)]
    return grid.permute(turns).flatten()


def merge(tokens: Tensor) -> Tensor:
    """Replace each four neighbors along the last axis but one by their maximum."""
    *rest, length, width = tokens.shape
    return tokens.reshape(*rest, length // 4, 4, width).amax(dim=-2)


class UnitAttention(nn.Module):
    """Multi-head self-attention within units, with query pooling where the width grows."""

    def __init__(self, width_in: int, width: int, heads: int, units: int) -> None:
        """Set up heads for tokens in `units` equal parts, which do not see each other."""
        super().__init__()
        self.heads = heads
        self.units = units
        self.merges = width != width_in
        self.query, self.key, self.value = (nn.Linear(width_in, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens, batch × length × width."""
        # Heads as one more axis, units as so many more entries of the batch: (batch · units) ×
        # heads × length × rest.
        q, k, v = (
            layer(x)
            .unflatten(1, (self.units, -1))
            .flatten(0, 1)
            .unflatten(-1, (self.heads, -1))
            .transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(merge(q) if self.merges else q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(len(x), -1, self.out.in_features))
        return out


class UnitBlock(nn.Module):
    """A pre-norm transformer block that merges tokens if its width grows."""

    def __init__(self, width_in: int, width: int, heads: int, units: int) -> None:
        """Set up one layer from width `width_in` to width `width`."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width_in), nn.LayerNorm(width)
        self.attention = UnitAttention(width_in, width, heads, units)
        self.skip = nn.Linear(width_in, width) if width != width_in else None
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        normed = self.norm1(x)
        x = (x if self.skip is None else merge(self.skip(normed))) + self.attention(normed)
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.norm2(x))))
        return out


class Hiera(nn.Module):
    """Overlapping patches, stages of blocks, average over the tokens, linear head."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        *,
        patch: int = 2,
        width: int = 32,
        depths: Sequence[int] = (1, 1, 2),
        heads: int = 1,
        local_stages: int = 2,
        seed: int = 0,
    ) -> None:
        """Build the network.

        Args:
            shape: Channels, height and width of a picture.
            classes: How many classes there are.
            patch: Distance between neighboring patches, which are squares of side 2·patch − 1.
                Height and width must be multiples of patch · 2^(stages − 1).
            width: Length of a token in the first stage; it doubles from stage to stage.
            depths: Number of blocks in each stage.
            heads: Attention heads in the first stage; they double too.
            local_stages: In so many stages a token sees only its own mask unit.
            seed: Decides the initial weights.
        """
        super().__init__()
        channels, *sides = shape
        merges = len(depths) - 1
        if not depths or min(depths) < 1:
            raise UserError(f"depths must name at least one block for each stage, got {depths}")
        if any(side % (patch * 2**merges) for side in sides):
            raise UserError(
                "height and width must be multiples of patch · 2^(stages − 1) = "
                f"{patch * 2**merges}, "
                f"got {sides[0]} × {sides[1]}"
            )
        if width % heads:
            raise UserError(
                f"width must be a multiple of heads, got width {width} and {heads} heads"
            )
        self.patch = patch
        rows, columns = (side // patch for side in sides)
        units = (rows * columns) // 4**merges
        self.embed = nn.Linear(channels * (2 * patch - 1) ** 2, width)
        self.positions = nn.Parameter(torch.empty(rows * columns, width))
        self.register_buffer("order", merging_order(rows, columns, merges), persistent=False)
        blocks = []
        for stage, depth in enumerate(depths):
            for number in range(depth):
                merging = stage > 0 and number == 0
                # A block that merges still has the keys of the stage before, too many for global
                # attention to be cheap.
                local = stage - merging < local_stages
                growth = 2**stage
                blocks.append(
                    UnitBlock(
                        width * growth // (2 if merging else 1),
                        width * growth,
                        heads * growth,
                        units if local else 1,
                    )
                )
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width * 2**merges)
        self.head = nn.Linear(width * 2**merges, classes)
        initialize(self, sum(depths), seed)

    def forward(self, pictures: Tensor) -> Tensor:
        """Turn pictures, batch × channels × height × width, into logits, batch × classes."""
        patches = F.unfold(
            pictures, 2 * self.patch - 1, padding=self.patch - 1, stride=self.patch
        ).transpose(1, 2)
        tokens = self.embed(patches) + self.positions
        x = self.blocks(tokens[:, self.order])
        logits: Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


HIERA_VIT: Mapping[str, object] = {
    "patch": 4,
    "width": 96,
    "depths": (2, 3, 16, 3),
    "heads": 1,
    "local_stages": 2,
}
"""Options of `Hiera` for the paper's HieraViT, which is Hiera-B. For 224 × 224 pictures it has
50,755,968 parameters without the head, with 301,056 learned positions.
"""
