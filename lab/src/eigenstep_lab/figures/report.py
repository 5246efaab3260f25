"""Write results: JSON, pictures, and one HTML page that needs no other file."""

from __future__ import annotations

import base64
import functools
import inspect
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

from ..console import atomic_write, write_json
from ..plotting import figure
from ..results import Panel, Result, Table, Verdict

# Okabe and Ito's colors, which people with color blindness can tell apart.
OURS, PAPER = "#D55E00", "#0072B2"
OTHERS = ("#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#777777")
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Section:
    """A figure as the report shows it.

    Attributes:
        name: Its name on the command line.
        title: Heading.
        text: What was done, as the docstring of its module says.
        settings: Numbers that define the experiment.
        command: What to type to make it again.
        seconds: How long it took.
        commit: The version of the code that made it.
        result: What came out, or a sentence that says why nothing did.
        share: Which part of the figure this is, if it is not the whole.
    """

    name: str
    title: str
    text: str
    settings: Mapping[str, Any]
    command: str
    seconds: float
    commit: str
    result: Result | str
    share: str = ""

    @functools.cached_property
    def pictures(self) -> dict[str, bytes]:
        """The figure as PNG and SVG, drawn once."""
        assert isinstance(self.result, Result)
        return pictures(self.result)


def draw(result: Result) -> Any:
    """Draw the panels: medians over the seeds, and bands of their middle 80 %."""
    columns = min(result.columns, len(result.panels))
    rows = -(-len(result.panels) // columns)
    drawn, axes = figure(columns, rows, width=4.6, height=3.4)
    styles = _styles([name for panel in result.panels for name in panel.curves])
    handles: dict[str, Any] = {}
    for ax, panel in zip(axes.flat, result.panels, strict=False):
        ax.set(title=panel.title, xlabel=panel.x, ylabel=panel.y, yscale="log")
        for name, curve in panel.curves.items():
            handles[name] = ax.plot(curve.x, curve.quantile(0.5), label=name, **styles[name])[0]
            low, high = curve.quantile(0.1), curve.quantile(0.9)
            ax.fill_between(
                curve.x, low, high, color=styles[name]["color"], alpha=0.12, linewidth=0
            )
        ax.locator_params(axis="x", nbins=6)
        _hide_divergence(ax, panel)
    for ax in axes.flat[len(result.panels) :]:
        ax.set_visible(False)
    # Lines are long enough to tell dashes apart, and long names get more room.
    shape = {"ncols": 3 if max(map(len, handles)) > 24 else 4, "handlelength": 3.6, "fontsize": 9}
    drawn.legend(handles.values(), handles.keys(), loc="outside lower center", **shape)
    return drawn


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Give every scheme one look: the paper's and ours one color each, thick."""
    others = cycle(OTHERS)
    dashes = {"paper": cycle(DASHES), "ours": cycle(DASHES), "": cycle(("--", ":", "-."))}
    styles = {}
    for name in dict.fromkeys(names):
        family = next((family for family in ("paper", "ours") if name.startswith(family)), "")
        color = {"paper": PAPER, "ours": OURS}.get(family) or next(others)
        # Baselines are thin and on top: where curves coincide, which many claims are about, both
        # can be seen.
        width, order = (2.4, 2) if family else (1.4, 3)
        styles[name] = {
            "color": color,
            "linestyle": next(dashes[family]),
            "linewidth": width,
            "zorder": order,
        }
    return styles


def _hide_divergence(ax: Any, panel: Panel) -> None:
    """Cut the axis where curves that blow up would flatten all others."""
    medians = [curve.quantile(0.5) for curve in panel.curves.values()]
    # Distances between schemes start at nothing, so that what most curves reach counts as well.
    usual = statistics.median(max(values) for values in medians)
    bottom, top = ax.get_ylim()
    ax.set_ylim(bottom, min(top, 30 * max(usual, *(values[0] for values in medians))))


def write_figure(directory: Path, section: Section, origin: Mapping[str, Any]) -> None:
    """Write NAME.json, NAME.png and NAME.svg.

    Args:
        directory: Where they go.
        section: The figure, with a result.
        origin: Seed, device and versions that the numbers depend on.
    """
    assert isinstance(section.result, Result)
    head = {"figure": section.name, "title": section.title, **origin, "command": section.command}
    body = {
        "seconds": section.seconds,
        "settings": dict(section.settings),
        **section.result.as_dict(),
    }
    write_json(directory / f"{section.name}.json", {**head, **body})
    write_pictures(directory, section)


def write_pictures(directory: Path, section: Section) -> None:
    """Write NAME.png and NAME.svg of a figure with a result."""
    for kind, content in section.pictures.items():
        with atomic_write(directory / f"{section.name}.{kind}") as file:
            file.write(content)


def read_figure(directory: Path, planned: Section, origin: Mapping[str, Any]) -> Section | None:
    """Return a figure that was written before, if it was made in this way.

    Args:
        directory: Where ``write_figure`` put it.
        planned: The figure that is wanted, without a result.
        origin: What its numbers depend on; another commit will do, and the section says which.
    """
    try:
        written = json.loads((directory / f"{planned.name}.json").read_text())
        same = {
            **origin,
            "command": planned.command,
            "settings": json.loads(json.dumps(dict(planned.settings))),
        }
        if any(written[key] != value for key, value in same.items() if key != "commit"):
            return None
        result = Result.from_dict(written)
        return replace(
            planned, seconds=float(written["seconds"]), commit=str(written["commit"]), result=result
        )
    except (
        OSError,
        ArithmeticError,
        AttributeError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
    ):
        return None


def pictures(result: Result) -> dict[str, bytes]:
    """Return the figure as PNG and as SVG; the same numbers give the same bytes."""
    import matplotlib
    from matplotlib import pyplot

    drawn = draw(result)
    written = {}
    # Text stays text in the SVG; its random ids and its date would change from run to run.
    with matplotlib.rc_context({"svg.hashsalt": "eigenstep", "svg.fonttype": "none"}):
        for kind in ("png", "svg"):
            buffer = io.BytesIO()
            drawn.savefig(
                buffer, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else None
            )
            written[kind] = buffer.getvalue()
    pyplot.close(drawn)
    return written


def write_report(path: Path, sections: Sequence[Section], origin: Mapping[str, Any]) -> None:
    """Write one HTML page with all figures, tables, verdicts, settings and versions."""
    verdicts = [v for s in sections if isinstance(s.result, Result) for v in s.result.verdicts]
    held = sum(v.holds for v in verdicts)
    body = [
        "<h1>The paper, reproduced</h1>",
        "<p><em>Spectral-factorized Positive-definite Curvature Learning for NN Training</em> (Lin "
        "et al., 2025): its "
        "empirical claims, measured anew. “Paper” is the paper's scheme as published, “ours” is "
        "the default of "
        "eigenstep. Lines are medians over seeds, bands hold the middle 80 % of them. Every "
        "verdict is computed "
        "from the measured figure and a limit that was fixed beforehand.</p>",
        f"<p class='sum'>{held} of {len(verdicts)} checks hold.</p>",
        _overview(sections),
        *map(_section, sections),
        "<h2>How this page was made</h2>",
        _html_table(
            Table("", ("what", "value"), [(key, str(value)) for key, value in origin.items()])
        ),
    ]
    page = PAGE.replace("BODY", "\n".join(body))
    with atomic_write(path) as file:
        file.write(page.encode())


def _overview(sections: Sequence[Section]) -> str:
    rows = []
    for section in sections:
        link = f"<a href='#{escape(section.name)}'>{escape(section.title)}</a>"
        if isinstance(section.result, str):
            rows.append(f"<tr><td>{link}</td><td colspan='3'>{escape(section.result)}</td></tr>")
            continue
        for at, verdict in enumerate(section.result.verdicts):
            first = f"<td rowspan='{len(section.result.verdicts)}'>{link}</td>" if at == 0 else ""
            rows.append(f"<tr>{first}{_verdict_cells(verdict)}</tr>")
    head = (
        "<tr><th>figure</th><th>the paper's "
        "claim</th><th>scheme</th><th>measured</th><th>verdict</th></tr>"
    )
    return f"<table>{head}{''.join(rows)}</table>"


def _verdict_cells(verdict: Verdict) -> str:
    tone = "yes" if verdict.holds else "no"
    cells = (verdict.claim, verdict.scheme, f"{verdict.quantity}: {verdict.measured}")
    texts = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f"{texts}<td class='{tone}'>{verdict.word}</td>"


def _section(section: Section) -> str:
    text = "".join(
        f"<p>{escape(part)}</p>" for part in inspect.cleandoc(section.text).split("\n\n")
    )
    head = f"<h2 id='{escape(section.name)}'>{escape(section.title)}</h2>{text}"
    if isinstance(section.result, str):
        return f"{head}<p class='no'>Not run: {escape(section.result)}</p>"
    picture = base64.b64encode(section.pictures["svg"]).decode()
    settings = ", ".join(f"{key} = {value}" for key, value in section.settings.items())
    return "".join(
        (
            head,
            f"<img alt='{escape(section.title)}' src='data:image/svg+xml;base64,{picture}'>",
            *(_html_table(table) for table in section.result.tables),
            f"<p class='small'>Settings: {escape(settings)}. Took {section.seconds:.0f} s at "
            "commit "
            f"{escape(section.commit)}. Again: "
            f"<code>{escape(section.command)}</code></p>",
        )
    )


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    return f"<h3>{escape(table.title)}</h3><table><tr>{head}</tr>{rows}</table>"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>eigenstep: the paper, reproduced</title>
<style>
body {font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto;
  padding: 0 1rem; color: #222}
h2 {margin-top: 3rem; border-top: 1px solid #ddd; padding-top: 1.5rem}
h3 {font-size: 1rem; margin-bottom: .3rem}
table {border-collapse: collapse; font-size: .875rem; margin: .5rem 0 1rem}
th, td {border: 1px solid #ddd; padding: .3rem .6rem; text-align: left; vertical-align: top}
th {background: #f4f4f4}
img {max-width: 100%}
code {background: #f4f4f4; padding: .1rem .3rem}
.small {font-size: .875rem; color: #555}
.sum {font-size: 1.2rem; font-weight: 600}
.yes {color: #00682c; font-weight: 600; white-space: nowrap}
.no {color: #a3320b; font-weight: 600; white-space: nowrap}
</style></head><body>
BODY
</body></html>
"""
