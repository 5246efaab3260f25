"""Datasets, on small files in the formats of the real ones."""

import gzip
import json
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from eigenstep_lab import cli
from eigenstep_lab.console import UserError
from eigenstep_lab.data import datasets as data
from eigenstep_lab.data.command import describe
from eigenstep_lab.data.datasets import DATASETS, find, load_images, load_text
from eigenstep_lab.data.samples import Images, Text


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """An empty place for datasets; system-wide ones are out of sight."""
    monkeypatch.setenv("EIGENSTEP_DATA", str(tmp_path / "root"))
    for dataset in DATASETS.values():
        monkeypatch.setitem(dataset.__dict__, "places", ())
    return tmp_path / "root"


@pytest.fixture
def random():
    return np.random.default_rng(0)


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture
def fashion(root, random):
    folder = root / "fashion-mnist"
    folder.mkdir(parents=True)
    written = {}
    for part, size in (("train", 30), ("t10k", 10)):
        written[part] = (
            random.integers(0, 256, (size, 28, 28), dtype=np.uint8),
            np.arange(size, dtype=np.uint8) % 10,
        )
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", written[part][0])
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", written[part][1])
    return folder, written


@pytest.fixture
def cifar(root, random):
    folder = root / "cifar-10"
    folder.mkdir(parents=True)
    sheets = random.integers(0, 256, (6, 4, 32, 32, 3), dtype=np.uint8)
    for sheet, name in zip(
        sheets, [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"], strict=True
    ):
        Image.fromarray(sheet.reshape(4, 1024, 3)).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text(json.dumps([k % 10 for k in range(20)]))
    (folder / "test_lables.json").write_text("[9, 8, 7, 6]")
    return folder, sheets


@pytest.fixture
def pictures(tmp_path, random):
    folder = tmp_path / "pictures"
    for part, count in (("train", 3), ("val", 1)):
        for name in ("cat", "dog"):
            (folder / part / name).mkdir(parents=True)
            for k in range(count):
                noise = random.integers(0, 256, (20, 30, 3), dtype=np.uint8)
                Image.fromarray(noise).save(folder / part / name / f"{k}.png")
    return folder


def test_digits_come_with_scikit_learn():
    images = load_images("digits")
    assert images.train_pixels.shape == (1437, 1, 8, 8)
    assert images.test_pixels.shape == (360, 1, 8, 8)
    assert images.train_pixels.max() == 255
    assert set(images.test_labels.tolist()) == set(range(10))


def test_fashion_mnist_is_read_as_written(fashion):
    _, written = fashion
    images = load_images("fashion-mnist")
    assert np.array_equal(images.train_pixels[:, 0], written["train"][0])
    assert np.array_equal(images.test_pixels[:, 0], written["t10k"][0])
    assert np.array_equal(images.train_labels, written["train"][1])
    assert images.train_labels.dtype == torch.int64
    assert images.shape == (1, 28, 28)


def test_cifar_is_read_as_written(cifar):
    _, sheets = cifar
    images = load_images("cifar-10")
    assert np.array_equal(
        images.train_pixels.permute(0, 2, 3, 1), sheets[:5].reshape(-1, 32, 32, 3)
    )
    assert np.array_equal(images.test_pixels.permute(0, 2, 3, 1), sheets[5])
    assert images.test_labels.tolist() == [9, 8, 7, 6]


def test_image_folder_is_cut_to_size(pictures):
    images = load_images(pictures, size=16)
    assert images.train_pixels.shape == (6, 3, 16, 16)
    assert images.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert images.test_labels.tolist() == [0, 1]
    assert images.classes == ("cat", "dog")
    assert load_images(str(pictures), size=8).shape == (3, 8, 8)


def test_image_folder_keeps_the_middle_of_a_picture(pictures):
    left_black = np.zeros((10, 30, 3), dtype=np.uint8)
    left_black[:, 10:20] = 255
    Image.fromarray(left_black).save(pictures / "val" / "dog" / "0.png")
    assert load_images(pictures, size=10).test_pixels[1].min() == 255


def test_decoded_pictures_are_kept_and_follow_their_files(fashion, root):
    folder, _ = fashion
    first = load_images("fashion-mnist")
    (kept,) = (root / "decoded").iterdir()
    stamp = kept.stat().st_mtime_ns
    again = load_images("fashion-mnist")
    assert kept.stat().st_mtime_ns == stamp
    assert torch.equal(again.train_pixels, first.train_pixels)
    assert again.classes == first.classes
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.full(30, 3, dtype=np.uint8))
    assert load_images("fashion-mnist").train_labels.unique().tolist() == [3]


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: raw[:-99] + b"x" * 99]
)
def test_a_damaged_copy_is_made_again(fashion, root, damage):
    first = load_images("fashion-mnist")
    (kept,) = (root / "decoded").iterdir()
    kept.write_bytes(damage(kept.read_bytes()))
    assert torch.equal(load_images("fashion-mnist").train_pixels, first.train_pixels)


