"""`eigenstep.integrations`, each with the real package, on models that are not from
here: 30 steps.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from eigenstep import Spectral
from eigenstep.integrations import RECIPES, SpectralFactory, hugging_face, recipe, register_timm

from .language_models import EXAMPLES, TEXTS, language_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here needs to be downloaded
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages, about their own affairs
STEPS = 30


def loss_of(model: Any) -> Tensor:
    logits = model(TEXTS).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), TEXTS[:, 1:].flatten())


def assert_learned(model: Any) -> None:
    with torch.no_grad():
        assert loss_of(model.eval()) < 2.5, "guessing costs log(32) = 3.5"


def trainer_arguments(path: Path, **more: Any) -> dict[str, Any]:
    options = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 16,
        "save_strategy": "no",
        "use_cpu": True,
    }
    return {"output_dir": str(path), "report_to": [], "disable_tqdm": True, **options, **more}


def test_recipes_are_known_by_their_names() -> None:
    assert recipe("SpectralFast") is Spectral.fast
    with pytest.raises(
        ValueError, match="recipe must be one of spectral, spectralfast, spectralpaper, got 'fast'"
    ):
        hugging_face("fast")


class TestHuggingFace:
    @pytest.mark.parametrize("kind", ["GPT2", "Mixtral"])
    @pytest.mark.parametrize("name", RECIPES)
    def test_factory(self, name: str, kind: str, tmp_path: Path) -> None:
        model, transformers = language_model(kind), pytest.importorskip("transformers")
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(**trainer_arguments(tmp_path)),
            train_dataset=EXAMPLES,
            optimizer_cls_and_kwargs=hugging_face(name, lr=0.02, weight_decay=0.1),
        )
        trainer.train()
        optimizer = trainer.optimizer.optimizer
        assert type(optimizer) is RECIPES[name]
        decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
        assert (decays["matrices"], decays["vectors"]) == (0.1, 0.0)
        assert "lm_head.weight" in {item.name for item in optimizer.summary()} or kind == "GPT2"
        assert_learned(model)

    def test_class(self, tmp_path: Path) -> None:
        model, transformers = language_model(), pytest.importorskip("transformers")
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(**trainer_arguments(tmp_path, weight_decay=0.2)),
            train_dataset=EXAMPLES,
            optimizer_cls_and_kwargs=(Spectral.fast, {"lr": 0.02}),
        )
        trainer.train()
        assert isinstance(trainer.optimizer.optimizer, Spectral.fast)
        assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.2
        assert_learned(model)

    def test_factory_takes_the_rate_of_a_trainer_and_leaves_out_frozen_parameters(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        model[1].requires_grad_(False)
        optimizer = SpectralFactory()(model, SimpleNamespace(learning_rate=0.25))
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
        assert [item.name for item in optimizer.summary()] == ["0.weight", "0.bias"]


class TestLightning:
    @pytest.mark.parametrize("path", ["eigenstep.Spectral", "eigenstep.optim.SpectralFast"])
    def test_command_line(self, path: str) -> None:
        lightning = pytest.importorskip("pytorch_lightning")
        pytest.importorskip("jsonargparse")
        from pytorch_lightning.cli import LightningCLI
        from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel

        class Boring(BoringModel):
            configure_optimizers = lightning.LightningModule.configure_optimizers

        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        text = f"fit --optimizer {path} --optimizer.lr=0.05 --optimizer.weight_decay=0.2"
        text += f" --trainer.max_steps={STEPS} --trainer.accelerator=cpu"
        arguments = [*text.split(), *(f"--trainer.{o}=false" for o in off)]
        cli = LightningCLI(Boring, BoringDataModule, save_config_callback=None, args=arguments)
        (optimizer,) = cli.trainer.optimizers
        group = optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"], group["count"]) == (0.05, 0.2, STEPS)
        assert group["max_ratio"] == (1.0 if path.endswith("Fast") else 2.0), (
            "other defaults are the recipe's"
        )


class TestAccelerate:
    @pytest.mark.parametrize("name", RECIPES)
    def test_prepare(self, name: str) -> None:
        accelerate = pytest.importorskip("accelerate")
        accelerator, model = accelerate.Accelerator(cpu=True), language_model()
        model, optimizer = accelerator.prepare(model, recipe(name)(model.named_parameters(), 0.02))
        for _ in range(STEPS):
            accelerator.backward(loss_of(model))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert_learned(model)


PARTS_OF_TORCHVISION = """
    torchvision torchvision.transforms torchvision.transforms.functional torchvision.transforms.v2
    torchvision.transforms.v2.functional torchvision.ops torchvision.ops.misc torchvision.models
    torchvision.models.feature_extraction torchvision.datasets torchvision.utils
