import numpy as np
import pytest
import torch
from PIL import Image

from eigenstep_lab import cli
from eigenstep_lab.train.feeds import (
    PHOTO_MEAN,
    PHOTO_STD,
    Passages,
    PictureFolder,
    PicturesInMemory,
    open_feed,
)
from eigenstep_lab.train.settings import Settings


def feed(data, **options):
    return open_feed(Settings(data=str(data), **options))


def stack(batches):
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def same(first, second):
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.fixture
def feeds(pictures, poem):
    """One feed of each kind, with all chance that it knows."""
    return [
        feed("digits", batch=300, crop=0.5, flip=True, test_batches=2),
        feed(pictures, size=16, batch=4, crop=0.3, flip=True, test_batches=2),
        feed(poem, batch=4, length=8, test_batches=2),
    ]


def test_data_is_recognized(feeds):
    assert [type(feed) for feed in feeds] == [PicturesInMemory, PictureFolder, Passages]
    assert [feed.classes for feed in feeds] == [10, 2, 28]
    assert [feed.per_epoch for feed in feeds] == [4, 4, 1620 // 32]


def test_known_names_win_over_files_and_folders_are_found_beside_them(
    pictures, tmp_path, monkeypatch
):
    monkeypatch.setenv("EIGENSTEP_DATA", str(tmp_path))
    (tmp_path / "shakespeare").mkdir()  # a folder, where pictures could be
    (tmp_path / "shakespeare" / "all_gut.txt").write_text("to be or not to be " * 100)
    (tmp_path / "digits").mkdir()
    assert isinstance(feed("shakespeare", batch=2, length=8), Passages)
    assert isinstance(feed("digits"), PicturesInMemory)
    monkeypatch.chdir("/")
    assert feed("pictures", size=8, batch=4).classes == 2


def test_a_step_is_the_same_wherever_one_begins(feeds):
    """This is what makes a resumed run see the same data."""
    for feed in feeds:
        steps = list(feed.batches(2, 7))
        assert len(steps) == 5
        assert same(stack(steps[3:]), stack(feed.batches(5, 7)))
        assert not torch.equal(steps[0][0], steps[1][0])


def test_seeds_differ(pictures):
    for data in ("digits", pictures):
        one, other = (feed(data, size=16, batch=4, seed=seed).batches(0, 3) for seed in (0, 1))
        assert not same(stack(one), stack(other))


def test_an_epoch_shows_every_picture_once_and_the_next_in_another_order(pictures):
    shown = feed(pictures, size=8, batch=4)
    inputs, targets = stack(shown.batches(0, 4))
    again, _ = stack(shown.batches(4, 8))
    assert len(torch.unique(inputs, dim=0)) == 16
    assert targets.bincount().tolist() == [8, 8]
    assert not torch.equal(inputs, again)
    assert torch.equal(torch.unique(inputs, dim=0), torch.unique(again, dim=0))


def test_held_out_data_is_whole_and_in_order(pictures, poem):
    for batches, examples in ((0, 360), (3, 300)):
        inputs, targets = stack(feed("digits", batch=100, test_batches=batches).held_out())
        assert len(inputs) == len(targets) == examples
    _, labels = stack(feed(pictures, size=8, batch=4).held_out())
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    passages = feed(poem, batch=3, length=8)
    inputs, targets = stack(passages.held_out())
    held_out = passages.text.test
    assert torch.equal(inputs.flatten(), held_out[: inputs.numel()])
    assert torch.equal(targets.flatten(), held_out[1 : inputs.numel() + 1])
    assert len(held_out) - inputs.numel() <= 8


def test_a_streamed_picture_is_the_middle_of_its_file(pictures):
    sides = np.zeros((40, 80, 3), dtype=np.uint8)
    sides[:, 20:60, 1] = 255  # a green square between black margins
    Image.fromarray(sides).save(pictures / "val" / "bright" / "0.png")
    (pictures / "val" / "bright" / "0.jpeg").unlink()
    inputs, _ = next(feed(pictures, size=10, batch=1).held_out())
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (PHOTO_MEAN, PHOTO_STD))
    pixels = inputs[0] * std + mean
    assert torch.allclose(pixels[:, :, 1:-1].amin((1, 2)), torch.tensor([0.0, 1.0, 0.0]), atol=1e-6)
    assert pixels[1].min() > 0.9  # at the edges the margins shine through a little


def test_flips_mirror_half_of_the_pictures(pictures):
    left_bright = np.zeros((20, 20, 3), dtype=np.uint8)
    left_bright[:, :10] = 255
    for path in pictures.glob("*/*/*.jpeg"):
        Image.fromarray(left_bright).save(path)
    inputs, _ = stack(feed(pictures, size=8, batch=16, flip=True).batches(0, 10))
    mirrored = inputs[:, 0, 4, 7] > inputs[:, 0, 4, 0]
    assert 60 < mirrored.sum() < 100


def test_worker_processes_change_nothing(pictures):
    options = {"size": 16, "batch": 4, "crop": 0.3, "flip": True}
    state = torch.get_rng_state()
    alone, helped = (feed(pictures, **options, workers=count).batches(0, 6) for count in (0, 2))
    assert same(stack(alone), stack(helped))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_picture_is_named(pictures, workers):
    path = pictures / "train" / "dark" / "3.jpeg"
    path.write_bytes(path.read_bytes()[:300])
    message = r"^\S*dark.3\.jpeg is damaged or incomplete \(.*\): delete it and fetch it again$"
    with pytest.raises(ValueError, match=message):
        list(feed(pictures, size=16, batch=4, workers=workers).batches(0, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data": "imagewoof2"},
            "no data 'imagewoof2': expected one of digits, .*, a folder with train/<class>",
        ),
        (
            {"data": "digits", "batch": 2000},
            "batch must be at most 1437, the number of training pictures; got 2000",
        ),
        ({"data": "poem.txt", "mixup": 0.1}, "mixup is for pictures, and poem.txt is a text"),
        ({"data": "poem.txt", "length": 500}, "length must be less than 180"),
        ({"data": "pictures/train"}, "one subfolder of pictures per class"),
    ],
)
def test_impossible_data_is_explained(options, message, pictures, poem):
    with pytest.raises(ValueError, match=message):
        open_feed(Settings(**options))


def test_a_folder_can_be_checked_before_a_long_run(pictures, capsys):
    words = ["data", "check", str(pictures)]
    assert cli.main(words) == 0
    assert capsys.readouterr().out.endswith(f"{pictures}: 16 + 6 pictures in 2 classes\n")
    damaged = pictures / "val" / "dark" / "1.jpeg"
    damaged.write_bytes(damaged.read_bytes()[:300])
    assert cli.main(words) == 2
    assert "1.jpeg is damaged or incomplete" in capsys.readouterr().err
    assert cli.main(["data", "fetch", str(pictures)]) == 2
