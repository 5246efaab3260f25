"""What the examples share: handwritten digits, a small network, and training with any curvature."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from eigenstep import Spectral

Curvature = Callable[[nn.Module, Tensor, Tensor], Mapping[Tensor, Tensor]]
"""``curvature(model, inputs, labels)`` returns vectors of shape ``(K, *parameter.shape)`` for each
parameter.
"""


def train(
    curvature: Curvature | None = None, steps: int = 150, batch: int = 32, **options: float
) -> float:
    """Train on half of the digits and return the mean loss on the other half.

    Args:
        curvature: where other curvature than the gradient's own comes from.
        steps: number of steps.
        batch: examples in each step.
        **options: arguments of ``Spectral``.
    """
    torch.manual_seed(0)
    pictures, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    pictures = pictures.float() / 16
    order = torch.randperm(len(pictures))
    known, held_out = order.chunk(2)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = Spectral(model.parameters(), **{"lr": 0.03, **options})
    for _ in range(steps):
        chosen = known[torch.randint(len(known), (batch,))]
        x, y = pictures[chosen], labels[chosen]
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step(curvature=None if curvature is None else curvature(model, x, y))
    with torch.no_grad():
        return cross_entropy(model(pictures[held_out]), labels[held_out]).item()
