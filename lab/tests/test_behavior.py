from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest
import torch

import eigenstep
import eigenstep.optim
from eigenstep import Spectral, Turning
from eigenstep_lab import behavior
from eigenstep_lab.behavior import PARTS, agree, behavior_of, known_behaviors, measure, recognize

# Each differs from a default.
DEFAULTS = (
    {"betas": (0.9, 0.951)},
    {"betas": (0.901, 0.95)},
    {"weight_decay": 0.011},
    {"eps": 1.1e-8},
    {"cautious_weight_decay": True},
    {"root": 2.02},
    {"eigenvalues": "kronecker"},
    {"nesterov": 0.21},
    {"clip": 1.0},
    {"grafting": False},
    {"damping": 1.1e-10},
    {"max_ratio": 1.5},
    {"turning": Turning(dtype=torch.bfloat16)},
)
PAPER = (
    {"betas": (0.9, 0.951)},
    {"betas": (0.901, 0.95)},
    {"interval": 3},
    {"clip": 0.99},
    {"damping": 1.1e-12},
    {"weight_decay": 0.011},
)


@pytest.mark.parametrize("part", PARTS)
def test_todays_behavior_is_known(part: str) -> None:
    """Once arithmetic changes on purpose: python -m eigenstep_lab.behavior --record"""
    assert recognize(part, measure(part)) in known_behaviors()[part]


def test_known_behaviors_have_names_of_their_own() -> None:
    names = [name for part in known_behaviors().values() for name in part]
    assert len(names) == len(set(names))


def test_other_names_for_everything_inside_of_functions_keep_it(tmp_path: Path) -> None:
    copy = tmp_path / "eigenstep"
    shutil.copytree(Path(eigenstep.__file__).parent, copy)
    for path in copy.rglob("*.py"):
        path.write_text(_renamed(path.read_text("utf-8")), "utf-8")
    lab = Path(behavior.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(lab)])}
    program = "import eigenstep, json; from eigenstep_lab.behavior import PARTS, behavior; "
    program += "print(json.dumps([eigenstep.__file__, *map(behavior, PARTS)]))"
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    place, *names = json.loads(run.stdout)
    assert Path(place).parent == copy
    assert names == [behavior.behavior(part) for part in PARTS]


class _Renaming(ast.NodeTransformer):
    """Gives variables of functions without inner scopes other names."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        inner = [part for part in ast.walk(node) if part is not node]
        scopes = (ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.Global, ast.Nonlocal)
        names = {part.id for part in inner if _is_stored(part)}
        if any(isinstance(part, scopes) for part in inner) or _reads_names(inner):
            return self.generic_visit(node)
        for part in inner:
            if isinstance(part, ast.Name) and part.id in names - _arguments(node):
                part.id = f"other_{part.id}"
        return node


def _is_stored(part: ast.AST) -> bool:
    return isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)


def _reads_names(inner: list[ast.AST]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in ("locals", "vars") for part in inner)


def _arguments(node: ast.FunctionDef) -> set[str]:
    return {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}


def _renamed(source: str) -> str:
    return ast.unparse(_Renaming().visit(ast.parse(source)))


@pytest.mark.parametrize("options", DEFAULTS, ids=str)
def test_each_default_counts(options: dict[str, object]) -> None:
    cases = {
        "steps": behavior._steps(partial(Spectral, **options)),
        "float32": PARTS["spectral"]["float32"].compute(),
    }
    assert not agree("spectral", cases, _known("spectral"))


@pytest.mark.parametrize("options", PAPER, ids=str)
def test_each_of_the_papers_options_counts(options: dict[str, object]) -> None:
    make = partial(Spectral.paper, **options)
    few = {name: behavior.SHAPES[name] for name in behavior.FEW_SHAPES}
    cases = {
        "steps": behavior._steps(make, few),
        "extremes": behavior._steps(make, behavior.EXTREME_SHAPES, steps=30),
    }
    assert not agree("paper", cases, _known("paper"))


def _known(part: str) -> dict[str, list[float]]:
    return known_behaviors()[part][behavior.behavior(part).partition(":")[2]]


def _constants() -> list[tuple[ModuleType, str]]:
    found = []
    for info in iter_modules(eigenstep.optim.__path__, "eigenstep.optim."):
        module = import_module(info.name)
        for name, value in vars(module).items():
            if name.isupper() and isinstance(value, float) and 0.01 < value < 10:
                found.append((module, name))
    return found


def test_each_constant_of_the_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ("eigenstep.optim.portrait",)
    constants = [(m, name) for m, name in _constants() if m.__name__ not in others]
    assert constants
    known = {part: _known(part) for part in ("spectral", "paper")}
    for module, name in constants:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, 1.02 * getattr(module, name))
            seen = [part for part in known if not agree(part, measure(part), known[part])]
        assert seen, f"{module.__name__}.{name}"


def test_what_is_not_known_has_a_name_that_rounding_keeps() -> None:
    numbers = {"a": [1.0, 2.0]}
    other = behavior.name_of({"a": [1.0 + 1e-12, 2.0]})
    assert behavior.name_of(numbers) == other
    assert behavior.name_of({"a": [1.1, 2.0]}) != other


def test_rivals_depend_on_nothing_and_options_on_more() -> None:
    assert behavior_of("adamw") == ""
    assert behavior_of("spectral", changed=True).startswith(behavior_of("spectral") + "+")
    names = {behavior_of(name) for name in ("spectral", "spectral_fast", "spectral_paper")}
    assert len(names) == 3
