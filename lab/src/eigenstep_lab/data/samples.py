"""Pictures and text in memory, ready to draw batches from."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from ..console import UserError

Labeled = tuple[NDArray[np.uint8], NDArray[Any]]
"""Pictures as an array N × height × width, or × channels, of bytes, and their N class numbers."""


@dataclass(frozen=True)
class Images:
    """Labeled pictures.

    Attributes:
        train_pixels: Bytes, N × channels × height × width.
        train_labels: Class numbers, N.
        test_pixels: The same for pictures held out.
        test_labels: The same for pictures held out.
        classes: Names of the classes.
    """

    train_pixels: Tensor
    train_labels: Tensor
    test_pixels: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]

    @classmethod
    def from_arrays(cls, train: Labeled, test: Labeled, classes: tuple[str, ...]) -> Images:
        """Build from arrays in the layout of picture files, channels last or none."""

        def tensors(part: Labeled) -> tuple[Tensor, Tensor]:
            pixels, labels = part
            pixels = pixels[..., None] if pixels.ndim == 3 else pixels
            return torch.tensor(pixels.transpose(0, 3, 1, 2)), torch.tensor(
                labels, dtype=torch.int64
            )

        return cls(*tensors(train), *tensors(test), classes)

    def __post_init__(self) -> None:
        """Check that the parts belong together."""
        for kind, pixels, labels in (
            ("train", self.train_pixels, self.train_labels),
            ("test", self.test_pixels, self.test_labels),
        ):
            if pixels.ndim != 4 or pixels.shape[1:] != self.train_pixels.shape[1:]:
                raise UserError(
                    f"{kind}_pixels have shape {tuple(pixels.shape)}, expected N × channels × "
                    "height × width"
                )
            if len(pixels) != len(labels) or len(labels) == 0:
                raise UserError(f"there are {len(pixels)} {kind} pictures but {len(labels)} labels")
            if labels.min() < 0 or labels.max() >= len(self.classes):
                raise UserError(f"a {kind} label is outside 0 ... {len(self.classes) - 1}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a picture."""
        channels, height, width = self.train_pixels.shape[1:]
        return channels, height, width

    def normalize(self, pixels: Tensor) -> Tensor:
        """Turn bytes into floats with mean 0 and variance 1 per channel."""
        mean, std = self._moments
        return (pixels.float() / 255 - mean) / std

    def batch(
        self, size: int, generator: Generator, *, train: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Draw normalized pictures and their labels at random, with replacement."""
        pixels, labels = (
            (self.train_pixels, self.train_labels)
            if train
            else (self.test_pixels, self.test_labels)
        )
        index = torch.randint(len(labels), (size,), generator=generator)
        return self.normalize(pixels[index]), labels[index]

    @functools.cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        # Over at most 10,000 pictures, evenly spread: more would only cost memory.
        sample = self.train_pixels[:: max(1, len(self.train_pixels) // 10_000)].float() / 255
        std, mean = torch.std_mean(sample, dim=(0, 2, 3), keepdim=True)
        return mean[0], std[0].clamp_min(1e-3)


@dataclass(frozen=True)
class Text:
    """A text as character numbers.

    Attributes:
        train: All but the last tenth of the text.
        test: The last tenth.
        alphabet: The characters that occur; number i stands for `alphabet[i]`.
    """

    train: Tensor
    test: Tensor
    alphabet: str

    @classmethod
    def from_string(cls, text: str) -> Text:
        """Number the characters of a text in alphabetical order and split it."""
        codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        alphabet, numbers = np.unique(codes, return_inverse=True)
        start = len(text) * 9 // 10
        indices = torch.tensor(numbers, dtype=torch.int64)
        return cls(indices[:start], indices[start:], "".join(map(chr, alphabet)))

    def batch(
        self, size: int, length: int, generator: Generator, *, train: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Draw passages of size × length; the targets are one character later."""
        numbers = self.train if train else self.test
        if not 0 < length < len(numbers):
            raise UserError(
                f"length must be between 1 and {len(numbers) - 1} characters of this text, got "
                f"{length}"
            )
        start = torch.randint(len(numbers) - length, (size, 1), generator=generator)
        passages = numbers[start + torch.arange(length + 1)]
        return passages[:, :-1], passages[:, 1:]
