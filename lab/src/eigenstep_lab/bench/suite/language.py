"""Tasks on the works of Shakespeare: the next character or token, and pairs and bags of words with
rare words.
"""

from __future__ import annotations

import copy
from functools import lru_cache

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ...models.transformers import GPT
from ...tasks import TEST_SEED, Problem
from . import sources
from .networks import LowRank, MixtureText, Recommender, RecurrentText
from .vision import begin_as_torch

PRETRAINING_STEPS = 300


def next_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of what comes next."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def prediction(model: nn.Module, train: Tensor, test: Tensor, batch: int, length: int) -> Problem:
    """Predict what comes next in a text, given as numbers."""

    def loss(generator: Generator) -> Tensor:
        return next_loss(model, sources.passages(train, batch, length, generator))

    def held_out() -> float:
        inputs, targets = sources.cut(test, length, 32_768 // length)
        parts = list(zip(torch.split(inputs, 64), torch.split(targets, 64), strict=True))
        return sum(next_loss(model, part).item() * len(part[0]) for part in parts) / len(inputs)

    return Problem(model, loss, held_out)


def gpt_characters(seed: int) -> Problem:
    """A GPT of width 96 with torch's initialization; large batches of characters."""
    text = sources.characters()
    model = GPT(len(text.alphabet), length=64, width=96, depth=3, seed=seed)
    return prediction(begin_as_torch(model), text.train, text.test, batch=32, length=64)


def gpt_tokens(seed: int, width: int = 128) -> Problem:
    """A GPT with GPT-2's initialization; small batches of byte pairs."""
    train, test = sources.tokens(512)
    return prediction(
        GPT(512, length=64, width=width, depth=2, seed=seed), train, test, batch=8, length=64
    )


def lstm(seed: int) -> Problem:
    """An LSTM on characters."""
    text = sources.characters()
    return prediction(
        RecurrentText(len(text.alphabet), 128, 1), text.train, text.test, batch=32, length=64
    )


def mixture(seed: int) -> Problem:
    """A GPT with stacks of experts on characters, and the usual small loss that
    balances their use.
    """
    text = sources.characters()
    model = MixtureText(len(text.alphabet), length=64, width=64, depth=2, experts=8)
    plain = prediction(model, text.train, text.test, batch=16, length=64)

    def loss(generator: Generator) -> Tensor:
        return plain.loss(generator) + 0.01 * model.balance()

    return Problem(model, loss, plain.held_out)


@lru_cache
def pretrained() -> GPT:
    """Return a GPT that AdamW has trained on the plays; it is the same for all seeds."""
    text = sources.characters()
    plays = sources.join([name for name in sources.works() if name not in sources.POEMS])
    with torch.random.fork_rng(
        devices=[]
    ):  # the first call must leave the random state as later ones do
        model = GPT(len(text.alphabet), length=64, width=64, depth=2, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=PRETRAINING_STEPS + 1, pct_start=0.1
    )
    generator = Generator().manual_seed(0)
    for _ in range(PRETRAINING_STEPS):
        optimizer.zero_grad()
        next_loss(model, sources.passages(plays, 16, 64, generator)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return model


def lora(seed: int) -> Problem:
    """Low-rank corrections of a GPT that has read the plays; now it reads the poems, of which a
    tenth is held out.
    """
    model = copy.deepcopy(pretrained()).requires_grad_(False)
    for block in model.blocks:
        for owner, names in (
            (block.attention, ("query", "key", "value", "out")),
            (block, ("mlp_in", "mlp_out")),
        ):
            for name in names:
                setattr(owner, name, LowRank(getattr(owner, name), rank=8))
    poems = sources.join(sources.POEMS)
    # Held out: every tenth thousand of characters, since the poems differ in style.
    held = torch.arange(len(poems)) // 1000 % 10 == 9
    return prediction(model, poems[~held], poems[held], batch=16, length=64)


def recommender(seed: int) -> Problem:
    """Which words follow each other: words as users and items of a recommender, most of them rare.

    Each pair that occurs comes with four drawn by the second word's frequency. A tenth of the pairs
    is held out.
    """
    words = sources.words(12_000)
    model = Recommender(words.vocabulary, words.vocabulary, 32)
    pairs = torch.stack([words.numbers[:-1], words.numbers[1:]], dim=1)
    held = torch.arange(len(pairs)) // 50 % 10 == 9
    train, test = pairs[~held], pairs[held]

    def pair_loss(chosen: Tensor, generator: Generator) -> Tensor:
        others = train[torch.randint(len(train), (len(chosen), 4), generator=generator), 1]
        items = torch.cat([chosen[:, 1:], others], dim=1)
        logits = model(chosen[:, :1].expand_as(items), items)
        happened = torch.zeros_like(logits)
        happened[:, 0] = 1.0
        return F.binary_cross_entropy_with_logits(logits, happened)

    def loss(generator: Generator) -> Tensor:
        return pair_loss(train[torch.randint(len(train), (2048,), generator=generator)], generator)

    def held_out() -> float:
        return pair_loss(test[::2], Generator().manual_seed(TEST_SEED)).item()

    return Problem(model, loss, held_out)


def bag_of_words(seed: int) -> Problem:
    """Which work a passage of 20 words is of, by the mean of its words' embeddings; most words are
    rare.
    """
    words = sources.words(20_000)
    model = nn.Sequential()
    model.add_module("embed", nn.EmbeddingBag(words.vocabulary, 64, mode="mean"))
    model.add_module("hidden", nn.Linear(64, 64))
    model.add_module("activation", nn.ReLU())
    model.add_module("head", nn.Linear(64, words.works))
    count = len(words.numbers) // 20
    bags = words.numbers[: 20 * count].reshape(count, 20)
    labels = words.work[: 20 * count : 20]
    held = torch.arange(count) % 5 == 4
    train, test = (bags[~held], labels[~held]), (bags[held], labels[held])

    def loss(generator: Generator) -> Tensor:
        chosen = torch.randint(len(train[0]), (256,), generator=generator)
        return F.cross_entropy(model(train[0][chosen]), train[1][chosen])

    return Problem(model, loss, lambda: F.cross_entropy(model(test[0]), test[1]).item())
