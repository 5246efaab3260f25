import numpy as np
import pytest
from PIL import Image

from eigenstep_lab.train.settings import Settings

TINY_VIT = {"width": 16, "depth": 1, "heads": 2}


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    """Runs go to the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pictures(tmp_path):
    """Two classes of small photographs that differ in brightness, as JPEG files, none of them
    square.
    """
    random = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3)):
        for name, light in (("bright", 160), ("dark", 20)):
            folder = tmp_path / "pictures" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                noise = random.integers(light, light + 80, (40, 60, 3), dtype=np.uint8)
                Image.fromarray(noise).save(folder / f"{number}.jpeg")
    return tmp_path / "pictures"


@pytest.fixture
def poem(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return path


@pytest.fixture
def tiny():
    """A run on digits that takes a second."""

    def settings(**changes):
        quick = {
            "train_for": "12 steps",
            "warmup": "2 steps",
            "batch": 8,
            "test_batches": 2,
            "log_every": "5 steps",
        }
        often = {"evaluate_every": "6", "checkpoint_every": "5"}
        return Settings(**{**quick, **often, "model_option": TINY_VIT, **changes})

    return settings