"""


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import timm; in place of torchvision, which it needs for pictures alone and which may not fit
    torch, a dummy.
    """
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        for part in PARTS_OF_TORCHVISION.split():
            monkeypatch.setitem(sys.modules, part, MagicMock())
    return importlib.import_module("timm")


class TestTimm:
    @pytest.mark.parametrize("name", RECIPES)
    def test_registry(self, name: str, timm: Any) -> None:
        from timm.optim import create_optimizer_v2, list_optimizers

        register_timm()
        assert set(RECIPES) <= set(list_optimizers())
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224",
            img_size=32,
            patch_size=8,
            embed_dim=24,
            depth=1,
            num_heads=2,
            num_classes=4,
        )
        optimizer = create_optimizer_v2(
            model,
            name,
            lr=0.01,
            weight_decay=0.1,
            eps=1e-8,
            foreach=None,
            fallback_list=("*head.weight", "pos_embed"),
        )
        assert type(optimizer) is RECIPES[name]
        structures = {g["structure"] for g in optimizer.param_groups if g.get("use_fallback")}
        assert structures == {"diagonal"}
        x, y = torch.randn(16, 3, 32, 32), torch.arange(16) % 4
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        assert loss < 0.7, "guessing costs log(4) = 1.4"


class TestTorchtitan:
    @pytest.mark.parametrize("name", ["Spectral", "SpectralFast", "SpectralPaper"])
    def test_container(self, name: str) -> None:
        pytest.importorskip("torchtitan")
        from eigenstep.integrations.torchtitan import SpectralContainer, spectral

        model = language_model()
        container = spectral(0.02, name, weight_decay=0.1).build(model_parts=[model])
        assert isinstance(container, SpectralContainer)
        assert type(container.optimizers[0]) is recipe(name)
        for step in range(STEPS):
            if step == 10:
                saved = container.state_dict()
                container = spectral(0.02, name, weight_decay=0.1).build(model_parts=[model])
                container.load_state_dict(saved)
            loss_of(model).backward()
            container.step()
            container.zero_grad()
        assert container.optimizers[0].param_groups[0]["count"] == STEPS
        assert_learned(model)

    def test_other_optimizers_stay(self) -> None:
        pytest.importorskip("torchtitan")
        from torchtitan.components.optimizer import ParamGroupConfig

        from eigenstep.integrations.torchtitan import SpectralContainer

        groups = [
            ParamGroupConfig(pattern="bias", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1}),
            ParamGroupConfig(
                pattern=".*", optimizer_name="SpectralFast", optimizer_kwargs={"lr": 0.1}
            ),
        ]
        config = SpectralContainer.Config(param_groups=groups, implementation="foreach")
        kinds = [
            type(optimizer) for optimizer in config.build(model_parts=[nn.Linear(2, 2)]).optimizers
        ]
        assert kinds == [torch.optim.AdamW, Spectral.fast]


class TestAxolotl:
    def test_plugin(self, tmp_path: Path) -> None:
        pytest.importorskip("axolotl")
        pytest.importorskip("peft")
        transformers = pytest.importorskip("transformers")
        from axolotl.integrations.base import PluginManager
        from axolotl.utils.dict import DictDefault

        plugins = PluginManager()
        plugins.register("eigenstep.integrations.axolotl.SpectralPlugin")
        (place,) = plugins.get_input_args()
        module, _, name = place.rpartition(".")
        fields = getattr(importlib.import_module(module), name)(
            spectral={"recipe": "spectralfast", "interval": 3}
        )
        model = language_model()
        arguments = transformers.TrainingArguments(
            **trainer_arguments(tmp_path, learning_rate=0.02, weight_decay=0.1)
        )
        # From which axolotl's own trainers derive, which cannot be imported without everything that
        # it can train with.
        trainer = transformers.Trainer(model, arguments, train_dataset=EXAMPLES)
        plugins.post_trainer_create(DictDefault(fields.model_dump()), trainer)
        trainer.train()
        optimizer = trainer.optimizer.optimizer
        assert isinstance(optimizer, Spectral.fast)
        assert {group["interval"] for group in optimizer.param_groups} == {3}
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1, 0.0}
        assert_learned(model)
