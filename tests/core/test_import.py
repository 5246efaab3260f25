"""Importing the package sets up nothing: no output, no torch, until something is used."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

import eigenstep
from eigenstep import core


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )


def test_import_prints_nothing_and_loads_nothing() -> None:
    child = run(
        "import os, sys; before = dict(os.environ); import eigenstep; "
        "assert dict(os.environ) == before; "
        "loaded = {'torch', 'numpy', 'scipy', 'matplotlib', 'rich'} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    assert child.stdout == ""
    assert child.stderr == ""


def test_using_a_name_loads_it() -> None:
    child = run(
        "import sys, eigenstep; S = eigenstep.Full.identity(2); assert 'torch' in sys.modules"
    )
    assert child.stdout == ""


def test_every_public_name_exists_and_is_listed() -> None:
    for name in eigenstep.__all__:
        assert name in dir(eigenstep)
        assert getattr(eigenstep, name).__doc__
    assert eigenstep.__version__


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = eigenstep.nonsense


@pytest.mark.parametrize("module", [found.name for found in iter_modules(core.__path__)])
def test_every_core_module_and_public_thing_explains_itself(module: str) -> None:
    home = import_module(f"eigenstep.core.{module}")
    assert home.__doc__
    for name, thing in vars(home).items():
        if (
            not name.startswith("_")
            and getattr(thing, "__module__", None) == home.__name__
            and callable(thing)
        ):
            assert thing.__doc__, f"{module}.{name} has no docstring"


def test_package_is_typed() -> None:
    assert (Path(eigenstep.__file__).parent / "py.typed").exists()