def test_pictures_load_even_if_no_copy_can_be_kept(fashion, root):
    (root / "decoded").write_text("a file in the way")
    with pytest.warns(UserWarning, match="cannot keep"):
        assert len(load_images("fashion-mnist").train_labels) == 30


def test_shakespeare_is_numbered_in_order(root):
    (root / "shakespeare").mkdir(parents=True)
    (root / "shakespeare" / "b_gut.txt").write_text("to be,\n" * 10)
    (root / "shakespeare" / "a_gut.txt").write_text("or nöt " * 10, encoding="utf-8")
    (root / "shakespeare" / "a_gut_f.txt").write_text("another edition")
    text = load_text("shakespeare")
    assert text.alphabet == "".join(sorted(set("to be,\nor nöt ")))
    whole = "".join(text.alphabet[k] for k in torch.cat([text.train, text.test]))
    assert whole == "or nöt " * 10 + "to be,\n" * 10
    assert (len(text.train), len(text.test)) == (126, 14)


def test_any_text_file_will_do(tmp_path):
    (tmp_path / "poem.txt").write_text("abcabcabca")
    text = load_text(tmp_path / "poem.txt")
    assert text.train.tolist() == [0, 1, 2] * 3
    assert text.test.tolist() == [0]


def test_text_batches_are_the_text_and_its_next_characters():
    text = Text.from_string("abcdefghij" * 10)
    inputs, targets = text.batch(5, 8, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (5, 8)
    assert torch.equal((inputs + 1) % 10, targets)
    held_out, _ = text.batch(200, 9, torch.Generator().manual_seed(0), train=False)
    assert held_out[:, 0].unique().tolist() == [0]  # the only place where 10 characters fit
    with pytest.raises(ValueError, match=r"length must be between 1 and 9.*got 10"):
        text.batch(1, 10, torch.Generator(), train=False)


def test_image_batches_are_normalized_and_repeatable():
    images = load_images("digits")
    pixels, labels = images.batch(500, torch.Generator().manual_seed(3))
    assert pixels.mean().abs() < 0.05
    assert (pixels.std() - 1).abs() < 0.05
    again, same = images.batch(500, torch.Generator().manual_seed(3))
    assert torch.equal(pixels, again)
    assert torch.equal(labels, same)
    assert torch.allclose(images.normalize(images.train_pixels).std(), torch.tensor(1.0), atol=1e-3)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-20])


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def replaced(content):
    return lambda path: path.write_bytes(content)


TRAIN, LABELS, TEST = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (TRAIN, truncate, "is damaged or incomplete"),
        (TRAIN, flip, "is damaged or incomplete"),
        (TRAIN, replaced(b"<html>"), "is damaged or incomplete"),
        (TEST, replaced(gzip.compress(b"hello")), "not an IDX"),
        (TEST, replaced(gzip.compress(b"\0\0\x08\x01\0\0\0\x0a123")), "promises 10 bytes, 3 came"),
        (LABELS, lambda p: write_idx(p, np.zeros(29, np.uint8)), "30 train pictures but 29 labels"),
        (LABELS, lambda p: write_idx(p, np.full(30, 10, np.uint8)), "outside 0 ... 9"),
        ("data_batch_3.png", flip, "data_batch_3.png is damaged or incomplete"),
        ("data_batch_3.png", lambda p: Image.new("RGB", (32, 32)).save(p), "1024 pixels, not 32"),
        ("test_lables.json", replaced(b"[1, 2"), "test_lables.json is damaged"),
        ("test_lables.json", replaced(b"[1, 2]"), "4 test pictures but 2 labels"),
    ],
)
def test_damaged_files_are_named(fashion, cifar, root, file, damage, message):
    name = "fashion-mnist" if file.endswith("gz") else "cifar-10"
    damage(root / name / file)
    with pytest.raises(ValueError, match=message):
        load_images(name)


def huge_png(path, side):
    """A few bytes that promise side × side pixels."""

    def chunk(kind, content):
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [10_000, 100_000])
def test_pictures_of_hundreds_of_megapixels_are_refused(pictures, cifar, side):
    huge_png(pictures / "train" / "cat" / "1.png", side)
    huge_png(cifar[0] / "data_batch_3.png", side)
    for source, name in ((pictures, "1.png"), ("cifar-10", "data_batch_3.png")):
        with pytest.raises(
            UserError, match=rf"{name} has more than 89,478,485 pixels: make it smaller"
        ):
            load_images(source)


