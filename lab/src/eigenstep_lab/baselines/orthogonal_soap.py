"""SOAP followed by orthogonalization: its step, made orthogonal as Muon's is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..muon import orthogonalize


class OrthogonalSOAP(Optimizer):
    """SOAP's direction, orthogonalized and scaled to a root mean square of 0.2, as Muon's.

    Second moments of the gradient's rows and columns give the bases, by one step of orthogonal
    iteration (a QR decomposition) every `interval` steps. Sides longer than `max_dim` have none.
    The first gradient only sets them up.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        *,
        shampoo_beta: float = 0.95,
        interval: int = 2,
        max_dim: int = 2048,
    ) -> None:
        """Set up the optimizer for matrices."""
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "weight_decay": weight_decay,
                "shampoo_beta": shampoo_beta,
                "interval": interval,
                "max_dim": max_dim,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._step(matrix, self.state[matrix], group)
        return loss

    def _step(self, matrix: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad = matrix.grad
        assert grad is not None
        if not state:
            state.update(step=0, first=torch.zeros_like(matrix), second=torch.zeros_like(matrix))
            state["sides"] = [_Side(moment) for moment in _moments(grad, group["max_dim"])]
            return
        beta1, beta2 = group["betas"]
        state["step"] += 1
        state["first"].lerp_(grad, 1 - beta1)
        rows, columns = state["sides"]
        turned = columns.into(rows.into(grad).T).T
        state["second"].lerp_(turned.square(), 1 - beta2)
        momentum = columns.into(rows.into(state["first"]).T).T / (1 - beta1 ** state["step"])
        direction = momentum / ((state["second"] / (1 - beta2 ** state["step"])).sqrt() + 1e-8)
        direction = orthogonalize(columns.back(rows.back(direction).T).T)
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(direction, alpha=-0.2 * max(matrix.shape) ** 0.5 * group["lr"])
        for side, moment in zip((rows, columns), _moments(grad, group["max_dim"]), strict=True):
            side.learn(
                moment, 1 - group["shampoo_beta"], turn=state["step"] % group["interval"] == 0
            )


def _moments(grad: Tensor, max_dim: int) -> list[Tensor | None]:
    """Return the second moments of rows and columns, where they are not too large."""
    return [side @ side.T if len(side) <= max_dim else None for side in (grad, grad.T)]


class _Side:
    """Second moments of one side and their eigenbasis; without moments, the identity."""

    def __init__(self, moment: Tensor | None) -> None:
        self.moment = moment
        self.basis = None if moment is None else torch.linalg.eigh(moment)[1].flip(1)

    def into(self, matrix: Tensor) -> Tensor:
        return matrix if self.basis is None else self.basis.T @ matrix

    def back(self, matrix: Tensor) -> Tensor:
        return matrix if self.basis is None else self.basis @ matrix

    def learn(self, moment: Tensor | None, rate: float, *, turn: bool) -> None:
        if moment is None or self.moment is None or self.basis is None:
            return
        self.moment.lerp_(moment, rate)
        if turn:
            self.basis = torch.linalg.qr(self.moment @ self.basis)[0]
