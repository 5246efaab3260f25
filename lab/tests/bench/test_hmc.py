"""Hamiltonian Monte Carlo against known moments, and its diagnostics against chains with known
ones.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eigenstep.inference import Gaussian
from eigenstep_lab.baselines.hmc import diagnostics, sample_posterior

pytestmark = pytest.mark.usefixtures("float64")


def test_moments_of_a_skewed_distribution() -> None:
    """The logarithm of a gamma variable, whose moments are known, beside a normal one."""

    def log_joint(w: dict[str, Tensor]) -> Tensor:
        return (4 * w["a"] - w["a"].exp()).sum() - 0.5 * w["b"].square().sum()

    metric = Gaussian.start(
        {"a": torch.full((1,), 1.3), "b": torch.zeros(2, 1)}, {"a": 2.0, "b": "full"}
    )
    chains = sample_posterior(log_joint, metric, chains=8, draws=250, warmup=100)
    a = chains.draws["a"]  # type: ignore[call-overload]
    rhat, effective = diagnostics(a)
    assert rhat.item() < 1.02
    error = 4 * (torch.special.polygamma(1, torch.tensor(4.0)) / effective).sqrt()
    assert abs(a.mean() - torch.digamma(torch.tensor(4.0))) < error
    assert a.var().item() == pytest.approx(
        torch.special.polygamma(1, torch.tensor(4.0)).item(), rel=0.2
    )
    assert 0.6 < chains.acceptance < 0.98
    assert chains.stacked()["b"].shape == (2000, 2, 1)  # type: ignore[call-overload]


def test_diagnostics() -> None:
    noise, chain, memory = torch.randn(4000, 4), torch.zeros(4000, 4), 0.8
    for t in range(1, 4000):
        chain[t] = memory * chain[t - 1] + noise[t]
    rhat, effective = diagnostics(chain)
    assert rhat.item() < 1.05
    assert effective.item() == pytest.approx(16000 * (1 - memory) / (1 + memory), rel=0.25)
    apart = noise + torch.arange(4.0)
    assert diagnostics(apart)[0].item() > 1.5
    assert diagnostics(noise)[1].item() == pytest.approx(16000, rel=0.1)


def test_bad_starts() -> None:
    with pytest.raises(ValueError, match="finite at all draws"):
        sample_posterior(lambda w: w.sum().log(), Gaussian.start(torch.zeros(1)), chains=20)
    with pytest.raises(ValueError, match="draws must be"):
        sample_posterior(lambda w: -(w.sum() ** 2), Gaussian.start(torch.zeros(1)), draws=0)
    with pytest.raises(TypeError, match="metric must be a Gaussian"):
        sample_posterior(lambda w: -(w.sum() ** 2), torch.zeros(2))  # type: ignore[arg-type]
