"""Small problems on which posteriors are compared: pictures, text and regressions, with shifted and
foreign inputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample, one_hot

from ...data.datasets import load_images, load_text

Data = tuple[Tensor, Tensor]
LETTERS = " abcdefghijklmnopqrstuvwxyz'.,;\n"
"""What is left of a text: other characters count as spaces."""
CONTEXT = 6
"""So many letters tell the next one."""


@dataclass(frozen=True)
class Problem:
    """Data for training and tests, and a network.

    Attributes:
        train: Inputs and targets.
        valid: The same, to choose options and temperatures by.
        tests: The same by name; the first one is like the training data, the others are shifted.
        build: Makes a new network with the given rate of dropout.
        variance: For regressions, that of the noise in the loss; ``None`` for classes.
        foreign: Inputs from elsewhere, which a model should be unsure about.
        epochs: How often training goes through the data.
        batch: Size of a batch.
    """

    train: Data
    valid: Data
    tests: Mapping[str, Data]
    build: Callable[[float], nn.Module]
    variance: float | None = None
    foreign: Tensor | None = None
    epochs: int = 8
    batch: int = 50

    @property
    def size(self) -> int:
        """Number of examples for training."""
        return len(self.train[0])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean negative log-likelihood, up to a constant."""
        if self.variance is None:
            return nn.functional.cross_entropy(outputs, targets)
        return (outputs - targets).square().mean() / (2 * self.variance)


