"""The tasks of the suite: each can be learned, repeats itself, and belongs to one half."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Generator

from eigenstep_lab.bench.suite import language, sources
from eigenstep_lab.bench.suite.catalog import HALVES, TASKS
from eigenstep_lab.data.samples import Images, Text
from eigenstep_lab.tasks import Problem, Task, run_one

CACHED = (sources.held_out_pictures, sources.tokens, sources.words, sources.neighbor_graph)
"""What is made of data, and kept."""


def pictures(name: str) -> Images:
    """Return smooth noise in place of photographs or pictures of clothing."""
    generator = Generator().manual_seed(len(name))
    shape = (3, 32, 32) if name == "cifar-10" else (1, 28, 28)
    parts = []
    for count in (3200, 400):
        noise = torch.rand(count, shape[0], 8, 8, generator=generator)
        pixels = torch.nn.functional.interpolate(noise, shape[1:], mode="bilinear")
        labels = (10 * noise.flatten(1)[:, 0]).long()
        parts += [(255 * pixels).to(torch.uint8), labels]
    return Images(*parts, tuple("abcdefghij"))


def works() -> dict[str, str]:
    """Return texts of rare and frequent words in place of Shakespeare's."""
    random = np.random.RandomState(0)
    letters = list("abcdefghijklmnopqrstuvwxyz'ABCDEFGHIJKLMNOPQRSTUVWXYZ.,;:!?-0123456789")
    texts = {}
    for name in (*sources.POEMS, "hamlet", "macbeth"):
        ranks = random.zipf(1.5, 3000) % 5000
        words = [np.base_repr(rank, 36).lower() + letters[rank % 50] for rank in ranks]
        texts[name] = " ".join([*words, *letters]) + "\n"
    return texts


@pytest.fixture(autouse=True, scope="module")
def _stand_ins() -> Iterator[None]:
    """Let the suite have data of the right form, which need not be fetched."""
    texts = works()
    whole = Text.from_string("".join(texts.values()))
    kept = {name: pictures(name) for name in ("fashion-mnist", "cifar-10")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "pictures", kept.__getitem__)
        patch.setattr(sources, "characters", lambda: whole)
        patch.setattr(sources, "works", lambda: texts)
        patch.setattr(language, "PRETRAINING_STEPS", 2)
        caches = (*CACHED, language.pretrained)
        for cached in caches:
            cached.cache_clear()
        yield
    for cached in caches:
        cached.cache_clear()


def test_halves_are_a_partition() -> None:
    first, second = (set(half) for half in HALVES.values())
    assert not first & second
    assert first | second == set(TASKS)
    assert len(first) == len(second) >= 7


def problem(name: str, seed: int) -> Problem:
    torch.manual_seed(seed)
    return TASKS[name].build(seed)


@pytest.mark.parametrize("name", TASKS)
def test_a_small_step_lowers_the_loss_of_its_batch(name: str) -> None:
    found = problem(name, 3)

    def loss() -> torch.Tensor:
        torch.manual_seed(0)  # for dropout
        return found.loss(Generator().manual_seed(5))

    before = loss()
    trained = [p for p in found.model.parameters() if p.requires_grad]
    assert torch.equal(weights(found), weights(problem(name, 3)))
    assert not torch.equal(weights(found), weights(problem(name, 4)))
    before.backward()
    assert all(p.grad is not None for p in trained)
    torch.optim.SGD(trained, lr=1e-3).step()
    assert loss().item() < before.item()


def weights(found: Problem) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in found.model.parameters() if p.requires_grad])


@pytest.mark.parametrize("name", ["pinn", "graph", "lora"])
def test_runs_repeat_themselves(name: str) -> None:
    def run(seed: int) -> float:
        state = torch.get_rng_state()
        torch.rand(7)  # what was drawn before must not matter
        record = run_one(
            TASKS[name],
            lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
            seed=seed,
            steps=3,
        )
        torch.set_rng_state(state)
        return record.loss

    assert run(0) == run(0) != run(1)


def test_divergence_is_an_infinite_loss() -> None:
    def build(seed: int) -> Problem:
        model = torch.nn.Linear(1, 1)
        return Problem(model, lambda generator: model(torch.ones(1, 1)).square().sum(), lambda: 0.0)

    task = Task("a line", build, steps=100)
    assert run_one(task, lambda model: torch.optim.SGD(model.parameters(), lr=1e3)).loss == math.inf
    assert run_one(task, lambda model: torch.optim.SGD(model.parameters(), lr=1e-3)).loss == 0.0


def test_schedule_warms_up_and_ends_at_zero() -> None:
    rates = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            rates.append(self.param_groups[0]["lr"])

    def build(seed: int) -> Problem:
        model = torch.nn.Linear(1, 1)
        return Problem(model, lambda generator: model(torch.ones(1, 1)).square().sum(), lambda: 0.0)

    run_one(Task("a line", build, steps=100), lambda model: Watched(model.parameters(), lr=2.0))
    assert rates[0] == pytest.approx(2.0 / 5)
    assert max(rates) == 2.0
    assert rates[-1] < 1e-2
    assert len(rates) == 100


@pytest.mark.parametrize("text", ["aaaaab", "aabaaa", "abab", "aaa", "ba"])
def test_byte_pairs_are_merged_from_left_to_right(text: str) -> None:
    merged = sources.merged(np.array([ord(c) for c in text]), ord("a"), ord("a"), ord("X"))
    assert "".join(map(chr, merged)) == text.replace("aa", "X")
    merged = sources.merged(np.array([ord(c) for c in text]), ord("a"), ord("b"), ord("X"))
    assert "".join(map(chr, merged)) == text.replace("ab", "X")
