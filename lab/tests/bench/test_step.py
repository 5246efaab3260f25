"""`bench step`: models that are no vision transformers have costs and claims of their own, and no
picture of widths.
"""

from __future__ import annotations

import argparse
import math

import pytest

from eigenstep_lab.bench import step


def test_a_model_without_width_needs_no_picture(monkeypatch, tmp_path):
    monkeypatch.setattr(
        step, "MODELS", {"gpt-tiny": [("weight", (6, 4))], "vit-8": [("weight", (8, 8))]}
    )
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    options = [
        "--optimizers",
        "spectral",
        "adamw",
        "--rounds",
        "1",
        "--plot",
        str(tmp_path / "widths.png"),
    ]
    for model, drawn in (("gpt-tiny", False), ("vit-8", True)):
        found = step.run(parser.parse_args(["--models", model, *options]))
        assert (
            found["models"][model]["spectral"]["gflop"]
            > found["models"][model]["adamw"]["gflop"]
            == 0
        )
        assert (tmp_path / "widths.png").exists() is drawn


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


def test_the_diagonal_structure_has_no_matrix_work(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "MODELS", {"vector-tiny": [("weight", (6, 4))]})
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    options = [
        "--models",
        "vector-tiny",
        "--optimizers",
        "spectral",
        "spectral_diagonal",
        "--rounds",
        "1",
    ]
    found = step.run(parser.parse_args(options))["models"]["vector-tiny"]
    assert found["spectral_diagonal"]["gflop"] == 0 < found["spectral"]["gflop"]