def rotated(pictures: Tensor, degrees: float) -> Tensor:
    """Turn pictures around their middle."""
    angle = math.radians(degrees)
    turn = torch.tensor(
        [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    )
    grid = affine_grid(turn.expand(len(pictures), 2, 3), list(pictures.shape), align_corners=False)
    return grid_sample(pictures, grid, padding_mode="border", align_corners=False)


def noisy(inputs: Tensor, size: float) -> Tensor:
    """Add noise, the same at every call."""
    return inputs + size * torch.randn(inputs.shape, generator=Generator().manual_seed(1))


def _pictures(
    name: str, count: int, pool: int, tests: int = 2000
) -> tuple[Data, Data, dict[str, Data]]:
    images = load_images(name)
    order = torch.randperm(len(images.train_labels), generator=Generator().manual_seed(0))

    def prepared(pixels: Tensor) -> Tensor:
        return avg_pool2d(images.normalize(pixels), pool) if pool > 1 else images.normalize(pixels)

    parts = order[:count], order[count : count + 500]
    train, valid = (
        (prepared(images.train_pixels[part]), images.train_labels[part]) for part in parts
    )
    x, y = prepared(images.test_pixels[:tests]), images.test_labels[:tests]
    return (
        train,
        valid,
        {"clean": (x, y), "rotated": (rotated(x, 30.0), y), "noisy": (noisy(x, 0.6), y)},
    )


def _mlp(sizes: tuple[int, ...], dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(before, after), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def _convnet(dropout: float) -> nn.Sequential:
    drop: list[nn.Module] = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        *drop,
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        *drop,
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def fashion() -> Problem:
    """Clothing at 14 x 14 pixels, a network with two hidden layers; foreign are gray
    photographs.
    """
    train, valid, tests = _pictures("fashion-mnist", 3000, 2)
    foreign = _pictures("cifar-10", 10, 2, tests=1000)[2]["clean"][0].mean(1, keepdim=True)[
        ..., 1:15, 1:15
    ]
    return Problem(train, valid, tests, lambda p: _mlp((196, 96, 64, 10), p), foreign=foreign)


def cifar() -> Problem:
    """Photographs at 16 x 16 pixels, a network with two convolutions; foreign are pieces of
    clothing.
    """
    train, valid, tests = _pictures("cifar-10", 3000, 2)
    clothes = _pictures("fashion-mnist", 10, 2, tests=1000)[2]["clean"][0]
    foreign = nn.functional.pad(clothes, (1, 1, 1, 1), mode="replicate").expand(-1, 3, -1, -1)
    return Problem(train, valid, tests, _convnet, foreign=foreign)


def digits() -> Problem:
    """Digits of scikit-learn, a small network; foreign is noise."""
    train, valid, tests = _pictures("digits", 900, 1)
    valid = valid[0][:300], valid[1][:300]
    foreign = torch.randn(500, 1, 8, 8, generator=Generator().manual_seed(2))
    return Problem(
        train, valid, tests, lambda p: _mlp((64, 64, 10), p), foreign=foreign, epochs=16, batch=32
    )


def text() -> Problem:
    """The next letter of Shakespeare, given six; shifted by wrong letters, foreign are shuffled
    ones.
    """
    source = load_text("shakespeare")
    table = torch.tensor([max(0, LETTERS.find(c.lower())) for c in source.alphabet])
    generator = Generator().manual_seed(0)

    def windows(numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
        start = torch.randint(len(numbers) - CONTEXT - 1, (count, 1), generator=generator)
        found = table[numbers[start + torch.arange(CONTEXT + 1)]]
        return found[:, :-1], found[:, -1]

    def prepared(data: Data) -> Data:
        return one_hot(data[0], len(LETTERS)).float(), data[1]

    train, valid, test = (
        windows(source.train, 4000),
        windows(source.train, 500),
        windows(source.test, 2000),
    )
    wrong = torch.rand(test[0].shape, generator=generator) < 0.2
    other = torch.randint(len(LETTERS), test[0].shape, generator=generator)
    tests = {
        "clean": prepared(test),
        "wrong letters": prepared((torch.where(wrong, other, test[0]), test[1])),
    }
    width = CONTEXT * len(LETTERS)
    return Problem(
        prepared(train),
        prepared(valid),
        tests,
        lambda p: _mlp((width, 64, len(LETTERS)), p),
        foreign=one_hot(other[:1000], len(LETTERS)).float(),
    )


def _regression(data: tuple[Any, Any], variance: float) -> Problem:
    """Split rows into three parts and standardize; shifted are noisy inputs."""
    x, y = (
        torch.tensor(data[0], dtype=torch.float32),
        torch.tensor(data[1], dtype=torch.float32)[:, None],
    )
    order = torch.randperm(len(x), generator=Generator().manual_seed(0))
    first, second = len(x) // 2, 3 * len(x) // 4
    train = order[:first]
    x, y = (x - x[train].mean(0)) / x[train].std(0), (y - y[train].mean(0)) / y[train].std(0)
    parts = [(x[part], y[part]) for part in (train, order[first:second], order[second:])]
    tests = {"clean": parts[2], "noisy": (noisy(parts[2][0], 0.5), parts[2][1])}
    build: Callable[[float], nn.Module] = lambda p: _mlp((x.shape[1], 50, 1), p)  # noqa: E731
    return Problem(
        parts[0], parts[1], tests, build, variance=variance, epochs=max(12, 9000 // first), batch=32
    )


def diabetes() -> Problem:
    """Progress of a disease, of 442 patients."""
    from sklearn.datasets import load_diabetes

    return _regression(load_diabetes(return_X_y=True), variance=0.5)


def friedman() -> Problem:
    """Friedman's first function of ten inputs, 1,200 examples with noise."""
    from sklearn.datasets import make_friedman1

    return _regression(make_friedman1(1200, noise=1.0, random_state=0), variance=0.1)


def impedance() -> Problem:
    """Friedman's third function, the phase of a circuit, 1,200 examples with noise."""
    from sklearn.datasets import make_friedman3

    return _regression(make_friedman3(1200, noise=0.1, random_state=0), variance=0.2)


PROBLEMS: Mapping[str, Callable[[], Problem]] = {
    "fashion": fashion,
    "cifar": cifar,
    "digits": digits,
    "text": text,
    "diabetes": diabetes,
    "friedman": friedman,
    "impedance": impedance,
}


@lru_cache
def problem_of(name: str) -> Problem:
    """Return a problem, made once."""
    return PROBLEMS[name]()
