"""Read datasets as they are published; a damaged file gives an error that names it."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from ..console import UserError

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]
MOST_BYTES = 1 << 30
"""Files that are larger, when unpacked, are not read: they would fill the memory."""
IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"}
)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a decoder raises while it reads `path` into one clear sentence."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing") from error
    except PermissionError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(
            f"{path} has more than {Image.MAX_IMAGE_PIXELS:,} pixels: make it smaller"
        ) from error
    except Exception as error:  # a damaged file can make a decoder raise anything
        raise UserError(
            f"{path} is damaged or incomplete ({error}): delete it and fetch it again"
        ) from error


def read_idx(path: Path) -> Bytes:
    """Read a gzipped IDX file of bytes, the format of MNIST and its relatives."""
    with reading(path), gzip.open(path) as file:
        start = file.read(4)
        if start[:3] != b"\0\0\x08":
            raise UserError(f"{path} is not an IDX file of bytes: it starts with {start!r}")
        shape = struct.unpack(f">{start[3]}I", file.read(4 * start[3]))
        promised = math.prod(shape)
        if promised > MOST_BYTES:
            raise UserError(
                f"{path} promises {promised:,} bytes, more than the {MOST_BYTES:,} that are read"
            )
        raw = file.read(promised + 1)
        if len(raw) != promised:
            came = f"{len(raw)} came" if len(raw) < promised else "more came"
            raise UserError(f"{path} is damaged: its header promises {promised} bytes, {came}")
        return np.frombuffer(raw, np.uint8).reshape(shape)


@contextlib.contextmanager
def open_picture(path: Path) -> Iterator[Image.Image]:
    """Open an image file that is not too large to be decoded."""
    with reading(path), warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(path) as picture:
            yield picture


def read_picture(path: Path, size: int | None = None) -> Bytes:
    """Read one image as height × width × RGB; with `size`, its scaled middle."""
    with open_picture(path) as picture:
        picture.verify()  # checksums, which decoding does not look at; it uses the picture up
    with open_picture(path) as picture:
        rgb = picture.convert("RGB")
        return np.asarray(
            rgb
            if size is None
            else ImageOps.fit(rgb, (size, size), method=Image.Resampling.BICUBIC)
        )


def read_cifar_sheet(path: Path) -> Bytes:
    """Read a PNG sheet whose rows of 1024 pixels are pictures; return N × 32 × 32 × RGB."""
    sheet = read_picture(path)
    if sheet.shape[1] != 1024:
        raise UserError(
            f"{path} is no CIFAR-10 sheet: its rows should have 1024 pixels, not {sheet.shape[1]}"
        )
    return sheet.reshape(-1, 32, 32, 3)


def read_json_labels(path: Path) -> Labels:
    """Read a JSON list of class numbers."""
    with reading(path):
        labels = np.array(json.loads(_limited(path)))
        if labels.ndim != 1 or labels.dtype.kind != "i":
            raise UserError(f"{path} is damaged: it should hold one list of whole numbers")
        return labels.astype(np.int64)


def _limited(path: Path) -> bytes:
    """Read a file that is not too large."""
    with path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise UserError(f"{path} has more than {MOST_BYTES:,} bytes: use a smaller file")
    return raw


def read_text(path: Path) -> str:
    """Read a UTF-8 text file."""
    with reading(path):
        text = _limited(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    if not text or "\0" in text:
        raise UserError(f"{path} is {'binary' if text else 'empty'}: expected a text file in UTF-8")
    return text


def list_image_folder(folder: Path) -> tuple[list[Path], Labels, tuple[str, ...]]:
    """List pictures in `folder/<class>/`, their class numbers and the classes, sorted."""
    classes = (
        tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))
        if folder.is_dir()
        else ()
    )
    paths, labels = [], []
    for number, name in enumerate(classes):
        pictures = sorted(
            path for path in (folder / name).iterdir() if path.suffix.lower() in IMAGE_SUFFIXES
        )
        if not pictures:
            raise UserError(
                f"{folder / name} has no pictures ({', '.join(sorted(IMAGE_SUFFIXES))})"
            )
        paths += pictures
        labels += [number] * len(pictures)
    if not paths:
        raise UserError(f"{folder} should be a folder with one subfolder of pictures per class")
    return paths, np.array(labels, dtype=np.int64), classes


def list_picture_parts(
    folder: Path,
) -> tuple[dict[str, tuple[list[Path], Labels]], tuple[str, ...]]:
    """List the pictures of `folder/train` and `folder/val`, and their classes."""
    listed = {part: list_image_folder(folder / part) for part in ("train", "val")}
    classes = listed["train"][2]
    if listed["val"][2] != classes:
        odd = sorted(set(classes) ^ set(listed["val"][2]))
        raise UserError(
            f"{folder}/train and {folder}/val must have the same classes; only one has "
            f"{', '.join(odd)}"
        )
    return {part: (paths, labels) for part, (paths, labels, _) in listed.items()}, classes
