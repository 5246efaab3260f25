"""`Spectral.paper` against a literal float64 transcription of the paper's boxes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from eigenstep import Spectral

STEPS, LR, BETA1, BETA2, LAMBDA, GAP = 50, 0.05, 0.9, 0.05, 1e-3, 0.1
Gradient = Callable[[Tensor, int], Tensor]


def problem(*shape: int) -> tuple[Tensor, Gradient]:
    """Return a start and the noisy gradients of a quadratic whose axes are not those of the
    parameter.
    """
    torch.manual_seed(1)
    size = torch.Size(shape).numel()
    root = torch.randn(size, size, dtype=torch.float64) / size**0.5
    noise = 0.3 * torch.randn(STEPS, *shape, dtype=torch.float64)
    start = torch.randn(*shape, dtype=torch.float64)
    return start, lambda w, t: (root @ root.T @ w.flatten()).view(shape) + noise[t]


def truncated_cayley(n: Tensor) -> Tensor:
    """Sec. 3.3: ``(I + N)^2 (I + N^2) (I + N^4)``."""
    i = torch.eye(len(n), dtype=n.dtype)
    return (i + n) @ (i + n) @ (i + n @ n) @ (i + n @ n @ n @ n)


def rotation(w: Tensor, d: Tensor, beta_bar: float, gap: float = GAP) -> Tensor:
    """``Cayley(beta_bar / 2 * Skew(Tril(U)) / ||Skew(Tril(U))||)``, caption of Fig.
    kron_updates.
    """
    distance = d[:, None] - d
    apart = distance.abs() > gap * torch.maximum(d[:, None], d)
    u = torch.where(apart, -w / distance, 0.0).tril(-1)
    skew = u - u.T
    norm = skew.norm()
    return truncated_cayley(beta_bar / 2 * skew / norm if norm > 0 else skew)


def clipped(step: Tensor, clip: float) -> Tensor:
    return step * min(1.0, clip / float(step.square().mean().sqrt()))


def kronecker_box(
    weights: Tensor,
    gradient: Gradient,
    p: float,
    *,
    gamma: float,
    beta_bar: float,
    clip: float,
    interval: int,
) -> list[Tensor]:
    """Fig. kron_updates, right box. A vector as an n by 1 matrix: K is then one, and this is Fig.
    full_updates.
    """
    n, m = weights.shape
    B = {"C": torch.eye(n, dtype=torch.float64), "K": torch.eye(m, dtype=torch.float64)}
    d = {"C": torch.ones(n, dtype=torch.float64), "K": torch.ones(m, dtype=torch.float64)}
    k = {"C": m, "K": n}
    momentum, path = torch.zeros_like(weights), []
    alpha = gradient(weights, 0).square().mean()
    for t in range(STEPS):
        G = gradient(weights, t)
        inverse = {side: B[side] @ torch.diag(1 / d[side]) @ B[side].T for side in "CK"}
        Q = {"C": G @ inverse["K"] @ G.T, "K": G.T @ inverse["C"] @ G}
        mean_inverse = {side: (1 / d[side]).mean() for side in "CK"}
        nn = {}
        for side in "CK":
            W = B[side].T @ Q[side] @ B[side]
            damping = LAMBDA * k[side] * mean_inverse["C"] * mean_inverse["K"] / mean_inverse[side]
            nn[side] = (1 - gamma * BETA2) * d[side] + BETA2 / (alpha * k[side]) * (
                torch.diag(W) + damping
            )
            if t % interval == 0:
                B[side] = B[side] @ rotation(W, d[side], beta_bar)
        for side in "CK":
            d[side] = torch.exp(torch.log(nn[side]) - torch.log(nn[side]).mean())
        if m > 1:
            alpha = alpha * torch.exp(torch.log(nn["C"]).mean() / 2 + torch.log(nn["K"]).mean() / 2)
        else:  # Fig. full_updates has no K, and alpha times d is its d
            alpha = alpha * torch.exp(torch.log(nn["C"]).mean())
        momentum = BETA1 * momentum + (1 - BETA1) * G
        root = {side: B[side] @ torch.diag(d[side] ** (-1 / p)) @ B[side].T for side in "CK"}
        weights = weights - LR * clipped(alpha ** (-1 / p) * root["C"] @ momentum @ root["K"], clip)
        path.append(weights)
    return path


def diagonal_box(
    weights: Tensor, gradient: Gradient, p: float, *, gamma: float, clip: float
) -> list[Tensor]:
    """Appendix, diagonal case: RMSprop with any root."""
    momentum, path = torch.zeros_like(weights), []
    S = gradient(weights, 0).square().mean() * torch.ones_like(weights)
    for t in range(STEPS):
        g = gradient(weights, t)
        S = (1 - BETA2 * gamma) * S + BETA2 * (g * g + LAMBDA)
        momentum = BETA1 * momentum + (1 - BETA1) * g
        weights = weights - LR * clipped(S ** (-1 / p) * momentum, clip)
        path.append(weights)
    return path


def spectral_path(weights: Tensor, gradient: Gradient, p: float, **options: object) -> list[Tensor]:
    parameter = torch.nn.Parameter(weights.clone())
    options = {"betas": (BETA1, 1 - BETA2), "damping": LAMBDA, "weight_decay": 0.0, **options}
    optimizer = Spectral.paper([parameter], lr=LR, root=p, **options)
    path = []
    for t in range(STEPS):
        parameter.grad = gradient(parameter.detach(), t)
        optimizer.step()
        path.append(parameter.detach().clone())
    return path


def assert_same_path(ours: list[Tensor], paper: list[Tensor]) -> None:
    assert (paper[-1] - paper[0]).norm() > 0.1, "the comparison is void unless the weights move"
    for t, (mine, theirs) in enumerate(zip(ours, paper, strict=True)):
        assert_close(mine, theirs, rtol=0, atol=1e-8, msg=lambda text, t=t: f"step {t}: {text}")


@pytest.mark.parametrize("p", [1, 2, 4])
def test_kronecker_as_published(p: float) -> None:
    start, gradient = problem(6, 4)
    paper = kronecker_box(start, gradient, p, gamma=1.0, beta_bar=0.5, clip=1.0, interval=2)
    assert_same_path(spectral_path(start, gradient, p), paper)


@pytest.mark.parametrize(("p", "shape"), [(1, (12, 3)), (4, (3, 12))], ids=str)
def test_kronecker_with_other_numbers(p: float, shape: tuple[int, int]) -> None:
    start, gradient = problem(*shape)
    paper = kronecker_box(start, gradient, p, gamma=0.7, beta_bar=1.5, clip=0.2, interval=1)
    ours = spectral_path(start, gradient, p, gamma=0.7, basis_lr=1.5, clip=0.2, interval=1)
    assert_same_path(ours, paper)


@pytest.mark.parametrize("p", [1, 2])
def test_full(p: float) -> None:
    start, gradient = problem(6)

    def column(w: Tensor, t: int) -> Tensor:
        return gradient(w[:, 0], t)[:, None]

    paper = kronecker_box(start[:, None], column, p, gamma=1.0, beta_bar=0.5, clip=1.0, interval=2)
    ours = spectral_path(start, gradient, p, structure="full")
    assert_same_path(ours, [w[:, 0] for w in paper])


@pytest.mark.parametrize(("p", "shape"), [(2, (7,)), (4, (3, 4))], ids=str)
def test_diagonal(p: float, shape: tuple[int, ...]) -> None:
    start, gradient = problem(*shape)
    paper = diagonal_box(start, gradient, p, gamma=1.0, clip=1.0)
    assert_same_path(spectral_path(start, gradient, p, structure="diagonal"), paper)
