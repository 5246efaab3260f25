"""Training data, step by step: which examples a step sees is a function of seed and step alone.

A run that starts again in the middle therefore sees the same batches as one that never stopped,
without any state of random generators to keep. `Feed` says what every feed can do.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..console import UserError
from ..data.datasets import DATASETS, data_root, load_images, load_text
from ..data.files import list_picture_parts, open_picture
from ..data.samples import Images, Text
from .augment import cut, middle_square, random_box
from .settings import Settings

Batch = tuple[Tensor, Tensor]
Example = tuple[Path, int, Any]
"""A picture's file, its class, and five random numbers for its crop, or None."""

ORDER, CROP, MIX, STEP = range(4)
"""What chance is needed for; each use has its own random numbers."""

# The usual statistics of photographs, so that nobody has to read a whole folder to learn them.
PHOTO_MEAN, PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def chance(seed: int, use: int, number: int) -> np.random.Generator:
    """Return the random numbers that belong to a seed, a use and a step (or epoch)."""
    return np.random.default_rng([seed, use, number])


def test_parts(count: int, settings: Settings) -> list[slice]:
    """Cut `count` held-out examples into batches, as many as are wanted."""
    parts = [slice(start, start + settings.batch) for start in range(0, count, settings.batch)]
    return parts[: settings.test_batches or len(parts)]


class Feed(Protocol):
    """Training data, step by step."""

    pictures: bool
    classes: int
    per_epoch: int

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        """Give the batches of steps `first` to `last` − 1."""

    def held_out(self) -> Iterator[Batch]:
        """Give the held-out data, all of it or as much as was asked for, always the same."""

    def build(self, network: Callable[..., nn.Module], options: dict[str, Any]) -> nn.Module:
        """Build a network that fits the data."""


def open_feed(settings: Settings) -> Feed:
    """Find the data that the settings name."""
    source = settings.data
    if source in DATASETS:
        pictures = DATASETS[source].kind is Images
        return (
            PicturesInMemory(load_images(source), settings)
            if pictures
            else Passages(load_text(source), settings)
        )
    path = next((p for p in (Path(source).expanduser(), data_root() / source) if p.exists()), None)
    if path is None:
        raise UserError(
            f"no data {source!r}: expected one of {', '.join(DATASETS)}, a folder with "
            "train/<class>/* and "
            f"val/<class>/* (here or in {data_root()}), or a text file. `eigenstep data` lists and "
            "fetches datasets"
        )
    return PictureFolder(path, settings) if path.is_dir() else Passages(load_text(path), settings)


class _Pictures:
    """What both kinds of picture feeds share: the order of the pictures."""

    pictures = True

    def __init__(
        self, settings: Settings, shape: tuple[int, int, int], classes: int, count: int
    ) -> None:
        self.settings = settings
        self.shape = shape
        self.classes = classes
        self.count = count
        self.per_epoch = count // settings.batch
        if not self.per_epoch:
            raise UserError(
                f"batch must be at most {count}, the number of training pictures; got "
                f"{settings.batch}"
            )

    def build(self, network: Callable[..., nn.Module], options: dict[str, Any]) -> nn.Module:
        """Build a network for these pictures and classes."""
        return network(self.shape, self.classes, **options)

    def chosen(self, step: int) -> np.ndarray[Any, Any]:
        """Return the numbers of the pictures of a step: each picture at most once in an epoch."""
        epoch, place = divmod(step, self.per_epoch)
        return self._order(epoch)[place * self.settings.batch : (place + 1) * self.settings.batch]

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a feed lives as long as the run
    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        return chance(self.settings.seed, ORDER, epoch).permutation(self.count)

    def crops(self, step: int) -> Any:
        """Return five random numbers, or None, for each picture of a step."""
        if self.settings.crop == 1 and not self.settings.flip:
            return [None] * self.settings.batch
        return chance(self.settings.seed, CROP, step).random((self.settings.batch, 5))


class PicturesInMemory(_Pictures):
    """Small pictures of a named dataset."""

    def __init__(self, images: Images, settings: Settings) -> None:
        """Serve `images` as the settings say."""
        super().__init__(settings, images.shape, len(images.classes), len(images.train_labels))
        self.images = images

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        """Give the batches of some steps."""
        for step in range(first, last):
            index = torch.from_numpy(self.chosen(step))
            pixels = self.images.normalize(self.images.train_pixels[index])
            crops = self.crops(step)
            if crops[0] is not None:
                views = [view(numbers, 1.0, self.settings) for numbers in crops]
                pixels = cut(pixels, [box for box, _ in views], [mirrored for _, mirrored in views])
            yield pixels, self.images.train_labels[index]

    def held_out(self) -> Iterator[Batch]:
        """Give the held-out pictures in their order."""
        for part in test_parts(len(self.images.test_labels), self.settings):
            yield (
                self.images.normalize(self.images.test_pixels[part]),
                self.images.test_labels[part],
            )