def test_files_that_promise_too_much_are_refused(fashion, cifar, root, tmp_path, monkeypatch):
    bomb = fashion[0] / "train-images-idx3-ubyte.gz"
    for header in (b"\0\0\x08\x03" + b"\xff" * 12, b"\0\0\x08\x02\0\1\0\0\0\1\0\0"):
        bomb.write_bytes(gzip.compress(header))
        with pytest.raises(
            UserError, match=r"train-images.* promises [\d,]+ bytes, more than the 1,073,741,824"
        ):
            load_images("fashion-mnist")
    bomb.write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\1" + bytes(10**6)))
    with pytest.raises(UserError, match="promises 1 bytes, more came"):
        load_images("fashion-mnist")
    bomb.write_bytes(gzip.compress(b"\0\0\x08\xff123"))
    with pytest.raises(UserError, match="is damaged or incomplete"):
        load_images("fashion-mnist")
    for labels in ("[" * 100_000, "{}", "[1.5, 2, 3, 4]", f"[{10**30}]"):
        (cifar[0] / "test_lables.json").write_text(labels)
        with pytest.raises(UserError, match=r"test_lables.json is damaged"):
            load_images("cifar-10")
    monkeypatch.setattr("eigenstep_lab.data.files.MOST_BYTES", 1000)
    (tmp_path / "long.txt").write_text("a" * 1001)
    with pytest.raises(UserError, match=r"long.txt has more than 1,000 bytes"):
        load_text(tmp_path / "long.txt")


def test_damaged_folders_and_texts_are_named(pictures, tmp_path):
    truncate(pictures / "train" / "cat" / "1.png")
    with pytest.raises(ValueError, match=r"cat.1\.png is damaged"):
        load_images(pictures)
    (pictures / "val" / "cat" / "0.png").unlink()
    with pytest.raises(ValueError, match=r"val.cat has no pictures"):
        load_images(pictures)
    (pictures / "val" / "cat").rename(pictures / "val" / "cow")
    Image.new("RGB", (4, 4)).save(pictures / "val" / "cow" / "0.png")
    with pytest.raises(ValueError, match="same classes; only one has cat, cow"):
        load_images(pictures)
    with pytest.raises(ValueError, match="one subfolder of pictures per class"):
        load_images(tmp_path)
    for content, message in ((b"\xff\xfe\x00", "damaged"), (b"", "empty"), (b"a\0b", "binary")):
        (tmp_path / "text").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_text(tmp_path / "text")


def test_what_is_not_there_says_how_to_get_it(root):
    assert find("cifar-10") is None
    with pytest.raises(
        ValueError,
        match=r"cifar-10 was not found in .*root.cifar-10\. .*eigenstep data fetch cifar-10",
    ):
        load_images("cifar-10")
    with pytest.raises(ValueError, match=r"no pictures 'mnist': .*digits, fashion-mnist, cifar-10"):
        load_images("mnist")
    with pytest.raises(ValueError, match=r"no text 'homer': .*shakespeare"):
        load_text("homer")
    with pytest.raises(ValueError, match=r"wrong kind.*shakespeare"):
        load_text("digits")


def test_pictures_and_labels_must_belong_together():
    pixels, labels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="test_pixels have shape"):
        Images(pixels, labels, pixels[:, :, :3], labels, ("a",))


def test_data_root_follows_the_environment(monkeypatch, tmp_path):
    assert data.data_root() == tmp_path / "root"
    monkeypatch.setenv("EIGENSTEP_DATA", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.data_root() == tmp_path / ".cache" / "eigenstep"


def test_classes_are_sampled_and_their_list_is_kept(tmp_path, capsys):
    source = tmp_path / "imagenet"
    for part in ("train", "val"):
        for number in range(9):
            (source / part / f"n{number}").mkdir(parents=True)
            Image.new("RGB", (4, 4), (number, 0, 0)).save(source / part / f"n{number}" / "a.png")
    words = ["data", "sample", str(source)]
    assert cli.main([*words, str(tmp_path / "some"), "--classes", "4"]) == 0
    chosen = (tmp_path / "some" / "classes.txt").read_text().split()
    assert len(set(chosen)) == 4
    assert describe(str(tmp_path / "some")) == "4 + 4 pictures in 4 classes"
    assert sorted(path.name for path in (tmp_path / "some" / "val").iterdir()) == chosen
    assert (
        cli.main([*words, str(tmp_path / "same"), "--list", str(tmp_path / "some" / "classes.txt")])
        == 0
    )
    assert (tmp_path / "same" / "classes.txt").read_text().split() == chosen
    assert cli.main([*words, str(tmp_path / "other"), "--classes", "4", "--seed", "1"]) == 0
    assert (tmp_path / "other" / "classes.txt").read_text().split() != chosen
    capsys.readouterr()
    mistakes = {
        "not empty": [str(tmp_path / "some"), "--classes", "4"],
        "cannot draw 25": [str(tmp_path / "new")],
        "say which": [],
    }
    for error, more in mistakes.items():
        assert cli.main([*words, *more]) != 0
        assert error in capsys.readouterr().err
