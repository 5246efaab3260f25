"""`Spectral` inside the training loops that people use, each from its own package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from eigenstep import Spectral

from .language_models import EXAMPLES, TEXTS, language_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here needs to be downloaded
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages, about their own affairs


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 6, generator=generator)
    return TensorDataset(x, torch.stack([x.sum(1), x[:, 0] * x[:, 1], x[:, 2].sin()], 1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def by_hand() -> tuple[nn.Module, list[float]]:
    """Train with a plain loop, the reference for all others: batches in order, falling rates."""
    model = network()
    losses = []
    optimizer = Spectral(model.parameters(), 0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for _ in range(6):
        for x, y in DataLoader(data(), batch_size=16):
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return model, losses


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for w, twin in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(w, twin)


def lightning_trainer(path: Path, epochs: int) -> Any:
    lightning = pytest.importorskip("pytorch_lightning")
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def lightning_module() -> Any:
    lightning = pytest.importorskip("pytorch_lightning")

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return mse_loss(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = Spectral(self.network.parameters(), 0.02)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    return Regression()


def test_lightning_trains_as_by_hand_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    expected, losses = by_hand()
    assert losses[-1] < losses[0] / 2
    loader = DataLoader(data(), batch_size=16)
    first = lightning_trainer(tmp_path, epochs=3)
    first.fit(lightning_module(), loader)
    first.save_checkpoint(tmp_path / "half.ckpt")
    module = lightning_module()
    lightning_trainer(tmp_path, epochs=6).fit(module, loader, ckpt_path=tmp_path / "half.ckpt")
    assert_same(module.network, expected)


def prepared(**options: Any) -> tuple[Any, nn.Module, Any, Any, Any]:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = network()
    optimizer = Spectral(model.parameters(), 0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    loader = DataLoader(data(), batch_size=16)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def accelerated(
    epochs: int, accelerator: Any, model: nn.Module, optimizer: Any, loader: Any, scheduler: Any
) -> None:
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def test_accelerate_trains_as_by_hand_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    first = prepared()
    accelerated(3, *first)
    first[0].save_state(str(tmp_path))
    second = prepared()
    second[0].load_state(str(tmp_path))
    accelerated(3, *second)
    assert_same(second[1], by_hand()[0])


def test_accelerate_accumulates_gradients() -> None:
    parts = prepared(gradient_accumulation_steps=2)
    accelerated(2, *parts)
    assert parts[2].optimizer.param_groups[0]["count"] == 4


def transformer(path: Path, resume: str | None = None) -> Any:
    """Return a small language model after 40 steps of ``transformers.Trainer``."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = language_model("Llama")
    optimizer = Spectral(model.named_parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    arguments = transformers.TrainingArguments(
        output_dir=str(path),
        max_steps=40,
        per_device_train_batch_size=8,
        save_steps=10,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=EXAMPLES, optimizers=(optimizer, scheduler)
    )
    trainer.train(resume_from_checkpoint=resume)
    return model


def test_transformers_trains_and_resumes(tmp_path: Path) -> None:
    whole = transformer(tmp_path / "whole")
    with torch.no_grad():
        logits = whole(TEXTS).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), TEXTS[:, 1:].flatten())
    assert loss < 1.5, "guessing costs log(32) = 3.5"
    resumed = transformer(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-10"))
    assert_same(resumed, whole)
