"""Figures that were written before are read again only if they are whole, and pages show texts as
texts.
"""

import copy
import json
import random
from pathlib import Path

import pytest

from eigenstep_lab.bench import pages
from eigenstep_lab.console import UserError
from eigenstep_lab.figures import report
from eigenstep_lab.results import Curve, Panel, Result, Table, Verdict

ORIGIN = {"seed": 0, "commit": "abc"}
SCRIPT = "'><script>alert(1)</script>"


def section(name="toy", text="text"):
    curve = Curve([1.0, 2.0], [[1.0, 0.5], [1.0, 0.25]])
    result = Result(
        [Panel(text, text, text, {"ours": curve, "paper": curve})],
        [Verdict(text, text, text, 1.0, 2.0)],
        [Table(text, [text, text], [[text, text]])],
    )
    return report.Section(name, text, text, {"steps": 2, text: text}, text, 1.0, "abc", result)


@pytest.fixture
def written(tmp_path):
    report.write_figure(tmp_path, section(), ORIGIN)
    return tmp_path / "toy.json"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "[" * 100_000, '{"panels": [3]}', b"\xed\xa0\x80"],
)
def test_a_file_that_is_no_figure(written, content):
    written.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert report.read_figure(written.parent, section(), ORIGIN) is None


def places(plain, at=()):
    """List all places of a tree of lists and dictionaries."""
    keys = list(plain) if isinstance(plain, dict) else []
    keys = range(len(plain)) if isinstance(plain, list) else keys
    for key in keys:
        yield (*at, key)
        yield from places(plain[key], (*at, key))


def damaged(plain, place, junk):
    """Replace one value, or remove it."""
    (key, *inner), changed = place, copy.copy(plain)
    if inner:
        changed[key] = damaged(plain[key], inner, junk)
    elif junk is ...:
        del changed[key]
    else:
        changed[key] = junk
    return changed


def test_a_damaged_figure_is_made_again_or_can_be_shown(written):
    """Any one value is replaced by something else, or is missing."""
    whole = json.loads(written.read_text())
    # Drawing takes most of the time, so only some are drawn.
    drawn, dice = 0, random.Random(0)
    for place in places(whole):
        for junk in (None, -1, 10**400, "junk", [[]], {"a": 1}, ...):
            written.write_text(json.dumps(damaged(whole, place, junk)))
            kept = report.read_figure(written.parent, section(), ORIGIN)
            if kept is not None and dice.random() < 0.04:
                drawn += 1
                report.write_report(written.parent / "report.html", [kept], ORIGIN)
    assert drawn > 3


def test_a_page_shows_texts_as_texts(tmp_path):
    for name in ("done", "failed"):
        shown = section(SCRIPT, SCRIPT)
        if name == "failed":
            shown = report.replace(shown, result=SCRIPT)
        report.write_report(tmp_path / "report.html", [shown], {SCRIPT: SCRIPT})
        page = (tmp_path / "report.html").read_text()
        assert "<script>" not in page
        assert SCRIPT not in page
        assert "&#x27;&gt;&lt;script&gt;" in page


@pytest.mark.parametrize(
    "table",
    [
        3,
        [],
        {"title": 1, "columns": [], "rows": []},
        {"title": "", "columns": ["a"], "rows": [["b", "c"]]},
    ],
)
def test_pages_refuse_tables_that_are_none(tmp_path, table):
    (tmp_path / "toy.json").write_text(json.dumps({"command": "x", "result": {"tables": [table]}}))
    with pytest.raises(UserError, match="does not hold tables of a benchmark"):
        pages.read(tmp_path / "toy.json")


def test_the_page_names_every_published_verdict_that_does_not_hold():
    """With the claim in its own words, below the heading of its figure, so that its cause can be
    looked up.
    """
    docs = Path(__file__).parents[3] / "docs"
    page = " ".join((docs / "paper.md").read_text().split())
    causes = page.partition("## What does not hold")[2].partition("## Verdicts")[0]
    for table in pages.read(docs / "paper" / "report.json")["result"]["tables"]:
        title = table["title"].partition(" (")[0]
        for claim, *_, verdict in table["rows"]:
            assert verdict in ("holds", "does not hold")
            if verdict == "does not hold":
                assert f"*{title}: {claim.rstrip('.')}.*" in causes
