"""The search runs without torch and without the laboratory."""

from __future__ import annotations

import subprocess
import sys

import pytest

SEARCH = "minimize(lambda x: float((x**2).sum()), [1.0, 2.0], 0.5, max_evals=60)"


@pytest.mark.parametrize(
    "statement", ["import eigenstep.search", "from eigenstep import minimize; " + SEARCH]
)
def test_no_torch_is_loaded(statement: str) -> None:
    check = (
        "import sys; print([n for n in ('torch', 'eigenstep_lab', 'matplotlib', 'rich') if n "
        "in sys.modules])"
    )
    child = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{check}"], capture_output=True, text=True, timeout=120
    )
    assert child.stdout == "[]\n", child.stderr
