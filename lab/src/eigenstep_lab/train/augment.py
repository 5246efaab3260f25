"""Random changes of training pictures: crops, mirror images, MixUp and CutMix.

All randomness comes from the `numpy.random.Generator` that is passed in, so that a step can be
repeated.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Numbers = NDArray[np.float64]
Box = tuple[float, float, float, float]
"""Left, top, width and height of a part of a picture, as fractions of the whole."""

WIDEST = 4 / 3
"""Crops are at most this many times as wide as high, or as high as wide."""


def middle_square(aspect: float) -> Box:
    """Return the middle square of a picture `aspect` times as wide as high."""
    width = min(1.0, 1 / aspect)
    height = min(1.0, aspect)
    return (1 - width) / 2, (1 - height) / 2, width, height


def random_box(uniforms: Numbers, aspect: float, smallest: float) -> Box:
    """Choose a part of a picture.

    Args:
        uniforms: Four random numbers between 0 and 1: for area, shape, left and top.
        aspect: Width of the picture divided by its height.
        smallest: Smallest area of the part, as a fraction of the whole.
    """
    area = smallest + (1 - smallest) * uniforms[0]
    shape = WIDEST ** (2 * uniforms[1] - 1)
    width = min(1.0, (area * shape / aspect) ** 0.5)
    height = min(1.0, (area / shape * aspect) ** 0.5)
    return (
        float(uniforms[2] * (1 - width)),
        float(uniforms[3] * (1 - height)),
        float(width),
        float(height),
    )


def cut(pictures: Tensor, boxes: list[Box], mirrored: list[bool]) -> Tensor:
    """Cut a part out of each picture and stretch it to the size of the whole, mirrored where asked.

    Args:
        pictures: Floats, batch × channels × height × width.
        boxes: The part of each picture.
        mirrored: Whether left and right are exchanged.
    """
    left, top, width, height = torch.tensor(boxes, dtype=pictures.dtype).unbind(1)
    sign = 1 - 2 * torch.tensor(mirrored, dtype=pictures.dtype)
    zero = torch.zeros_like(left)
    # An affine map from the new picture's coordinates, between -1 and 1, to the old one's.
    across = torch.stack([sign * width, zero, 2 * left + width - 1], dim=1)
    down = torch.stack([zero, height, 2 * top + height - 1], dim=1)
    grid = F.affine_grid(
        torch.stack([across, down], dim=1), list(pictures.shape), align_corners=False
    )
    return F.grid_sample(
        pictures, grid, mode="bilinear", padding_mode="border", align_corners=False
    )


def mix(
    pictures: Tensor,
    labels: Tensor,
    classes: int,
    random: Generator,
    *,
    mixup: float = 0.0,
    cutmix: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Mix each picture with its neighbor; labels become probabilities.

    MixUp (Zhang et al., 2017) averages the two pictures, CutMix (Yun et al., 2019) pastes a
    rectangle of one into the other. The shares are drawn from a Beta(a, a) distribution, once for
    the batch. If both are on, a coin decides.

    Args:
        pictures: Batch × channels × height × width.
        labels: Class numbers.
        classes: How many classes there are.
        random: Decides.
        mixup: The distribution's parameter a for MixUp; 0 turns it off.
        cutmix: The same for CutMix.
    """
    paste = random.random() < 0.5 if mixup and cutmix else bool(cutmix)
    parameter = cutmix if paste else mixup
    if not parameter:
        return pictures, labels
    share = random.beta(parameter, parameter)
    neighbors = pictures.roll(1, 0)
    if paste:
        high, wide = pictures.shape[-2:]
        (top, bottom), (left, right) = (
            _stretch(side, (1 - share) ** 0.5, random) for side in (high, wide)
        )
        pictures = pictures.clone()
        pictures[..., top:bottom, left:right] = neighbors[..., top:bottom, left:right]
        # What the edges of the picture have left of it
        share = 1 - (bottom - top) * (right - left) / (high * wide)
    else:
        pictures = share * pictures + (1 - share) * neighbors
    probabilities = F.one_hot(labels, classes).float()
    return pictures, share * probabilities + (1 - share) * probabilities.roll(1, 0)


def _stretch(side: int, fraction: float, random: Generator) -> tuple[int, int]:
    """Return begin and end of a part of a side around a random place."""
    middle = random.integers(side)
    half = side * fraction / 2
    return max(0, round(middle - half)), min(side, round(middle + half))