def view(numbers: Any, aspect: float, settings: Settings) -> tuple[Any, bool]:
    """Turn the random numbers of a picture into the part to show and whether it is mirrored."""
    whole = settings.crop == 1 or numbers is None
    box = middle_square(aspect) if whole else random_box(numbers, aspect, settings.crop)
    return box, bool(numbers is not None and settings.flip and numbers[4] < 0.5)


class PictureFolder(_Pictures):
    """Pictures in files, decoded when a step needs them, by `workers` processes."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Serve the pictures in `folder/train/<class>/` and `folder/val/<class>/`."""
        self.parts, names = list_picture_parts(folder)
        super().__init__(
            settings, (3, settings.size, settings.size), len(names), len(self.parts["train"][0])
        )

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        """Give the batches of some steps."""
        paths, labels = self.parts["train"]

        def examples(step: int) -> list[Example]:
            numbered = zip(self.chosen(step), self.crops(step), strict=True)
            return [(paths[k], int(labels[k]), numbers) for k, numbers in numbered]

        return self._load(examples(step) for step in range(first, last))

    def held_out(self) -> Iterator[Batch]:
        """Give the middle of every held-out picture, in the order of the files."""
        paths, labels = self.parts["val"]
        return self._load(
            [
                (path, int(label), None)
                for path, label in zip(paths[part], labels[part], strict=True)
            ]
            for part in test_parts(len(paths), self.settings)
        )

    def _load(self, batches: Iterator[list[Example]]) -> Iterator[Batch]:
        sampler: Any = batches  # any iterable of lists of keys will do
        loader = DataLoader(
            _Decoder(self.settings),
            batch_sampler=sampler,
            num_workers=self.settings.workers,
            collate_fn=_collate,
            worker_init_fn=_leave_interrupts_to_the_main_process,
            generator=torch.Generator(),  # not the global one
            pin_memory=torch.cuda.is_available(),
        )
        for loaded in loader:
            if isinstance(loaded, UserError):
                raise loaded
            yield loaded


class _Decoder(Dataset[Any]):
    """Reads pictures; a damaged one becomes a `UserError`, which keeps its message."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __getitem__(self, example: Example) -> tuple[Tensor, int] | UserError:
        path, label, numbers = example
        try:
            return self._read(path, numbers), label
        except UserError as error:
            return error

    def _read(self, path: Path, numbers: Any) -> Tensor:
        size = self.settings.size
        with open_picture(path) as picture:
            (left, top, width, height), mirrored = view(
                numbers, picture.width / picture.height, self.settings
            )
            # Lets a JPEG be decoded at the smallest scale that still has enough pixels in the part
            # that is wanted.
            picture.draft("RGB", (round(size / width), round(size / height)))
            wide, high = picture.size
            box = (left * wide, top * high, (left + width) * wide, (top + height) * high)
            part = picture.convert("RGB").resize((size, size), Image.Resampling.BICUBIC, box)
            pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1).float() / 255
        normal = (pixels - torch.tensor(PHOTO_MEAN)[:, None, None]) / torch.tensor(PHOTO_STD)[
            :, None, None
        ]
        return normal.flip(2) if mirrored else normal


def _collate(examples: list[tuple[Tensor, int] | UserError]) -> Batch | UserError:
    for example in examples:
        if isinstance(example, UserError):
            return example
    pixels, labels = zip(*examples, strict=True)
    return torch.stack(pixels), torch.tensor(labels)


def _leave_interrupts_to_the_main_process(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Passages:
    """Passages of a text, drawn at random; an epoch is as many characters as the text has."""

    pictures = False

    def __init__(self, text: Text, settings: Settings) -> None:
        """Serve `text` as the settings say."""
        for name in ("mixup", "cutmix", "crop", "flip"):
            if getattr(settings, name) != getattr(Settings(), name):
                raise UserError(f"{name} is for pictures, and {settings.data} is a text")
        if len(text.test) <= settings.length:
            raise UserError(
                f"length must be less than {len(text.test)}, the characters held out for testing "
                "(the last tenth of "
                f"the text); got {settings.length}"
            )
        self.text = text
        self.settings = settings
        self.classes = len(text.alphabet)
        self.per_epoch = max(1, len(text.train) // (settings.batch * settings.length))

    def build(self, network: Callable[..., nn.Module], options: dict[str, Any]) -> nn.Module:
        """Build a network for this alphabet."""
        return network(self.classes, **{"length": self.settings.length, **options})

    def batches(self, first: int, last: int) -> Iterator[Batch]:
        """Give the batches of some steps."""
        for step in range(first, last):
            seed = int(chance(self.settings.seed, ORDER, step).integers(2**63))
            generator = torch.Generator().manual_seed(seed)
            yield self.text.batch(self.settings.batch, self.settings.length, generator)

    def held_out(self) -> Iterator[Batch]:
        """Give the held-out text, passage after passage."""
        length = self.settings.length
        whole = (len(self.text.test) - 1) // length * length
        inputs, targets = (self.text.test[k : k + whole].reshape(-1, length) for k in (0, 1))
        for part in test_parts(len(inputs), self.settings):
            yield inputs[part], targets[part]
