"""Tables of benchmarks in pages, and verdicts that follow from figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eigenstep_lab import cli
from eigenstep_lab.bench import pages, step
from eigenstep_lab.console import UserError

PROJECT = Path(__file__).parents[3]
PLACE = "# Mine\n\n<!-- tables of {} -->\nstale\n<!-- end of tables -->\n\nThe end.\n"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    tables = [
        {
            "title": "Costs",
            "columns": ["name", "cost"],
            "rows": [["a", "1"], ["b", "2"]],
            "timed": False,
        }
    ]
    file = {"command": "eigenstep bench toy", "commit": "abc", "result": {"tables": tables}}
    (tmp_path / "toy.json").write_text(json.dumps(file))
    (tmp_path / "page.md").write_text(PLACE.format("toy.json"))
    return tmp_path / "page.md"


def test_tables_go_where_the_page_says(page: Path) -> None:
    for _ in range(2):  # filling again changes nothing
        assert cli.main(["bench", "pages", str(page)]) == 0
        text = page.read_text()
        assert "| name | cost |\n| --- | --- |\n| a | 1 |\n| b | 2 |\n" in text
        assert "Made by `eigenstep bench toy` at commit abc" in text
        assert "stale" not in text
        assert text.startswith("# Mine\n")
        assert text.endswith("The end.\n")


@pytest.mark.parametrize(
    "content", [None, "{", '{"command": "x"}', '{"command": "x", "result": {}}', "[]"]
)
def test_files_that_hold_no_tables(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "other.json").write_text(content)
    with pytest.raises(UserError, match="does not hold tables of a benchmark"):
        pages.filled(PLACE.format("other.json"), tmp_path)


def test_pages_that_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "pages", str(tmp_path / "none.md")]) == 2
    assert "cannot read the page" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_published_pages_show_the_published_figures(path: Path) -> None:
    assert pages.filled(path.read_text(), path.parent) == path.read_text(), (
        f"run `eigenstep bench pages {path.name}`"
    )


@pytest.mark.parametrize(
    "path", sorted((PROJECT / "docs/results").glob("*.json")), ids=lambda p: p.name
)
def test_published_commands_work_in_every_clone(path: Path) -> None:
    words = json.loads(path.read_text())["command"].split()
    assert words[:2] == ["eigenstep", "bench"]
    assert not [word for word in words if word.startswith(("/", "~", ".."))]
    assert all((PROJECT / word).is_file() for word in words if word.endswith((".json", ".png")))


def test_step_verdicts() -> None:
    """SOAP as it comes has bases for a vocabulary of 4096, ours has none: there the other SOAP is
    the rival.
    """
    costs = {
        "spectral": (5, 1),
        "soap": (10, 1),
        "soap_2048": (8, 1),
        "klshampoo": (8, 1),
        "spectral_fast": (3, 2),
    }
    costs |= {"muon_float32": (4, 1), "muon": (1, 1)}
    figures = {name: {"ms": ms, "gflop": gflop} for name, (ms, gflop) in costs.items()}
    found = [(v.value, v.holds) for v in step.verdicts({"vit-768": figures, "gpt-256": figures})]
    of_muon = [(0.75, True), (2.0, False)]
    assert found == [
        (0.5, True),
        (0.625, False),
        *of_muon,
        (0.625, False),
        (0.625, False),
        *of_muon,
    ]
