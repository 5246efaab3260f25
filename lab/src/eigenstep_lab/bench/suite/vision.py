"""Tasks on pictures: classification by four kinds of networks, compression, and the removal of
noise.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ...models.hiera import Hiera
from ...models.transformers import ViT
from ...tasks import TEST_SEED, Problem
from . import sources
from .networks import ConvNet, Mixer, UNet, mlp


def begin_as_torch(model: nn.Module) -> nn.Module:
    """Draw the weights of all layers anew as torch does; what is not part of a layer, such as
    positions, stays.
    """
    for layer in model.modules():
        reset = getattr(layer, "reset_parameters", None)
        if reset is not None:
            reset()
    return model


def _classification(dataset: str, model: nn.Module, batch: int) -> Problem:
    images = sources.pictures(dataset)

    def loss(generator: Generator) -> Tensor:
        pictures, labels = images.batch(batch, generator)
        return F.cross_entropy(model(pictures), labels)

    def held_out() -> float:
        pictures, labels = sources.held_out_pictures(dataset, 3000)
        logits = torch.cat([model(part) for part in torch.split(pictures, 500)])
        return F.cross_entropy(logits, labels).item()

    return Problem(model, loss, held_out)


def vit(seed: int) -> Problem:
    """A vision transformer with torch's initialization on clothing."""
    model = ViT((1, 28, 28), 10, patch=7, width=64, depth=3, seed=seed)
    return _classification("fashion-mnist", begin_as_torch(model), batch=64)


def hiera(seed: int) -> Problem:
    """Hiera on photographs, with the usual initialization of vision transformers."""
    model = Hiera((3, 32, 32), 10, patch=4, width=32, depths=(1, 1, 1), seed=seed)
    return _classification("cifar-10", model, batch=64)


def convnet(seed: int) -> Problem:
    """Convolutions with batch normalization on photographs."""
    return _classification("cifar-10", ConvNet(3, 10), batch=128)


def mixer(seed: int) -> Problem:
    """An MLP-mixer on photographs."""
    return _classification("cifar-10", Mixer(3, 32, 10), batch=32)


def autoencoder(seed: int) -> Problem:
    """The deep autoencoder of many studies of optimizers, on clothing in [0, 1], with the squared
    error.
    """
    sizes = [784, 256, 128, 64, 16, 64, 128, 256, 784]
    model = mlp(sizes, nn.ReLU)
    images = sources.pictures("fashion-mnist")

    def flat(pixels: Tensor) -> Tensor:
        return pixels.flatten(1).float() / 255

    def loss(generator: Generator) -> Tensor:
        pixels = flat(
            images.train_pixels[
                torch.randint(len(images.train_pixels), (256,), generator=generator)
            ]
        )
        return F.mse_loss(model(pixels), pixels)

    def held_out() -> float:
        pixels = flat(images.test_pixels)
        return F.mse_loss(model(pixels), pixels).item()

    return Problem(model, loss, held_out)


def _noised(pictures: Tensor, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Mix pictures with noise (cosine schedule) and return the mixtures, how far each is noised,
    and the noise.
    """
    level = torch.rand(len(pictures), generator=generator)
    noise = torch.randn(pictures.shape, generator=generator)
    angle = (math.pi / 2 * level)[:, None, None, None]
    return angle.cos() * pictures + angle.sin() * noise, level, noise


@lru_cache
def _noised_test() -> tuple[Tensor, Tensor, Tensor]:
    images = sources.pictures("fashion-mnist")
    return _noised(_halved(images.test_pixels[:2000]), Generator().manual_seed(TEST_SEED))


def _halved(pixels: Tensor) -> Tensor:
    """Return pictures in [-1, 1] of 16 × 16: 28 × 28 with a margin of 2, halved."""
    return F.avg_pool2d(F.pad(pixels.float() / 127.5 - 1, (2, 2, 2, 2), value=-1.0), 2)


def diffusion(seed: int) -> Problem:
    """A U-Net that predicts the noise in pictures of clothing, 16 × 16."""
    model = UNet(1)
    images = sources.pictures("fashion-mnist")

    def loss(generator: Generator) -> Tensor:
        chosen = torch.randint(len(images.train_pixels), (64,), generator=generator)
        mixed, level, noise = _noised(_halved(images.train_pixels[chosen]), generator)
        return F.mse_loss(model(mixed, level), noise)

    def held_out() -> float:
        parts = zip(*(torch.split(part, 500) for part in _noised_test()), strict=True)
        losses = [F.mse_loss(model(mixed, level), noise).item() for mixed, level, noise in parts]
        return sum(losses) / len(losses)

    return Problem(model, loss, held_out)
