"""`bench step`: models that are no vision transformers have costs and claims of their own, and no
picture of widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eigenstep import Spectral
from eigenstep_lab.bench import step


@pytest.mark.parametrize(("model", "drawn"), [("gpt-tiny", False), ("vit-8", True)])
def test_a_model_without_width_needs_no_picture(
    model: str,
    drawn: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    bench: Callable[..., dict[str, Any]],
) -> None:
    monkeypatch.setattr(
        step, "MODELS", {"gpt-tiny": [("weight", (6, 4))], "vit-8": [("weight", (8, 8))]}
    )
    picture = tmp_path / "widths.png"
    rivals = ["--optimizers", "spectral", "spectral_diagonal", "adamw", "--rounds", "1"]
    found = bench("step", "--models", model, *rivals, "--plot", str(picture))["models"][model]
    assert found["spectral"]["gflop"] > found["adamw"]["gflop"] == 0
    assert found["spectral_diagonal"]["gflop"] == 0
    assert picture.exists() is drawn


def test_resnet10t_has_as_many_weights_as_that_of_timm():
    # 5.44 million, says timm
    assert sum(math.prod(shape) for _, shape in step.MODELS["resnet10t"]) == 5_435_488


def test_a_hundred_small_shapes_are_all_different():
    assert len({shape for _, shape in step.MODELS["shapes-100"]}) == 100


@pytest.mark.parametrize(
    ("model", "rivals"),
    [
        ("vit-256", {"soap", "klshampoo", "muon_float32", "adamw"}),
        ("resnet10t", {"soap"}),
        ("vector-3m", {"adamw"}),
    ],
)
def test_claims_are_about_rivals_that_make_sense(model, rivals):
    cost = {key: {"ms": 1.0, "gflop": 1.0} for key in step.CHOICES}
    cost["adamw"]["ms"] = cost["soap"]["ms"] = 0.6  # so that ours costs 1.67 times as much
    found = list(step.verdicts({model: cost}))
    assert {verdict.claim.split()[-1] for verdict in found} == rivals
    assert not any(
        verdict.holds for verdict in found if verdict.claim.split()[-1] in ("adamw", "soap")
    )


@pytest.mark.parametrize("mode", step.MODES)
def test_state_that_is_counted_is_the_state(mode: str) -> None:
    shapes = step.transformer_shapes(48, 1, [("embed.weight", (1100, 48))])
    params = [nn.Parameter(torch.randn(shape)) for _, shape in shapes]
    optimizer = Spectral(params, **step.MODES[mode])
    for param in params:
        param.grad = torch.randn(param.shape)
    optimizer.step()
    count = sum(param.numel() for param in params)
    assert step.state_of(shapes, step.MODES[mode]) == pytest.approx(
        step.state_bytes(optimizer) / count
    )
    assert step.peak_of(shapes, step.MODES[mode])["peak"] > 0


@pytest.mark.parametrize(("mode", "model", "limit"), step.LIMITS)
def test_limits(mode: str, model: str, limit: float) -> None:
    assert step.state_of(step.NETWORKS[model](12), step.MODES[mode]) <= limit


def test_embeddings_are_timed() -> None:
    assert all(ms > 0 for ms in step.embedding_times(2000, 1).values())
