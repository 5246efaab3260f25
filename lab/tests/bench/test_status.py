"""What is published is of today's code, or said to be stale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eigenstep_lab import cli
from eigenstep_lab.behavior import behavior
from eigenstep_lab.bench import status

TODAY = behavior("search")
PAGE = """# Mine

`eigenstep bench search
--parts mixed` has a command that is broken.

<!-- tables of results/search.json -->
<!-- end of tables -->

![A picture](results/search.png)
"""


@pytest.mark.parametrize(
    ("command", "behaviors", "want"),
    [
        ("search --parts mixed --json x.json", [TODAY], "today's"),
        ("search --parts mixed", ["search:12345678"], "stale: search"),
        ("search --parts mixed", None, "stale: behavior unknown"),
        ("search --parts mixed", [], "today's"),
        ("gone", [TODAY], "stale: its command is gone"),
    ],
)
def test_statuses(command: str, behaviors: list[str] | None, want: str, tmp_path: Path) -> None:
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    table = {"title": "T", "columns": ["a"], "rows": [["1"]], "timed": False}
    file = {"command": f"eigenstep bench {command}", "result": {"tables": [table]}}
    if behaviors is not None:
        file["behavior"] = behaviors
    (results / "search.json").write_text(json.dumps(file))
    page = tmp_path / "docs" / "page.md"
    page.write_text(PAGE)
    entries = list(status.published([page]))
    assert {entry.status for entry in entries} == {want}
    text = [] if command == "gone" else ["text, `eigenstep bench search --parts mixed`"]
    places = ["tables of results/search.json", "picture results/search", *text]
    assert [entry.what for entry in entries] == places


def test_figures_of_the_paper_and_pictures_without_a_file(tmp_path: Path) -> None:
    page = tmp_path / "paper.md"
    page.write_text("![Alone](results/alone.png)")
    (tmp_path / "paper").mkdir()
    report = {"command": "eigenstep reproduce all", "code": TODAY}
    (tmp_path / "paper" / "report.json").write_text(json.dumps(report))
    assert [e.status for e in status.published([page])] == ["no file of results", "today's"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "status", "--project", str(tmp_path)]) == 2
    (tmp_path / "README.md").write_text("Nothing.")
    assert cli.main(["bench", "status", "--project", str(tmp_path)]) == 0
    assert "0 published, 0 stale" in capsys.readouterr().out
    (tmp_path / "docs" / "results").mkdir(parents=True)
    file: dict[str, Any] = {"command": "eigenstep bench search", "behavior": ["search:12345678"]}
    file["result"] = {"tables": []}
    (tmp_path / "docs" / "results" / "search.json").write_text(json.dumps(file))
    (tmp_path / "docs" / "search.md").write_text("![A picture](results/search.png)")
    assert cli.main(["bench", "status", "--project", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "search.md",
        "  picture results/search: stale: search",
        "    eigenstep bench search",
    ]
