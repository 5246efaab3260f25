"""How fast does a cup of coffee cool? The posterior of two rates, without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from eigenstep.inference import fit_gaussian

MINUTES = torch.linspace(0, 30, 16, dtype=torch.float64)
NOISE = 0.5


def temperature(w: Tensor) -> Tensor:
    """Return the temperature over time, for ``w[0]`` tens of degrees and a rate ``exp(w[1])``."""
    return 20 + 10 * w[0] * torch.exp(-w[1].exp() * MINUTES)


def main() -> None:
    torch.manual_seed(0)
    prior = torch.tensor([5.0, -2.0], dtype=torch.float64)
    data = temperature(torch.tensor([6.5, -2.5], dtype=torch.float64))
    data = data + NOISE * torch.randn(len(data), dtype=torch.float64)

    def log_joint(w: Tensor) -> Tensor:
        return (
            -0.5 * ((temperature(w) - data) / NOISE).square().sum()
            - 0.5 * (w - prior).square().sum()
        )

    found = fit_gaussian(log_joint, prior, 100.0, curvature="reinforce")
    print(f"from {found.nfev} values: {found.mean} ± {found.posterior.std()}")


if __name__ == "__main__":
    main()
