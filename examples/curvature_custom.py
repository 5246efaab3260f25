"""Give the optimizer curvature of your own: the Hessian of a linear regression.

The loss ``mean |W x - y|^2 / 2`` has the Hessian ``I x C`` with the covariance ``C`` of the inputs,
whatever ``W`` is. Its square root gives the vectors; with ``root=1`` steps go along ``S^-1``, which
is Newton's method once ``S`` has been learned. The inputs are so badly scaled that gradients alone
say little about it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eigenstep import Spectral


def problem() -> tuple[Tensor, Tensor]:
    """Return inputs whose directions differ a thousandfold in size, and what to predict."""
    torch.manual_seed(0)
    mixing = torch.linalg.qr(torch.randn(16, 16)).Q * torch.logspace(0, -3, 16)
    inputs = torch.randn(256, 16) @ mixing
    return inputs, inputs @ torch.linalg.lstsq(mixing, torch.randn(16, 4)).solution


def fit(own_curvature: bool, steps: int = 100, **options: float) -> float:
    """Return the loss after a number of steps."""
    inputs, targets = problem()
    model = nn.Linear(16, 4, bias=False)
    optimizer = Spectral(model.parameters(), weight_decay=0.0, **options)
    variances, directions = torch.linalg.eigh(inputs.T @ inputs / len(inputs))
    columns = (directions * variances.clamp_min(0).sqrt()).T  # C is the sum of their outer products
    # One of them in one row of W
    vectors = torch.einsum("kj,io->kioj", columns, torch.eye(4)).flatten(0, 1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().sum(1).mean() / 2
        loss.backward()
        optimizer.step(curvature={model.weight: vectors} if own_curvature else None)
    return loss.item()


def main() -> None:
    torch.set_num_threads(1)
    # The first learning rate is the best of 0.03, 0.1, 0.3, 1 and 3 (with 10, rounding decides what
    # comes out); that of Newton's method is 1.
    print(f"loss after 100 steps, curvature from gradients: {fit(False, lr=3.0):.1e}")
    print(
        "loss after 100 steps, with the exact Hessian:   "
        f"{fit(True, lr=1.0, root=1.0, interval=1):.1e}"
    )


if __name__ == "__main__":
    main()
