"""How well a matrix learned from past gradients predicts the next one, for every scheme that learns such a matrix.

If ``S`` were the covariance of the gradients of a layer, the next gradient ``G`` would have the negative log-likelihood
``[vec(G)^T S^-1 vec(G) + log det S] / (n m)`` per entry, up to constants. Lower is better, and a difference of 0.1
means that each entry is predicted with 10 % more density. Gradients are recorded once, while AdamW trains, so that all
schemes see the same ones; same-shaped layers and all seeds go through a scheme as one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from eigenstep.core.curvature import OuterProducts
from eigenstep.core.generators import bounded, moore_penrose, normalized
from eigenstep.core.kronecker import Kronecker
from eigenstep.core.maps import cayley, truncated_cayley, truncated_exp
from eigenstep.core.matrices import Full
from eigenstep.core.step import update

from ..baselines import eigen
from ..problems.tasks import Task, loss_of
from ..registry import is_hidden_matrix

LR = 0.05
"""The paper's beta-2, the same for all schemes: they average over the same past."""
DAMPING = 1e-8
"""The paper's lambda, in units of the mean eigenvalue of ``S``; anything up to 1e-6 gives the same figures."""
SETTLING = 50
"""In this many first steps a basis may turn several times towards the same average (:attr:`Setting.sweeps`)."""


@dataclass(frozen=True)
class Setting:
    """How one scheme learns.

    Attributes:
        rotation: "bounded", the paper's "normalized" or "moore_penrose", "diagonal" for no basis at all, or
            "eigendecomposition", exact at every step.
        start: ``k``: rates are ``max(rate, k / (t + k))`` at step ``t``, so that the start is forgotten like ``t^-k``.
        basis_lr: step size of the basis, if it is not that of the eigenvalues.
        gap: relative gap below which the paper's rotations take eigenvalues for equal.
        rate: beta-bar-2, the length of the paper's normalized rotation.
        memory: whether factors keep what they have not yet turned to.
        sweeps: turns towards each average during the first steps.
        rayleigh: read eigenvalues off in the new basis, which has already seen the gradient.
    """

    rotation: str
    start: float
    basis_lr: float | None = None
    gap: float = 0.0
    rate: float = 0.0
    residual: bool = False
    sweeps: int = 1
    rayleigh: bool = False


@dataclass(frozen=True)
class Layers:
    """Recorded gradients of same-shaped layers.

    Attributes:
        names: the layers.
        gradients: shape ``(steps, seeds, layers, n, m)`` with ``n >= m``; wide layers are transposed.
    """

    names: tuple[str, ...]
    gradients: Tensor


def record(task: Task, steps: int, seed: int, lr: float = 1e-3) -> dict[str, Tensor]:
    """Train with AdamW and return all gradients of each hidden layer's matrix, shape ``(steps, n, m)``."""
    model, generator = task.model(seed), Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    hidden = {name: p for name, p in model.named_parameters() if is_hidden_matrix(name, p)}
    recorded = {name: torch.empty(steps, *p.shape) for name, p in hidden.items()}
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, task.batch(generator, True)).backward()  # type: ignore[no-untyped-call]
        for name, parameter in hidden.items():
            assert parameter.grad is not None
            recorded[name][step] = parameter.grad
        optimizer.step()
    return recorded


