"""Checkpoints that somebody else put into the run's folder, with checksums that are right: nothing
in them may run.
"""

import io
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from eigenstep.optim import Spectral
from eigenstep_lab import checksums
from eigenstep_lab.train import checkpoint, parallel
from eigenstep_lab.train.checkpoint import SUMS, TABLE


@pytest.fixture(autouse=True)
def trap(tmp_path, monkeypatch):
    """A module that tells when it is imported, and a file that code in a checkpoint would leave
    behind.
    """
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "__init__.py").write_text(
        f"open({str(tmp_path / 'sprung')!r}, 'w').close()"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    assert not (tmp_path / "sprung").exists(), "code of the checkpoint was run"


def text(value):
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def call(module, name, *arguments):
    return b"c" + f"{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def attacks(folder):
    """Pickles that leave a file behind, or change what a class does, when they are read without
    limits.
    """
    spring = f"open({str(folder / 'sprung')!r}, 'w').close()"
    return {
        "system": call("os", "system", text(f"touch {folder / 'sprung'}")),
        "eval": call("builtins", "eval", text(spring)),
        "find_spec": call("importlib.util", "find_spec", text("trap.inner")),
        # A name that is not allowed, reached through a package that was trusted as a whole.
        "find_spec of a package": call("importlib.util", "find_spec", text("trap.inner"))
        + b"cpytorch_optimizer.optimizer\nfind_spec\n",
        "getattr chain": call(
            "builtins", "getattr", call("builtins", "__import__", text("trap")), text("__name__")
        ),
        "persistent id": text(spring) + b"Q",
        "extension": b"\x82\x01",
        "class": b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
        + b"(N}" + text("__init__") + b"cos\nsystem\nst" + b"b",
    }  # fmt: skip


NAMES = sorted(attacks(Path()))


def pickled(body):
    return b"\x80\x02" + body + b"."


def as_pt(raw):
    """Put a pickle into a file as torch.save writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", raw)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return buffer.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_a_file_runs_nothing(tmp_path, name):
    path = tmp_path / "step-000000001.pt"
    path.write_bytes(as_pt(pickled(attacks(tmp_path)[name])))
    checksums.write(tmp_path / "step-000000001.pt.sha256", {path.name: checksums.digest(path)})
    with pytest.raises(
        ValueError, match=r"step-000000001.pt is damaged .*delete it and repeat the command"
    ):
        checkpoint.load(path)


def test_classes_are_those_of_their_modules():
    for module, names in checkpoint.CLASSES.items():
        for found in checkpoint._allowed([f"{module}.{name}" for name in names]):
            assert isinstance(found, type)
            assert found.__module__ == module
    assert checkpoint._allowed(["pytorch_optimizer.optimizer.find_spec", "os.system"]) == []


def network():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = Spectral(model.named_parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def folder(tmp_path):
    """A checkpoint in the format of several processes."""
    path = tmp_path / "step-000000001.dcp"
    parallel.save(path, parallel.Team(), *network(), {"step": 1, "settings": "{}"})
    return path


def seal(folder):
    """Make the checksums right."""
    names = [path.name for path in folder.iterdir() if path.name != SUMS]
    checksums.write(folder / SUMS, {name: checksums.digest(folder / name) for name in names})


def test_a_folder_is_read_as_it_was_written(folder):
    assert parallel.peek(folder, "settings") == "{}"
    model, optimizer = network()
    with torch.no_grad():
        model.weight.zero_()
    assert parallel.load(folder, model, optimizer, {"step": 0})["step"] == 1
    assert torch.equal(model.weight, network()[0].weight)
    listed = checksums.read(folder / SUMS)
    assert set(listed) == {path.name for path in folder.iterdir()} - {SUMS}


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_contents_runs_nothing(folder, tmp_path, name):
    before = Metadata.__init__
    (folder / TABLE).write_bytes(pickled(attacks(tmp_path)[name]))
    seal(folder)
    with pytest.raises(
        ValueError, match=r"step-000000001.dcp is damaged .*delete it and repeat the command"
    ):
        parallel.peek(folder, "settings")
    assert Metadata.__init__ is before


def test_a_table_of_contents_cannot_change_a_class(folder):
    """Pickle can set attributes of a class, here to another class that is allowed."""
    names = {
        name: b"ctorch.distributed.checkpoint.metadata\n" + name + b"\n"
        for name in (b"Metadata", b"StorageMeta")
    }
    state = b"(N}" + text("version") + names[b"StorageMeta"] + b"st"
    (folder / TABLE).write_bytes(pickled(names[b"Metadata"] + state + b"b"))
    seal(folder)
    with pytest.raises(ValueError, match="is damaged"):
        parallel.peek(folder, "settings")
    assert Metadata.version is None


@pytest.mark.parametrize("place", ["../secret", "/etc/hostname", SUMS, 7])
def test_a_table_of_contents_stays_in_its_folder(folder, tmp_path, place):
    shutil.copy(next(folder.glob("*.distcp")), tmp_path / "secret")
    table = pickle.loads((folder / TABLE).read_bytes())
    for entry in table.storage_data.values():
        entry.relative_path = place
    (folder / TABLE).write_bytes(pickle.dumps(table))
    seal(folder)
    with pytest.raises(ValueError, match="names a file that is no part of it"):
        parallel.peek(folder, "settings")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_tensor_runs_nothing(folder, tmp_path, name):
    """The entry of the settings is replaced, and the table of contents follows."""
    table = pickle.loads((folder / TABLE).read_bytes())
    evil = as_pt(pickled(attacks(tmp_path)[name]))
    (folder / "__9_0.distcp").write_bytes(evil)
    for index, entry in table.storage_data.items():
        if index.fqn == "progress.settings":
            entry.relative_path, entry.offset, entry.length = "__9_0.distcp", 0, len(evil)
    (folder / TABLE).write_bytes(pickle.dumps(table))
    seal(folder)
    with pytest.raises(ValueError, match="is damaged"):
        parallel.peek(folder, "settings")


def test_every_flipped_byte_is_noticed(folder):
    model, optimizer = network()
    for path in sorted(folder.iterdir()):
        raw = path.read_bytes()
        for place in range(0, len(raw), 1 if path.name == SUMS else max(1, len(raw) // 40)):
            path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
            with pytest.raises(
                ValueError, match=r"the checksum of \S+ is wrong|not a list of checksums"
            ):
                parallel.load(folder, model, optimizer, {"step": 0})
        path.write_bytes(raw)
    assert parallel.load(folder, model, optimizer, {"step": 0})["step"] == 1


def test_what_is_missing_is_named(folder):
    file = next(folder.glob("*.distcp"))
    file.rename(folder / "elsewhere")
    with pytest.raises(ValueError, match=rf"the checksum of {file.name} is wrong.*delete it"):
        parallel.peek(folder, "settings")
    checksums.write(folder / SUMS, {"elsewhere": checksums.digest(folder / "elsewhere")})
    with pytest.raises(ValueError, match="its table of contents has no checksum"):
        parallel.peek(folder, "settings")
    (folder / SUMS).unlink()
    with pytest.raises(
        ValueError, match=r"\(SHA256SUMS, which holds the checksums, is missing\): delete it"
    ):
        parallel.peek(folder, "settings")


@pytest.mark.parametrize("listing", ["", "nonsense\n", "0" * 64 + "  ../step-000000001.pt\n"])
def test_a_damaged_list_of_checksums(tmp_path, listing):
    path = checkpoint.save(tmp_path, 1, {"step": 1})
    (tmp_path / "step-000000001.pt.sha256").write_text(listing)
    with pytest.raises(ValueError, match="sha256 is not a list of checksums"):
        checkpoint.load(path)
    (tmp_path / "step-000000001.pt.sha256").unlink()
    with pytest.raises(
        ValueError,
        match=r"pt.sha256, which holds the checksums, is missing\): delete it and repeat",
    ):
        checkpoint.load(path)
