"""What an experiment gives: curves over several seeds, tables, and verdicts on claims, computed and
never typed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

Row = Sequence[str]


@dataclass(frozen=True)
class Verdict:
    """A claim, what was measured, and whether the claim holds.

    Attributes:
        claim: The paper's claim, one sentence.
        scheme: Which scheme was measured.
        quantity: What was measured, so that `value` can be read as a sentence.
        value: The measured figure; not a number counts as failed.
        limit: Where the claim stops to hold.
        at_least: Whether `value` must be at least `limit`; otherwise at most.
        timed: Whether the figure is a time, which differs from run to run.
    """

    claim: str
    scheme: str
    quantity: str
    value: float
    limit: float
    at_least: bool = False
    timed: bool = False

    @property
    def holds(self) -> bool:
        """Whether the measured figure is on the right side of the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def measured(self) -> str:
        """The measured figure and its limit, to be read after `quantity`."""
        return f"{self.value:.4g} (must be {'≥' if self.at_least else '≤'} {self.limit:g})"

    @property
    def word(self) -> str:
        """The verdict in words."""
        return "holds" if self.holds else "does not hold"


@dataclass(frozen=True)
class Curve:
    """One quantity along a run, for several seeds.

    Attributes:
        x: Where it was measured.
        runs: The values, one list for each seed, each as long as `x`.
    """

    x: list[float]
    runs: list[list[float]]

    @classmethod
    def of(cls, x: Sequence[float], values: Tensor) -> Curve:
        """Build from values of shape points × seeds."""
        return cls([float(at) for at in x], values.double().T.tolist())

    def quantile(self, fraction: float) -> list[float]:
        """Return, at each point, the value below which this fraction of the seeds lies; NaN ranks
        last.
        """
        values = np.asarray(self.runs, dtype=float)
        ordered = np.where(np.isnan(values), np.inf, values)
        return [float(v) for v in np.quantile(ordered, fraction, axis=0, method="inverted_cdf")]


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
        title: Written above it.
        x: Label of the horizontal axis.
        y: Label of the vertical axis, which is logarithmic.
        curves: The curves by scheme.
        timed: Whether the horizontal axis is a time, which differs from run to run.
    """

    title: str
    x: str
    y: str
    curves: Mapping[str, Curve]
    timed: bool = False


@dataclass(frozen=True)
class Table:
    """Formatted figures.

    Attributes:
        title: Written above it.
        columns: Names of the columns.
        rows: The cells.
        timed: Whether it contains times, which differ from run to run.
    """

    title: str
    columns: Row
    rows: Sequence[Row]
    timed: bool = False


def verdict_table(title: str, verdicts: Sequence[Verdict]) -> Table:
    """Say what was claimed, what was measured, and whether the claim holds."""
    rows = [(v.claim, v.scheme, f"{v.quantity}: {v.measured}", v.word) for v in verdicts]
    return Table(
        title,
        ("claim", "scheme", "measured", "verdict"),
        rows,
        timed=any(v.timed for v in verdicts),
    )


@dataclass(frozen=True)
class Result:
    """Everything that one figure shows.

    Attributes:
        panels: What is drawn, in reading order.
        verdicts: Claims and whether they hold.
        tables: Figures in numbers.
        columns: How many panels stand side by side.
    """

    panels: Sequence[Panel]
    verdicts: Sequence[Verdict]
    tables: Sequence[Table] = field(default_factory=tuple)
    columns: int = 2

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Result:
        """Build anew what ``as_dict`` gave, also if it was written as JSON, which turns infinity
        into null.

        What cannot be drawn or printed, because the file was damaged, raises one of the usual
        errors of wrong data: ArithmeticError, AttributeError, KeyError, TypeError or ValueError.
        """
        panels = [
            Panel(
                **{
                    **panel,
                    "curves": {name: _read_curve(curve) for name, curve in panel["curves"].items()},
                }
            )
            for panel in plain["panels"]
        ]
        texts = [text for panel in panels for text in (panel.title, panel.x, panel.y)]
        _check(
            bool(panels)
            and all(panel.curves for panel in panels)
            and plain["columns"] in range(1, 100)
        )
        verdicts = [
            {**v, **{name: _number(v[name]) for name in ("value", "limit")}}
            for v in plain["verdicts"]
        ]
        for verdict in verdicts:
            verdict.pop("holds")  # it follows from the rest
        read = [Verdict(**verdict) for verdict in verdicts]
        texts += [
            text for verdict in read for text in (verdict.claim, verdict.scheme, verdict.quantity)
        ]
        _check(all(isinstance(text, str) for text in texts))
        return cls(panels, read, [read_table(table) for table in plain["tables"]], plain["columns"])

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers, with the conclusions that follow from
        them.
        """
        plain = asdict(self)
        for verdict, known in zip(plain["verdicts"], self.verdicts, strict=True):
            verdict["holds"] = known.holds
        for panel, drawn in zip(plain["panels"], self.panels, strict=True):
            for name, curve in drawn.curves.items():
                panel["curves"][name]["median"] = curve.quantile(0.5)
        return plain


def read_table(plain: Mapping[str, Any]) -> Table:
    """Build anew a table that was written as JSON; what is no table raises one of the usual errors
    of wrong data.
    """
    table = Table(**plain)
    _check(all(len(row) == len(table.columns) for row in table.rows))
    cells = [cell for row in table.rows for cell in row]
    _check(all(isinstance(text, str) for text in (table.title, *table.columns, *cells)))
    return table


def _read_curve(plain: Mapping[str, Any]) -> Curve:
    curve = Curve(
        [_number(x) for x in plain["x"]],
        [[_number(value) for value in run] for run in plain["runs"]],
    )
    _check(bool(curve.x and curve.runs) and all(len(run) == len(curve.x) for run in curve.runs))
    return curve


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _check(fits: bool) -> None:
    if not fits:
        raise ValueError("this is not the result of an experiment")


def typical_ratio(curve: Curve, reference: Curve) -> float:
    """Return the geometric mean over points and seeds of `curve` divided by `reference`, seed by
    seed.
    """
    ratios = np.asarray(curve.runs, dtype=float) / np.asarray(reference.runs, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        typical = (
            math.exp(min(float(np.log(ratios).mean()), 700.0))
            if not np.isnan(ratios).any()
            else math.nan
        )
    return typical
