"""`bench step`: models that are no vision transformers have costs, and no picture of widths."""

from __future__ import annotations

import argparse

from eigenstep_lab.bench import step


def test_a_model_without_width_needs_no_picture(monkeypatch, tmp_path):
    monkeypatch.setattr(step, "MODELS", {"gpt-tiny": [("weight", (6, 4))], "vit-8": [("weight", (8, 8))]})
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    options = ["--optimizers", "spectral", "adamw", "--rounds", "1", "--plot", str(tmp_path / "widths.png")]
    for model, drawn in (("gpt-tiny", False), ("vit-8", True)):
        found = step.run(parser.parse_args(["--models", model, *options]))
        assert found["models"][model]["spectral"]["gflop"] > found["models"][model]["adamw"]["gflop"] == 0
        assert (tmp_path / "widths.png").exists() is drawn
