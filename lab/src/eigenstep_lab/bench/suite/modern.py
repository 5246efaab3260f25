"""The network of the public speed run of optimizers, shrunk: QK-norm, rotary positions, ReLU²,
projections from 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...tasks import Problem
from . import sources
from .language import prediction

VOCABULARY, LENGTH = 512, 128


def rotated(x: Tensor) -> Tensor:
    """Turn the pairs of entries of queries or keys, batch × heads × length × width, by angles that
    grow with place.
    """
    half = x.shape[-1] // 2
    frequencies = (1 / 1024) ** torch.linspace(0, 1, half)
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


def normed(x: Tensor) -> Tensor:
    """Give the last axis a root mean square of 1, without weights."""
    return F.rms_norm(x, (x.shape[-1],))


class ModernBlock(nn.Module):
    """Attention with normalized queries and keys, then a perceptron with squared ReLU; what they
    add begins at 0.
    """

    def __init__(self, width: int, heads: int) -> None:
        """Set up one layer."""
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.mlp_in, self.mlp_out = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )
        for projection in (self.out, self.mlp_out):
            nn.init.zeros_(projection.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        y = normed(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            rotated(normed(q)), rotated(normed(k)), v, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp_out(F.relu(self.mlp_in(normed(x))).square())
        return out


class ModernGPT(nn.Module):
    """Embedding, blocks, and a head that begins at 0."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int) -> None:
        """Set up the network."""
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(ModernBlock(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, numbers: Tensor) -> Tensor:
        """Turn token numbers into logits for the next one."""
        logits: Tensor = self.head(normed(self.blocks(normed(self.embed(numbers)))))
        return logits


def speedrun(seed: int) -> Problem:
    """Predict byte pairs of Shakespeare, 2048 a step."""
    train, test = sources.tokens(VOCABULARY)
    return prediction(
        ModernGPT(VOCABULARY, width=128, depth=3, heads=4), train, test, batch=16, length=LENGTH
    )
