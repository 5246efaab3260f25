"""Two plain transformers to train: a vision transformer and a character-level GPT.

Both are pre-norm, with separate query, key and value matrices, so that an optimizer sees every
matrix as itself. Their weights depend on `seed` alone, not on the global random state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ..console import UserError


class Attention(nn.Module):
    """Multi-head self-attention over tokens of shape batch × length × width."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        """Set up `heads` heads; with `causal`, a token sees only itself and what came before."""
        super().__init__()
        if width % heads:
            raise UserError(
                f"width must be a multiple of heads, got width {width} and {heads} heads"
            )
        self.heads = heads
        self.causal = causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to its normalized input."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        """Set up one layer of a transformer."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.norm2(x))))
        return out


class ViT(nn.Module):
    """A vision transformer: patches, blocks, average over the tokens, linear head."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        *,
        patch: int = 4,
        width: int = 64,
        depth: int = 4,
        heads: int = 4,
        positions: str = "learned",
        seed: int = 0,
    ) -> None:
        """Build the network.

        Args:
            shape: Channels, height and width of a picture.
            classes: How many classes there are.
            patch: Side of the square patches; it must divide height and width.
            width: Length of a token.
            depth: Number of blocks.
            heads: Attention heads; they must divide `width`.
            positions: "learned", or "sincos" for fixed sines and cosines of the two coordinates.
            seed: Decides the initial weights.
        """
        super().__init__()
        channels, *sides = shape
        if any(side % patch for side in sides):
            raise UserError(
                f"patch must divide the picture's sides, got patch {patch} for {sides[0]} × "
                f"{sides[1]}"
            )
        rows, columns = (side // patch for side in sides)
        self.patch = patch
        self.embed = nn.Linear(channels * patch * patch, width)
        if positions == "learned":
            self.positions: Tensor = nn.Parameter(torch.empty(rows * columns, width))
        elif positions == "sincos":
            self.register_buffer(
                "positions", sincos_positions(rows, columns, width), persistent=False
            )
        else:
            raise UserError(f"positions must be 'learned' or 'sincos', got {positions!r}")
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        initialize(self, depth, seed)

    def forward(self, pictures: Tensor) -> Tensor:
        """Turn pictures, batch × channels × height × width, into logits, batch × classes."""
        # Each patch flattened is one token: what a convolution with stride `patch` does, as a plain
        # matrix.
        tokens = F.unfold(pictures, self.patch, stride=self.patch).transpose(1, 2)
        x = self.blocks(self.embed(tokens) + self.positions)
        logits: Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


class GPT(nn.Module):
    """A decoder-only transformer over characters."""

    def __init__(
        self,
        vocabulary: int,
        *,
        length: int = 64,
        width: int = 64,
        depth: int = 4,
        heads: int = 4,
        seed: int = 0,
    ) -> None:
        """Build the network.

        Args:
            vocabulary: How many different characters there are.
            length: Longest passage it can read.
            width: Length of a token.
            depth: Number of blocks.
            heads: Attention heads; they must divide `width`.
            seed: Decides the initial weights.
        """
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        initialize(self, depth, seed)

    def forward(self, characters: Tensor) -> Tensor:
        """Turn characters, batch × length, into logits, batch × length × vocabulary."""
        if characters.shape[-1] > len(self.positions):
            raise UserError(
                f"passages of {characters.shape[-1]} are longer than this model's "
                f"{len(self.positions)}"
            )
        x = self.blocks(self.embed(characters) + self.positions[: characters.shape[-1]])
        logits: Tensor = self.head(self.norm(x))
        return logits


PLAIN_VIT: Mapping[str, object] = {
    "patch": 16,
    "width": 768,
    "depth": 12,
    "heads": 12,
    "positions": "sincos",
}
"""Options of `ViT` for the paper's PlainViT: 85.6 million parameters without the head."""


def initialize(model: nn.Module, depth: int, seed: int) -> None:
    """Draw all weights: normal, and smaller where a block adds to its input."""
    generator = Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            nn.init.ones_(parameter)
        elif parameter.ndim == 1:
            nn.init.zeros_(parameter)
        else:
            adds = name.endswith(("attention.out.weight", "mlp_out.weight"))
            nn.init.normal_(
                parameter, std=0.02 / (2 * depth) ** 0.5 if adds else 0.02, generator=generator
            )


def sincos_positions(rows: int, columns: int, width: int) -> Tensor:
    """Return position codes, (rows·columns) × width: sin and cos of row and column."""
    if width % 4:
        raise UserError(f"width must be a multiple of 4 for sincos positions, got {width}")
    frequencies = 10_000 ** (-torch.arange(width // 4) / max(width // 4 - 1, 1))
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [coordinate.reshape(-1, 1) * frequencies for coordinate in (x, y)]
    return torch.cat(
        [function(angle) for angle in angles for function in (torch.sin, torch.cos)], dim=1
    )
