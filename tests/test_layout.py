"""How the repository is laid out: a library that knows nothing of its laboratory, in files that can
be read.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "src" / "eigenstep"
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for folder in ("src", "lab", "tests", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
INSTALLED_APART = {
    "eigenstep.integrations.axolotl",
    "eigenstep.integrations.torchtitan",
}
"""Modules that are nothing but a bridge to an optional package, which may be missing."""


def imported(tree: ast.AST) -> Iterator[str]:
    """List the names of the modules that code imports, at its top or later."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def module_names() -> list[str]:
    paths = sorted(LIBRARY.rglob("*.py"))
    return [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for path in paths
    ]


@pytest.mark.parametrize("folder", ["src/eigenstep", "examples"])
def test_the_laboratory_is_not_imported(folder: str) -> None:
    """Nor named in a string, from which it could be imported."""
    files = {path: text for path, text in SOURCES.items() if path.startswith(folder)}
    assert len(files) > 10
    for path, text in files.items():
        assert "eigenstep_lab" not in {
            name.partition(".")[0] for name in imported(ast.parse(text))
        }, path
        assert "eigenstep_lab" not in text, path


def test_every_module_can_be_imported_without_the_laboratory() -> None:
    wanted = [name for name in module_names() if name not in INSTALLED_APART]
    assert len(wanted) > 50
    code = (
        # None: an import of it fails
        "import importlib, sys; sys.modules['eigenstep_lab'] = None; "
        f"[importlib.import_module(name) for name in {wanted}]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_wheel_is_the_library_alone(tmp_path: Path) -> None:
    """Built by the backend of `pip wheel`, in the form in which users get it."""
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        code = {name: archive.read(name).decode() for name in names if name.endswith(".py")}
    assert {name.partition("/")[0] for name in names} == {"eigenstep"}
    assert set(names) - set(code) == {"eigenstep/py.typed"}
    assert set(code) == {
        path.relative_to(LIBRARY.parent).as_posix() for path in LIBRARY.rglob("*.py")
    }
