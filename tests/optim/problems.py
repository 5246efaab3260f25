"""Small convex problems with parameters of every shape, which the optimizer's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (1,),
    (5,),
    (1, 7),
    (7, 1),
    (6, 4),
    (4, 6),
    (6, 4),  # stacked with the two before
    (12, 3),  # long: cut into blocks
    (13, 3),  # long, but cannot be cut
    (3, 4, 2),
    (2, 3, 2, 2),
    (0,),
    (3, 0),
)


class Problem:
    """For each parameter ``w``, the loss ``||A (w - t)||^2 / 2`` with a well-conditioned ``A`` on
    the first axis.
    """

    def __init__(
        self,
        shapes: Iterable[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.parameters = [nn.Parameter(normal(*shape).to(dtype)) for shape in shapes]
        self.targets: list[Tensor] = []
        self.maps: list[Tensor] = []
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        for w in self.parameters:
            n = w.shape[0] if w.ndim else 1
            self.targets.append(normal(*w.shape).to(compute))
            self.maps.append((torch.eye(n) + 0.3 * normal(n, n) / max(n, 1) ** 0.5).to(compute))

    def losses(self) -> list[Tensor]:
        """Return the loss of each parameter."""
        losses = []
        for w, a, t in zip(self.parameters, self.maps, self.targets, strict=True):
            error = w.to(t.dtype) - t
            matrix = error.reshape(len(a), error.numel() // max(len(a), 1))
            losses.append((a @ matrix).square().sum() / 2)
        return losses

    def backward(self, scale: float = 1.0) -> list[float]:
        """Compute all gradients, times ``scale``, and return the losses."""
        losses = self.losses()
        for w in self.parameters:
            w.grad = None
        sum(losses[1:], losses[0]).backward()
        for w in self.parameters:
            if w.grad is not None:
                w.grad.mul_(scale)
        return [loss.item() for loss in losses]

    def descend(self, optimizer: Optimizer, steps: int, scale: float = 1.0) -> list[list[float]]:
        """Take steps and return the losses before each, and after the last."""
        history = []
        for _ in range(steps):
            history.append(self.backward(scale))
            optimizer.step()
        return [*history, [loss.item() for loss in self.losses()]]

    def snapshot(self) -> list[Tensor]:
        """Return copies of the parameters."""
        return [w.detach().clone() for w in self.parameters]


def fell(history: list[list[float]]) -> bool:
    """Tell whether every loss is lower in the end, but those of empty parameters."""
    ends = zip(history[0], history[-1], strict=True)
    return all(after < before for before, after in ends if before)


def final(
    make: Callable[[list[nn.Parameter]], Optimizer], steps: int = 8, **options: Any
) -> list[Tensor]:
    """Return the parameters of a new problem after a few steps."""
    problem = Problem(**options)
    torch.manual_seed(0)
    problem.descend(make(problem.parameters), steps)
    return problem.snapshot()


def equal(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    """Tell whether all tensors are equal, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
