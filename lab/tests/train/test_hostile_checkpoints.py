"""Checkpoints with right checksums that somebody else wrote: nothing in them may run."""

import io
import pickle
import shutil
import struct
import zipfile

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
    """A module that leaves a file behind when it is imported, and a method that may not change."""
    (tmp_path / "trap").mkdir()
    spring = f"open({str(tmp_path / 'sprung')!r}, 'w').close()"
    (tmp_path / "trap" / "__init__.py").write_text(spring)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = Metadata.__init__
    yield
    assert not (tmp_path / "sprung").exists(), "code of the checkpoint was run"
    assert Metadata.__init__ is before


def text(value):
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def call(module, name, *arguments):
    return b"c" + f"{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR"


ATTACKS = {
    "system": lambda folder: call("os", "system", text(f"touch {folder / 'sprung'}")),
    # A name that is not allowed, reached through a package that is trusted as a whole
    "package": lambda _: (
        call("importlib.util", "find_spec", text("trap.inner"))
        + b"cpytorch_optimizer.optimizer\nfind_spec\n"
    ),
    "getattr": lambda _: call(
        "builtins", "getattr", call("builtins", "__import__", text("trap")), text("__name__")
    ),
    # An allowed class gets another method
    "class": lambda _: (
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
        + b"(N}"
        + text("__init__")
        + b"cos\nsystem\nstb"
    ),
}
"""Pickles that do harm when they are read without limits."""


@pytest.fixture(params=ATTACKS)
def attack(request, tmp_path):
    return b"\x80\x02" + ATTACKS[request.param](tmp_path) + b"."


def as_pt(raw):
    """Put a pickle into a file as torch.save writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", raw)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return buffer.getvalue()


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


def refuse(folder, message=r"step-000000001.dcp is damaged .*delete it and repeat the command"):
    seal(folder)
    with pytest.raises(ValueError, match=message):
        parallel.peek(folder, "settings")


def test_a_file_runs_nothing(tmp_path, attack):
    path = tmp_path / "step-000000001.pt"
    path.write_bytes(as_pt(attack))
    checksums.write(tmp_path / "step-000000001.pt.sha256", {path.name: checksums.digest(path)})
    with pytest.raises(ValueError, match=r"step-000000001.pt is damaged .*delete it and repeat"):
        checkpoint.load(path)


def test_the_table_of_contents_runs_nothing(folder, attack):
    (folder / TABLE).write_bytes(attack)
    refuse(folder)


def test_what_is_no_tensor_runs_nothing(folder, attack):
    """The entry of the settings is replaced, and the table of contents follows."""
    table = pickle.loads((folder / TABLE).read_bytes())
    evil = as_pt(attack)
    (folder / "__9_0.distcp").write_bytes(evil)
    for index, entry in table.storage_data.items():
        if index.fqn == "progress.settings":
            entry.relative_path, entry.offset, entry.length = "__9_0.distcp", 0, len(evil)
    (folder / TABLE).write_bytes(pickle.dumps(table))
    refuse(folder)


@pytest.mark.parametrize("place", ["../secret", "/etc/hostname", SUMS])
def test_a_table_of_contents_stays_in_its_folder(folder, tmp_path, place):
    shutil.copy(next(folder.glob("*.distcp")), tmp_path / "secret")
    table = pickle.loads((folder / TABLE).read_bytes())
    for entry in table.storage_data.values():
        entry.relative_path = place
    (folder / TABLE).write_bytes(pickle.dumps(table))
    refuse(folder, "names a file that is no part of it")


def test_classes_are_those_of_their_modules():
    for module, names in checkpoint.CLASSES.items():
        for allowed in checkpoint._allowed([f"{module}.{name}" for name in names]):
            assert isinstance(allowed, type)
            assert allowed.__module__ == module
    assert checkpoint._allowed(["pytorch_optimizer.optimizer.find_spec", "os.system"]) == []


def test_a_folder_is_read_as_it_was_written(folder):
    assert parallel.peek(folder, "settings") == "{}"
    model, optimizer = network()
    with torch.no_grad():
        model.weight.zero_()
    assert parallel.load(folder, model, optimizer, {"step": 0})["step"] == 1
    assert torch.equal(model.weight, network()[0].weight)
    listed = checksums.read(folder / SUMS)
    assert set(listed) == {path.name for path in folder.iterdir()} - {SUMS}


def test_flipped_bytes_are_noticed(folder):
    model, optimizer = network()
    for path in sorted(folder.iterdir()):
        raw = path.read_bytes()
        for place in range(0, len(raw), max(1, len(raw) // 20)):
            path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
            with pytest.raises(ValueError, match=r"checksum of \S+ is wrong|not a list of check"):
                parallel.load(folder, model, optimizer, {"step": 0})
        path.write_bytes(raw)


def test_what_is_missing_is_named(folder):
    file = next(folder.glob("*.distcp"))
    file.rename(folder / "elsewhere")
    with pytest.raises(ValueError, match=rf"the checksum of {file.name} is wrong.*delete it"):
        parallel.peek(folder, "settings")
    checksums.write(folder / SUMS, {"elsewhere": checksums.digest(folder / "elsewhere")})
    with pytest.raises(ValueError, match="its table of contents has no checksum"):
        parallel.peek(folder, "settings")
    (folder / SUMS).unlink()
    with pytest.raises(ValueError, match=r"SHA256SUMS, which holds the checksums, is missing"):
        parallel.peek(folder, "settings")


def test_a_damaged_list_of_checksums(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"step": 1})
    listing = tmp_path / "step-000000001.pt.sha256"
    for content in ("", "0" * 64 + "  ../step-000000001.pt\n"):
        listing.write_text(content)
        with pytest.raises(ValueError, match="sha256 is not a list of checksums"):
            checkpoint.load(path)
