"""Tasks with full batches or real-valued targets: a differential equation, a graph, a photograph as
a function.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ...tasks import Problem
from . import sources
from .networks import GraphNet, mlp


def pinn(seed: int) -> Problem:
    """A physics-informed network for Poisson's equation on a square, full batch, judged by its
    error.

    The equation is Δu = f on [-1, 1]² with u = 0 on the border, f such that u = sin(πx) sin(2πy) +
    sin(2πx) sin(πy) / 2 solves it. Residuals are in units of f's. The held-out loss is the relative
    error of u, in root mean square.
    """
    model = mlp([2, 64, 64, 64, 1], nn.Tanh)
    inside = 2 * torch.rand(768, 2, generator=Generator().manual_seed(seed)) - 1
    edge = torch.linspace(-1, 1, 65)[:-1]
    one = torch.ones_like(edge)
    border = torch.cat(
        [
            torch.stack(side, dim=1)
            for side in ((edge, one), (-edge, -one), (one, -edge), (-one, edge))
        ]
    )

    def solution(places: Tensor) -> Tensor:
        x, y = (math.pi * places).unbind(dim=1)
        return x.sin() * (2 * y).sin() + (2 * x).sin() * y.sin() / 2

    # The solution is an eigenfunction of the Laplacian: f = strength · u
    strength = -5 * math.pi**2
    target = solution(inside)

    def loss(generator: Generator) -> Tensor:
        places = inside.clone().requires_grad_()
        values = model(places)
        slopes = torch.autograd.grad(values.sum(), places, create_graph=True)[0]
        bends = [
            torch.autograd.grad(slopes[:, k].sum(), places, create_graph=True)[0][:, k]
            for k in range(2)
        ]
        residual = (bends[0] + bends[1]) / strength - target
        return residual.square().mean() + model(border).square().mean()

    grid = torch.cartesian_prod(torch.linspace(-1, 1, 65), torch.linspace(-1, 1, 65))

    def held_out() -> float:
        truth = solution(grid)
        return ((model(grid).squeeze(1) - truth).norm() / truth.norm()).item()

    return Problem(model, loss, held_out)


def graph(seed: int) -> Problem:
    """Classify the nodes of a graph with a graph convolutional network, full batch."""
    data = sources.neighbor_graph(3000, 8)
    model = GraphNet(data.features.shape[1], 64, 10)

    def loss(generator: Generator) -> Tensor:
        return F.cross_entropy(
            model(data.features, data.adjacency)[data.train], data.labels[data.train]
        )

    def held_out() -> float:
        return F.cross_entropy(
            model(data.features, data.adjacency)[~data.train], data.labels[~data.train]
        ).item()

    return Problem(model, loss, held_out)


class Waves(nn.Module):
    """Fixed random Fourier features of places, as implicit networks use them."""

    def __init__(self, count: int, scale: float) -> None:
        """Draw `count` frequencies of deviation `scale`."""
        super().__init__()
        self.frequencies: Tensor
        self.register_buffer(
            "frequencies", scale * torch.randn(2, count, generator=Generator().manual_seed(0))
        )

    def forward(self, places: Tensor) -> Tensor:
        """Return sines and cosines of the places."""
        angles = places @ self.frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=1)


def photograph(seed: int) -> Problem:
    """Regression: the colors of a photograph as a function of the place; a fifth of the pixels is
    held out.
    """
    places, colors = sources.photograph()
    layers = mlp([128, 128, 128, 128, 3], nn.ReLU)
    model = nn.Sequential()
    model.add_module("waves", Waves(64, 12.0))
    model.add_module("layers", layers)
    held = torch.randperm(len(places), generator=Generator().manual_seed(1)) % 5 == 4
    train, test = (places[~held], colors[~held]), (places[held], colors[held])

    def loss(generator: Generator) -> Tensor:
        chosen = torch.randint(len(train[0]), (2048,), generator=generator)
        return F.mse_loss(model(train[0][chosen]), train[1][chosen])

    return Problem(model, loss, lambda: F.mse_loss(model(test[0]), test[1]).item())
