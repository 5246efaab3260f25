"""Tables of benchmarks in pages, and verdicts that follow from figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eigenstep_lab import cli
from eigenstep_lab.bench import pages, precision, step, training
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


def row(
    task: str, optimizer: str, loss: float, lr: float = 0.01, other: float = 9.0
) -> dict[str, Any]:
    by_lr = {f"{lr:g}": loss, "0.003" if lr == 0.01 else "0.01": other}
    return {"task": task, "optimizer": optimizer, "loss": loss, "lr": lr, "loss_by_lr": by_lr}


def test_training_verdicts() -> None:
    losses = {
        "spectral": (1.0, 2.0, 3.03),
        "soap": (1.1, 2.1, 3.0),
        "klsoap": (1.2, 2.0, 3.1),
        "muon": (2.0, 2.0, 4.0),
    }
    rows = [
        row(f"task{at}", name, loss)
        for name, found in losses.items()
        for at, loss in enumerate(found)
    ]
    rows += [row(f"task{at}", "adamw", 5.0, lr=0.003) for at in range(3)]
    found = {(v.claim.split(" on ")[0], v.scheme): v for v in training.verdicts("grid", rows)}
    counted = found["as good as SOAP and KL-SOAP", "spectral"]
    assert (counted.value, counted.holds) == (2, True)
    behind = found["never more than 1 % behind the better of SOAP and KL-SOAP", "spectral"]
    assert (round(behind.value, 4), behind.holds) == (1.01, True)
    assert found["at least as good as muon", "spectral"].holds
    transfer = found["better than AdamW at the learning rate that suits AdamW best", "spectral"]
    assert (transfer.value, transfer.holds) == (9 / 5, False)
    assert ("at least as good as muon", "spectral_fast") not in found, "not measured"


def test_long_runs_take_the_best_rates_of_the_grid() -> None:
    found = row("task", "soap", 1.0, lr=0.01, other=2.0)
    found["loss_by_lr"]["0.03"] = 1.5
    assert training.best_rates(found, 2) == [0.01, 0.03]
    assert training.best_rates(found, 1) == [0.01]
    long = [row("task", "spectral", 1.0), row("task", "adamw", 5.0, lr=0.1)]
    assert not any("suits AdamW" in v.claim for v in training.verdicts("long", long)), (
        "that rate was not tried"
    )


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


def test_precision_verdicts() -> None:
    results = {
        "float32": {"loss": 1.0, "largest_defect": 1e-6},
        "bf16": {"loss": 1.02, "largest_defect": 2e-2},
    }
    assert [v.holds for v in precision.verdicts(results)] == [True, False, False]
