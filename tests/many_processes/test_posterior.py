"""A posterior on two ranks: they draw different weights, learn from both, and keep the
same state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eigenstep.optim import draws

from .posterior import STEPS, loss_of, network, optimizer_of, weights
from .ranks import Results, results, shared_folder

KINDS = ("squared", "squared with DDP", "reparametrization", "reparametrization with DDP")


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Results:
    folder: Path = shared_folder(tmp_path_factory, worker_id, "posterior-ranks")
    return results(folder, "many_processes.posterior")


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_draw_different_weights_and_agree_to_the_bit(found: Results, kind: str) -> None:
    first, second = (rank[kind] for rank in found["posteriors", 2])
    assert torch.equal(first["drawn"][0], second["drawn"][0])  # the first step is taken at the mean
    assert all((a != b).all() for a, b in zip(first["drawn"][1:], second["drawn"][1:], strict=True))
    assert torch.equal(first["weights"], second["weights"])
    assert all(torch.equal(a, b) for a, b in zip(first["states"], second["states"], strict=True))


@pytest.mark.parametrize("curvature", ["squared", "reparametrization"])
def test_two_ranks_are_one_process_with_two_draws(
    found: Results, curvature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If draw number one of a single process has the noise of the second rank."""
    seed = draws._seed

    def other_seed(group: Any, number: int, ranks: int) -> int:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: number)
        return seed(group, 0, 2)

    monkeypatch.setattr(draws, "_seed", other_seed)
    model = network()
    optimizer = optimizer_of(model, curvature)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            with optimizer.sampled_params(train=True):
                loss_of(model, part, 2).backward()
        optimizer.step()
    ranks = found["posteriors", 2][0][curvature]
    torch.testing.assert_close(weights(model), ranks["weights"], rtol=1e-9, atol=1e-12)
    states = [x for param in model.parameters() for x in optimizer.state[param].values()]
    for own, other in zip(states, ranks["states"], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-7, atol=1e-10)


def test_ddp_changes_nothing_for_squared_gradients(found: Results) -> None:
    plain, wrapped = (found["posteriors", 2][0][kind] for kind in KINDS[:2])
    torch.testing.assert_close(plain["weights"], wrapped["weights"], rtol=1e-9, atol=1e-12)


def test_ddp_keeps_the_mean_of_the_curvature() -> None:
    """Noise that meets averaged gradients counts as many times as there are ranks, and is right on
    average.
    """
    torch.manual_seed(0)
    noise = torch.randn(2, 400_000)
    own = 3 * noise + torch.randn(2, 400_000)  # gradients of curvature 3
    averaged = own.mean(0)
    assert abs((noise * own).mean() - 3) < 0.03
    assert abs(2 * (noise * averaged).mean() - 3) < 0.03


def test_ranks_without_gradients_are_told_apart(found: Results) -> None:
    assert all("different parameters" in text for text in found["different_gradients", 2])
