"""``Spectral.for_model``: what it recognizes, and that it steps as separate parameters do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from eigenstep import Spectral


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.experts = nn.Parameter(torch.randn(3, 24, 16) / 4)
        self.head = nn.Linear(16, 500, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x + self.qkv(x).view(*x.shape, 3).sum(-1) + self.frozen(x))
        x = x + torch.einsum("btd,eod,eop->btp", x, self.experts, self.experts)
        return self.head(x)


def groups_of(optimizer: Spectral) -> dict[str, list[str]]:
    return {group["name"]: list(group["param_names"]) for group in optimizer.param_groups}


def test_groups() -> None:
    optimizer = Spectral.for_model(Network(), lr=1e-2, weight_decay=0.1, interval=3)
    found = groups_of(optimizer)
    assert found["embeddings"] == ["embedding.weight"]
    assert found["fused 16 0"] == ["attention.in_proj_weight", "qkv.weight"]
    assert set(found["matrices"]) == {"experts", "attention.out_proj.weight"}
    assert "norm.weight" in found["vectors"]
    assert not any("frozen" in name for own in found.values() for name in own)
    for group in optimizer.param_groups:
        assert group["weight_decay"] == (0.0 if group["name"] == "vectors" else 0.1)
        assert group["interval"] == 3
        assert group["lr"] == 1e-2
    assert "3 times" in str(optimizer.summary())


def test_steps_as_separate_matrices_do() -> None:
    """The fused weights as three parameters, all else the same."""
    torch.manual_seed(0)
    fused = nn.Linear(8, 24, bias=False, dtype=torch.float64)
    model = nn.Module()
    model.qkv = copy.deepcopy(fused)
    parts = [nn.Parameter(part.detach().clone()) for part in fused.weight.split(8)]
    ours, theirs = Spectral.for_model(model, lr=1e-2), Spectral(parts, lr=1e-2)
    for _ in range(20):
        gradient = torch.randn(24, 8, dtype=torch.float64)
        model.qkv.weight.grad = gradient
        for part, own in zip(parts, gradient.split(8), strict=True):
            part.grad = own.clone()
        ours.step()
        theirs.step()
    assert (model.qkv.weight - torch.cat(parts)).abs().max() < 1e-12


def test_recipes_and_training() -> None:
    torch.manual_seed(0)
    model = Network()
    optimizer = Spectral.fast.for_model(model, lr=1e-2)
    assert isinstance(optimizer, Spectral.fast)
    tokens = torch.randint(500, (8, 6))
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="no parameters that require gradients"):
        Spectral.for_model(nn.Linear(2, 2).requires_grad_(False))
