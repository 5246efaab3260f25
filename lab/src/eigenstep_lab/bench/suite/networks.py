"""The suite's networks that are not transformers of the usual kind, each as its field writes it.

Layers begin with torch's own initializations, unless it says otherwise. What is called "embed",
"positions" or "head" is the input or output of a network: optimizers for hidden matrices leave
these alone.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.transformers import Attention


def mlp(sizes: list[int], activation: type[nn.Module]) -> nn.Sequential:
    """Return linear layers of these sizes with activations between them; first and last are `embed`
    and `head`.
    """
    layers = nn.Sequential()
    for number, (width_in, width) in enumerate(pairwise(sizes)):
        last = number == len(sizes) - 2
        layers.add_module(
            "embed" if number == 0 else "head" if last else f"hidden{number}",
            nn.Linear(width_in, width),
        )
        if not last:
            layers.add_module(f"activation{number}", activation())
    return layers


class ConvNet(nn.Sequential):
    """Convolutions with batch normalization, three times half the size and twice the channels;
    average, linear head.
    """

    def __init__(self, channels: int, classes: int, width: int = 16) -> None:
        """Set up two convolutions for each of three sizes."""
        super().__init__()
        sizes = [channels, width, width, 2 * width, 2 * width, 4 * width, 4 * width]
        for number, (before, after) in enumerate(pairwise(sizes)):
            stride = 2 if number in (0, 2, 4) else 1
            self.add_module(
                "embed" if number == 0 else f"conv{number}",
                nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            )
            self.add_module(f"norm{number}", nn.BatchNorm2d(after))
            self.add_module(f"activation{number}", nn.ReLU())
        self.add_module("pool", nn.AdaptiveAvgPool2d(1))
        self.add_module("flat", nn.Flatten())
        self.add_module("head", nn.Linear(sizes[-1], classes))


class Mixer(nn.Module):
    """MLP-mixer: perceptrons over the tokens take turns with perceptrons over their entries."""

    def __init__(
        self,
        channels: int,
        side: int,
        classes: int,
        *,
        patch: int = 4,
        width: int = 64,
        depth: int = 3,
    ) -> None:
        """Set up `depth` pairs of perceptrons for pictures of side × side."""
        super().__init__()
        count = (side // patch) ** 2
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.norms1, self.norms2 = (
            nn.ModuleList(nn.LayerNorm(width) for _ in range(depth)) for _ in range(2)
        )
        self.over_tokens = nn.ModuleList(_perceptron(count, width // 2) for _ in range(depth))
        self.over_entries = nn.ModuleList(_perceptron(width, 4 * width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Turn pictures into logits."""
        x = self.embed(images).flatten(2).transpose(1, 2)
        layers = zip(self.norms1, self.over_tokens, self.norms2, self.over_entries, strict=True)
        for norm1, tokens, norm2, entries in layers:
            x = x + tokens(norm1(x).transpose(1, 2)).transpose(1, 2)
            x = x + entries(norm2(x))
        logits: Tensor = self.head(self.norm(x).mean(dim=1))
        return logits