def stack(recordings: Sequence[Mapping[str, Tensor]]) -> list[Layers]:
    """Put same-shaped layers of several recordings together."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, gradients in recordings[0].items():
        by_shape.setdefault(tuple(sorted(gradients.shape[1:], reverse=True)), []).append(name)
    groups = []
    for (n, _), names in by_shape.items():
        tall = [[r[name] if r[name].shape[1] == n else r[name].mT for name in names] for r in recordings]
        groups.append(Layers(tuple(names), torch.stack([torch.stack(layers, 1) for layers in tall], 1)))
    return groups


def predictive_nll(S: Kronecker, gradient: Tensor) -> Tensor:
    """Return the negative log-likelihood per entry of gradients, shape ``(*batch, n, m)``, under ``S``.

    ``S^-1`` is taken as it is applied, ``B Diag(1/d) B^T`` with the bases as they are stored. Those in half precision
    are not quite orthogonal, and their determinants count.
    """
    rotated = S.rotate(gradient).to(S.spectrum.dtype)
    nll = (rotated.square() / S.spectrum).mean((-2, -1)) + S.logdet() / math.prod(S.sizes)
    for factor in S.factors:
        if isinstance(factor, Full):
            nll = nll - 2 * torch.linalg.slogdet(factor.basis.to(nll.dtype)).logabsdet / factor.sizes[0]
    return nll


def follow(gradients: Tensor, setting: Setting, dtype: torch.dtype = torch.float32, interval: int = 1) -> Tensor:
    """Learn from gradients one by one; return how well each was predicted by those before it.

    Args:
        gradients: shape ``(steps, *batch, n, m)``.
        setting: how to learn.
        dtype: number format of the bases. An exact eigendecomposition has its basis rounded when it is used only.
        interval: turn the bases every so many steps, then towards all gradients since the last turn. Eigenvalues
            learn at every step.

    Returns:
        The predictive NLL, shape ``(steps, *batch)``.
    """
    kinds = ["diagonal"] * 2 if setting.rotation == "diagonal" else None
    start = Kronecker.identity(gradients.shape[-2:], gradients.shape[1:-2], kinds=kinds)
    first = gradients[0].square().mean((-2, -1)).clamp_min(torch.finfo(gradients.dtype).tiny)
    S = replace(start, scale=first)
    S = S.with_residual() if setting.residual else S
    S = S if setting.rotation == "eigendecomposition" else S.to(dtype)
    found = []
    for step, gradient in enumerate(gradients):
        found.append(predictive_nll(S.to(dtype), gradient))
        recent = gradients[max(0, step - interval + 1) : step + 1]
        S = learn(S, recent, step + 1, setting, turn=step % interval == 0, interval=interval)
    return torch.stack(found)


def learn(S: Kronecker, recent: Tensor, time: int, setting: Setting, turn: bool, interval: int) -> Kronecker:
    """Return ``S`` after one more gradient.

    Args:
        S: the matrix that learns.
        recent: the latest gradients, at most ``interval`` of them, the newest last.
        time: 1, 2, ...
        setting: how to learn.
        turn: whether the bases turn at this step.
        interval: steps between two turns.
    """
    lr, basis_lr = (max(rate, setting.start / (time + setting.start)) for rate in (LR, setting.basis_lr or LR))
    newest = OuterProducts(recent[-1:])
    damping = DAMPING * S.trace() / math.prod(S.sizes)
    if setting.rotation == "eigendecomposition":
        return eigen.update(S, newest, lr=lr, damping=damping)
    maps: Mapping[str, dict[str, Any]] = {
        "diagonal": {},
        "moore_penrose": {"rotation": partial(moore_penrose, gap=setting.gap), "orthogonal": cayley},
        "normalized": {
            "rotation": partial(normalized, gap=setting.gap, rate=setting.rate),
            "orthogonal": partial(truncated_cayley, cap=None),
        },
        "bounded": {"rotation": bounded, "orthogonal": partial(truncated_cayley, cap=0.4)},
    }
    advance: Callable[..., Kronecker] = partial(
        update, damping=damping, positive=truncated_exp, **maps[setting.rotation]
    )
    sweeps = setting.sweeps if time <= SETTLING else 1
    if interval == 1:
        new = advance(S, newest, lr=lr, basis_lr=basis_lr, sweeps=sweeps, rayleigh=setting.rayleigh)
    else:
        new = advance(S, newest, lr=lr, basis_lr=0.0)
        if turn:
            mean = OuterProducts(recent / len(recent) ** 0.5)
            new = advance(new, mean, lr=0.0, basis_lr=1 - (1 - basis_lr) ** len(recent), sweeps=sweeps)
    assert isinstance(new, Kronecker)
    return new
