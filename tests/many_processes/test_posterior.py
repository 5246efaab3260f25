"""A posterior on two ranks: they draw different weights, learn from both, keep the same state."""

from __future__ import annotations

import pytest
import torch

from eigenstep.posterior import posterior
from eigenstep.posterior.draws import PosteriorOptions

from .posterior import STEPS, loss_of, network, optimizer_of, weights
from .ranks import Results, fixtures

ranks_folder, ranks = fixtures("many_processes.posterior")


@pytest.mark.parametrize("kind", ["plain", "DDP"])
def test_ranks_draw_different_weights_and_agree_to_the_bit(ranks: Results, kind: str) -> None:
    first, second = (rank[kind] for rank in ranks["posteriors", 2])
    assert torch.equal(first["drawn"][0], second["drawn"][0])  # the first step is taken at the mean
    assert all((a != b).all() for a, b in zip(first["drawn"][1:], second["drawn"][1:], strict=True))
    assert torch.equal(first["weights"], second["weights"])
    assert all(torch.equal(a, b) for a, b in zip(first["states"], second["states"], strict=True))


def test_two_ranks_are_one_process_with_two_draws(
    ranks: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If draw number one of a single process has the noise of the second rank."""
    seed_of = posterior.seed_of

    def other_seed(options: PosteriorOptions, step: int, number: int, _: int) -> int:
        return seed_of(options, step, 0, number)

    monkeypatch.setattr(posterior, "seed_of", other_seed)
    model = network()
    optimizer = optimizer_of(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            with optimizer.sampled_params(train=True):
                loss_of(model, part, 2).backward()
        optimizer.step()
    both = ranks["posteriors", 2][0]["plain"]
    torch.testing.assert_close(weights(model), both["weights"], rtol=1e-9, atol=1e-12)
    states = [x for param in model.parameters() for x in optimizer.state[param].values()]
    torch.testing.assert_close(states, both["states"], rtol=1e-7, atol=1e-10)


def test_ddp_changes_nothing_for_squared_gradients(ranks: Results) -> None:
    plain, wrapped = ranks["posteriors", 2][0].values()
    torch.testing.assert_close(plain["weights"], wrapped["weights"], rtol=1e-9, atol=1e-12)


def test_ddp_keeps_the_mean_of_the_curvature() -> None:
    """Noise that meets averaged gradients counts once for each rank, and is right on average."""
    torch.manual_seed(0)
    noise = torch.randn(2, 400_000)
    own = 3 * noise + torch.randn(2, 400_000)  # gradients of curvature 3
    averaged = own.mean(0)
    assert abs((noise * own).mean() - 3) < 0.03
    assert abs(2 * (noise * averaged).mean() - 3) < 0.03


def test_ranks_without_gradients_are_told_apart(ranks: Results) -> None:
    assert all("different parameters" in text for text in ranks["different_gradients", 2])