def _perceptron(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class RecurrentText(nn.Module):
    """An LSTM over characters."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        """Set up `depth` layers of this width."""
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, numbers: Tensor) -> Tensor:
        """Turn character numbers into logits for the next one."""
        logits: Tensor = self.head(self.lstm(self.embed(numbers))[0])
        return logits


class Experts(nn.Module):
    """A mixture of perceptrons, of which each token uses one (as the Switch transformer does),
    weights in stacks.
    """

    def __init__(self, width: int, hidden: int, count: int) -> None:
        """Set up `count` experts; each begins as two of torch's linear layers would."""
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts_in = nn.Parameter(torch.empty(count, hidden, width))
        self.experts_out = nn.Parameter(torch.empty(count, width, hidden))
        for stack in (self.experts_in, self.experts_out):
            nn.init.uniform_(stack, -1 / math.sqrt(stack.shape[2]), 1 / math.sqrt(stack.shape[2]))
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Send each token of batch × length × width through its expert; `balance` then holds the
        balancing loss.
        """
        tokens = x.flatten(0, -2)
        chances = self.router(tokens).softmax(dim=-1)
        chance, chosen = chances.max(dim=-1)
        share = F.one_hot(chosen, chances.shape[1]).float().mean(dim=0)
        self.balance = chances.shape[1] * (share * chances.mean(dim=0)).sum()
        out = torch.zeros_like(tokens)
        for expert in range(chances.shape[1]):
            mine = (chosen == expert).nonzero().squeeze(1)
            hidden = F.gelu(tokens[mine] @ self.experts_in[expert].T)
            out = out.index_add(0, mine, hidden @ self.experts_out[expert].T)
        return (chance[:, None] * out).reshape(x.shape)


class MixtureText(nn.Module):
    """A GPT whose perceptrons are mixtures of experts."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, experts: int) -> None:
        """Set up `depth` layers with so many experts each."""
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.attentions = nn.ModuleList(Attention(width, 4, causal=True) for _ in range(depth))
        self.mixtures = nn.ModuleList(Experts(width, 2 * width, experts) for _ in range(depth))
        self.norms1, self.norms2 = (
            nn.ModuleList(nn.LayerNorm(width) for _ in range(depth)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, numbers: Tensor) -> Tensor:
        """Turn character numbers into logits for the next one."""
        x = self.embed(numbers) + self.positions
        layers = zip(self.norms1, self.attentions, self.norms2, self.mixtures, strict=True)
        for norm1, attention, norm2, mixture in layers:
            x = x + attention(norm1(x))
            x = x + mixture(norm2(x))
        logits: Tensor = self.head(self.norm(x))
        return logits

    def balance(self) -> Tensor:
        """Return how unevenly the experts were used in the last call, 1 if evenly, as a mean over
        the layers.
        """
        mixtures = [layer for layer in self.mixtures if isinstance(layer, Experts)]
        return torch.stack([mixture.balance for mixture in mixtures]).mean()


class LowRank(nn.Module):
    """A frozen linear layer with a trainable correction of low rank (LoRA): it begins at 0."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        """Freeze `base`; the correction's first factor begins as a linear layer's weights do, the
        second at 0.
        """
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer and its correction, weighted by 2 as usual (alpha is twice the rank)."""
        out: Tensor = self.base(x) + 2 * (x @ self.lora_a.T) @ self.lora_b.T
        return out


class UNet(nn.Module):
    """A small U-Net that predicts the noise in pictures of a size that can be halved twice."""

    def __init__(self, channels: int, width: int = 16) -> None:
        """Set up three sizes with one residual block each on the way down, and one on
        the way up.
        """
        super().__init__()
        times = 4 * width
        self.embed = nn.Conv2d(channels, width, 3, padding=1)
        self.time = nn.Sequential(
            nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times), nn.SiLU()
        )
        self.down = nn.ModuleList(
            [Residual(width, width, times), Residual(width, 2 * width, times)]
        )
        self.middle = Residual(2 * width, 2 * width, times)
        self.up = nn.ModuleList(
            [Residual(4 * width, width, times), Residual(2 * width, width, times)]
        )
        self.norm = nn.GroupNorm(4, width)
        self.head = nn.Conv2d(width, channels, 3, padding=1)
        nn.init.zeros_(self.head.weight)  # the field's custom: the first prediction is 0
        self.width = width

    def forward(self, images: Tensor, level: Tensor) -> Tensor:
        """Predict the noise; `level`, in [0, 1], says for each picture how far it is noised."""
        frequencies = 1000 ** torch.linspace(0, 1, self.width // 2)
        angles = level[:, None] * frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x = self.embed(images)
        kept = []
        for block in self.down:
            x = block(x, time)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], dim=1), time)
        noise: Tensor = self.head(F.silu(self.norm(x)))
        return noise


class Residual(nn.Module):
    """Two convolutions with group normalization, added to the input; the time shifts what is
    between them.
    """

    def __init__(self, width_in: int, width: int, times: int) -> None:
        """Set up a block from `width_in` to `width` channels."""
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width_in), nn.GroupNorm(4, width)
        self.conv1, self.conv2 = (
            nn.Conv2d(width_in, width, 3, padding=1),
            nn.Conv2d(width, width, 3, padding=1),
        )
        self.shift = nn.Linear(times, width)
        self.skip = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Apply the block."""
        hidden = self.conv1(F.silu(self.norm1(x))) + self.shift(time)[:, :, None, None]
        out: Tensor = self.skip(x) + self.conv2(F.silu(self.norm2(hidden)))
        return out


class GraphNet(nn.Module):
    """Two graph convolutions (Kipf and Welling) between linear layers, with dropout."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        """Set up the layers."""
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.conv1, self.conv2 = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, classes)
        self.dropout = nn.Dropout(0.5)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        """Turn the features of all nodes into their logits."""
        x = F.relu(self.embed(features))
        for conv in (self.conv1, self.conv2):
            x = F.relu(adjacency @ conv(self.dropout(x)))
        logits: Tensor = self.head(self.dropout(x))
        return logits


class Recommender(nn.Module):
    """Neural collaborative filtering: two large embeddings, their product and a perceptron, a bias
    for each item.
    """

    def __init__(self, users: int, items: int, width: int) -> None:
        """Set up the embeddings with deviation 0.1, as factors of a matrix have them, and the
        perceptron.
        """
        super().__init__()
        self.embed_user, self.embed_item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.embed_bias = nn.Embedding(items, 1)
        for table in (self.embed_user, self.embed_item):
            nn.init.normal_(table.weight, std=0.1)
        nn.init.zeros_(self.embed_bias.weight)
        self.hidden = _perceptron(width, 2 * width)
        self.head = nn.Linear(width, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the logit of each pair."""
        product = self.embed_user(users) * self.embed_item(items)
        deep = self.head(F.relu(self.hidden(product))).squeeze(-1)
        logits: Tensor = product.sum(dim=-1) + deep + self.embed_bias(items).squeeze(-1)
        return logits
