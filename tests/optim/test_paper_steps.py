"""`Spectral.paper` and the paper's box, step by step from common states.

Left alone, two programs that do the same arithmetic in another order part: a normalized rotation is
ruled by the two closest eigenvalues, and what rounding does to their difference grows from step to
step (docs/maths.md). So every step here starts at the optimizer's own state, and must end where the
box ends.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eigenstep import Spectral

from .test_paper import rotation

BETA1, BETA2, LAMBDA, GAP, LR, STEPS = 0.9, 0.05, 1e-12, 0.1, 0.05, 50
Array = np.ndarray
Box = tuple[dict[str, Array], dict[str, Array], float, Array]
"""Bases, eigenvalues, alpha and momentum."""


def one_step(state: Box, G: Array, gap: float, beta_bar: float) -> tuple[Box, Array]:
    """Fig. kron_updates, right box, with p = 2 and clipping at one: return the new state and what
    is subtracted.
    """
    B, d, alpha, momentum = state
    k = {"C": G.shape[1], "K": G.shape[0]}
    inverse = {side: B[side] @ np.diag(1 / d[side]) @ B[side].T for side in "CK"}
    Q = {"C": G @ inverse["K"] @ G.T, "K": G.T @ inverse["C"] @ G}
    mean = {side: np.mean(1 / d[side]) for side in "CK"}
    n, turned = {}, {}
    for side in "CK":
        W = B[side].T @ Q[side] @ B[side]
        damping = LAMBDA * k[side] * mean["C"] * mean["K"] / mean[side]
        n[side] = (1 - BETA2) * d[side] + BETA2 / (alpha * k[side]) * (np.diag(W) + damping)
        turned[side] = (
            B[side] @ rotation(*map(torch.from_numpy, (W, d[side])), beta_bar, gap).numpy()
        )
    d = {side: np.exp(np.log(n[side]) - np.log(n[side]).mean()) for side in "CK"}
    alpha = alpha * float(np.exp(np.log(n["C"]).mean() / 2 + np.log(n["K"]).mean() / 2))
    momentum = BETA1 * momentum + (1 - BETA1) * G
    root = {side: turned[side] @ np.diag(d[side] ** -0.5) @ turned[side].T for side in "CK"}
    step = alpha**-0.5 * root["C"] @ momentum @ root["K"]
    return (turned, d, alpha, momentum), LR * step * min(1.0, 1 / float(np.sqrt(np.mean(step**2))))


def state_of(
    optimizer: Spectral, weights: torch.nn.Parameter
) -> tuple[dict[str, Array], dict[str, Array], float]:
    """Read bases, eigenvalues and alpha; the longer side of a matrix comes first."""
    state, sides = optimizer.state[weights], "CK" if weights.shape[0] >= weights.shape[1] else "KC"
    B = {side: state[f"basis_{at}"][0, 0].double().numpy().copy() for at, side in enumerate(sides)}
    d = {side: state[f"eigs_{at}"][0, 0].double().numpy().copy() for at, side in enumerate(sides)}
    return B, d, float(state["scale"][0]) ** 2


def run(
    shape: tuple[int, int], dtype: torch.dtype, gap: float, beta_bar: float
) -> dict[str, list[float]]:
    """Step both; return how far they are apart after one step from a common state, and when left
    alone.
    """
    torch.manual_seed(1)
    size = shape[0] * shape[1]
    root = torch.randn(size, size, dtype=torch.float64) / size**0.5
    noise = 0.3 * torch.randn(STEPS, *shape, dtype=torch.float64)
    start = torch.randn(*shape, dtype=torch.float64)
    curvature = (root @ root.T).numpy()

    def gradient(w: Array, t: int) -> Array:
        return (curvature @ w.reshape(-1)).reshape(shape) + noise[t].numpy()

    weights = torch.nn.Parameter(start.to(dtype))
    optimizer = Spectral.paper(
        [weights],
        lr=LR,
        betas=(BETA1, 1 - BETA2),
        weight_decay=0.0,
        basis_lr=beta_bar,
        damping=LAMBDA,
        interval=1,
        gap=gap,
    )
    identity = [
        {"C": np.eye(shape[0]), "K": np.eye(shape[1])},
        {"C": np.ones(shape[0]), "K": np.ones(shape[1])},
    ]
    alone: Box = (*identity, float(np.mean(gradient(start.numpy(), 0) ** 2)), np.zeros(shape))
    common, own_weights = alone, start.numpy().copy()
    apart: dict[str, list[float]] = {"one step": [], "alone": []}
    for t in range(STEPS):
        before = weights.detach().double().numpy().copy()
        G = gradient(before, t)
        weights.grad = torch.from_numpy(G).to(dtype)
        optimizer.step()
        after = weights.detach().double().numpy()
        common, step = one_step(common, G, gap, beta_bar)
        apart["one step"].append(abs(after - (before - step)).max())
        B, d, alpha = state_of(optimizer, weights)
        wanted = [*common[0].values(), *common[1].values(), np.array(common[2])]
        found = [
            *(B[side] for side in common[0]),
            *(d[side] for side in common[1]),
            np.array(alpha),
        ]
        apart["one step"].append(max(abs(a - b).max() for a, b in zip(found, wanted, strict=True)))
        common = (B, d, alpha, common[3])
        alone, step = one_step(alone, gradient(own_weights, t), gap, beta_bar)
        own_weights = own_weights - step
        apart["alone"].append(abs(after - own_weights).max())
    return apart


CASES = pytest.mark.parametrize(
    ("shape", "gap", "beta_bar"),
    [((6, 4), GAP, 0.5), ((3, 12), GAP, 1.9), ((6, 4), 1e-6, 0.1), ((3, 12), 1e-6, 1.9)],
    ids=str,
)


@CASES
def test_each_step_is_the_papers(shape: tuple[int, int], gap: float, beta_bar: float) -> None:
    assert max(run(shape, torch.float64, gap, beta_bar)["one step"]) < 1e-9


@CASES
def test_each_step_is_the_papers_in_float32(
    shape: tuple[int, int], gap: float, beta_bar: float
) -> None:
    """The step itself; where eigenvalues are at the gap, rounding decides whether they turn."""
    steps = run(shape, torch.float32, gap, beta_bar)["one step"][::2]
    assert sorted(steps)[-3] < 2e-6


def test_left_alone_rounding_grows() -> None:
    """From rounding to visible differences: the same growth from float64's rounding as from
    float32's.
    """
    double, single = (
        run((12, 3), dtype, 1e-6, 1.9)["alone"] for dtype in (torch.float64, torch.float32)
    )
    assert double[9] < 1e-11 < 1e-7 < double[-1]
    assert single[9] < 1e-2 < single[-1]
    calm = run((12, 3), torch.float64, GAP, 0.5)["alone"]
    assert max(calm) < 1e-12
