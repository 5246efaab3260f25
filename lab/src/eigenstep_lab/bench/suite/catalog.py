"""The tasks of the suite, in two halves.

The halves were fixed before anything was tuned. Defaults are chosen on the first alone; the second
says what they are worth where nobody tuned them. Tasks come in pairs that are alike in what decides
between optimizers, one for each half, so that neither half lacks a kind: vision transformers (vit,
hiera), the other classifiers of photographs (convnet, mixer), GPTs of different width, batch and
initialization (gpt_characters, gpt_tokens), other networks for text (lstm, mixture), rows that are
rarely used (recommender, bag_of_words), full batches (pinn, graph), squared errors with pictures
(autoencoder, diffusion), and matrices of unusual shape or input (lora, photograph).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ...tasks import Task
from . import fields, language, modern, vision

FIRST: Mapping[str, Task] = {
    "vit": Task("ViT, width 64, clothing, 64 pictures a step", vision.vit, 250),
    "convnet": Task("ConvNet with batch norm, CIFAR-10, 128 pictures", vision.convnet, 150),
    "gpt_characters": Task("GPT, width 96, 2048 characters", language.gpt_characters, 150),
    "lstm": Task("LSTM, width 128, 2048 characters", language.lstm, 300),
    "recommender": Task(
        "12,000 + 12,000 words as users and items, 2048 pairs", language.recommender, 600
    ),
    "pinn": Task("physics-informed MLP, Poisson's equation, full batch", fields.pinn, 800),
    "autoencoder": Task("deep MLP, clothing, squared error, 256 pictures", vision.autoencoder, 600),
    "lora": Task("low-rank fine-tuning of a GPT on poems, 1024 characters", language.lora, 200),
}
SECOND: Mapping[str, Task] = {
    "hiera": Task("Hiera, CIFAR-10, 64 pictures", vision.hiera, 200),
    "mixer": Task("MLP-mixer, CIFAR-10, 32 pictures", vision.mixer, 250),
    "gpt_tokens": Task("GPT, width 128, 512 byte pairs", language.gpt_tokens, 300),
    "mixture": Task("GPT with stacks of 8 experts, 1024 characters", language.mixture, 300),
    "bag_of_words": Task(
        "mean of the embeddings of 20 words of 20,000, 256 passages", language.bag_of_words, 800
    ),
    "graph": Task(
        "graph convolutions, neighbors among pictures of clothing, full batch", fields.graph, 600
    ),
    "diffusion": Task("U-Net, noise in pictures of clothing, 64 pictures", vision.diffusion, 200),
    "photograph": Task(
        "MLP of Fourier features, a photograph's pixels, 2048 pixels", fields.photograph, 800
    ),
}
HALVES: Mapping[str, Mapping[str, Task]] = {"first": FIRST, "second": SECOND}
TASKS: Mapping[str, Task] = {**FIRST, **SECOND}
SPEEDRUN = Task("GPT of the public speed run, width 128, 2048 byte pairs", modern.speedrun, 800)
"""Not of the suite: `bench speedrun` counts the steps that it takes to a loss."""


WIDTHS = (64, 256, 512)
EXTRA: Mapping[str, Task] = {
    "speedrun": SPEEDRUN,
    **{
        f"gpt_tokens_{width}": Task(
            f"GPT, width {width}, 512 byte pairs", partial(language.gpt_tokens, width=width), 300
        )
        for width in WIDTHS
    },
}
"""Tasks of no half, which run only where they are named."""


def task_of(name: str) -> Task:
    """Return the task of a run."""
    return EXTRA[name] if name in EXTRA else TASKS[name]
