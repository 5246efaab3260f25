"""How fast does a cup of coffee cool? The posterior of two rates, from values of a model, and from an ensemble."""

from __future__ import annotations

import torch
from torch import Tensor

from eigenstep.inference import ensemble_inversion, fit_gaussian

MINUTES = torch.linspace(0, 30, 16, dtype=torch.float64)
NOISE = 0.5


def temperature(w: Tensor) -> Tensor:
    """Return the temperature over time: a room of 20 degrees plus ``w[0]`` tens, and a rate of ``exp(w[1])``."""
    return 20 + 10 * w[0] * torch.exp(-w[1].exp() * MINUTES)


def main() -> None:
    torch.manual_seed(0)
    prior = torch.tensor([5.0, -2.0], dtype=torch.float64)
    data = temperature(torch.tensor([6.5, -2.5], dtype=torch.float64))
    data = data + NOISE * torch.randn(len(data), dtype=torch.float64)

    def log_joint(w: Tensor) -> Tensor:
        return -0.5 * ((temperature(w) - data) / NOISE).square().sum() - 0.5 * (w - prior).square().sum()

    values = fit_gaussian(log_joint, prior, 100.0, curvature="reinforce")
    print(f"from {values.nfev} values:         {values.mean} ± {values.posterior.std()}")
    noise = NOISE**2 * torch.eye(len(data), dtype=torch.float64)
    ensemble = ensemble_inversion(temperature, data, noise, prior, prior_precision=1.0, members=16)
    print(f"from {ensemble.nfev} runs of an ensemble: {ensemble.mean} ± {ensemble.posterior.std()}")


if __name__ == "__main__":
    main()
