"""The worked examples run and reach what they promise."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_quantized_network(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    main = runpy.run_path(str(EXAMPLES / "search_quantized_network.py"))["main"]
    main()
    start, end = (
        float(found) for found in re.findall(r"error.*: ([0-9.]+)", capsys.readouterr().out)
    )
    assert start > 0.6  # all zeros: a guess
    assert end < 0.25
