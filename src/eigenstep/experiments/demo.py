"""Learn the covariance matrix of handwritten digits, eight pictures at a time, and take its inverse cube root.

The matrix is never stored and never decomposed: only its eigenvalues and its eigenbasis are, and every step turns the
basis a little. The exact answer, from an eigendecomposition, is computed once, to compare with.
"""

from __future__ import annotations

import argparse

import torch

from ..curvature import OuterProducts
from ..spd import SPD, Full
from ..update import update
from .console import print_table, track
from .data import load_images

DAMPING = 1e-3  # some pixels are always blank: without it the covariance would be singular


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how long to learn."""
    parser.add_argument("--steps", type=int, default=2000, help="how many steps to take (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Learn, then compare with the exact answer."""
    torch.set_num_threads(1)  # the matrices are small: threads would only wait for each other
    pixels = load_images("digits").train_pixels.flatten(1) / 255
    pixels = pixels - pixels.mean(0)
    exact = Full.from_dense(pixels.T @ pixels / len(pixels) + DAMPING * torch.eye(64))

    generator = torch.Generator().manual_seed(0)
    start = Full(basis=torch.eye(64), eigs=pixels.square().mean().repeat(64))  # a multiple of the identity
    S: SPD = start.with_memory()
    rows = []
    for step in track(range(1, args.steps + 1), "Learning"):
        batch = pixels[torch.randint(len(pixels), (8,), generator=generator)]
        S = update(S, OuterProducts(batch / 8**0.5), lr=1 / step if step > 1 else 0.5, damping=DAMPING)
        if step == args.steps or step in (1, 10, 100, 1000, 10000):
            errors = (relative_error(S.dense(power), exact.dense(power)) for power in (1, -1 / 3))
            rows.append((step, *(f"{error:.1%}" for error in errors)))
    print_table("Distance from the exact answer", ("steps", "covariance S", "its root S^(-1/3)"), rows)
    print("Next: `eigenstep doctor` says what this machine can do, `eigenstep bench --help` what can be measured.")


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the Frobenius distance of two matrices, relative to the size of the second."""
    return float((found - exact).norm() / exact.norm())
