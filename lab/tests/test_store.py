from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import eigenstep
from eigenstep import Spectral
from eigenstep_lab.store import SOURCES, without_words

PROGRAM = '''"""Module."""

WIDTH = 3
"""How wide."""


def double(x):
    """Return twice a number."""
    return 2 * x  # a comment
'''


def test_words_do_not_change_a_program() -> None:
    assert without_words(PROGRAM) == without_words("WIDTH = 3\ndef double(x): return 2*x")


def test_numbers_and_strings_that_are_used_do() -> None:
    assert without_words(PROGRAM) != without_words(PROGRAM.replace("2 * x", "3 * x"))
    assert without_words("x = 'a'") != without_words("x = 'b'")


def test_the_fingerprint_covers_all_that_a_step_runs_through() -> None:
    root, seen = Path(eigenstep.__file__).parent, set()

    def note(frame: FrameType, event: str, _: object) -> None:
        seen.add(frame.f_code.co_filename)

    params = [nn.Parameter(torch.ones(shape)) for shape in ((6, 4), (5,), (2048, 32), (8, 3, 3, 3))]
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for kind in (Spectral, Spectral.fast):
            optimizer = kind(params)
            for _ in range(3):
                for param in params:
                    param.grad = torch.randn_like(param)
                optimizer.step()
    finally:
        sys.setprofile(before)
    found = {str(Path(name).relative_to(root)) for name in seen if name.startswith(str(root))}
    # Checks, and whether state is packed
    assert found - {"core/checks.py", "optim/storage.py"} <= set(SOURCES)
