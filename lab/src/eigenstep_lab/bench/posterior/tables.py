"""Tables of the benchmark of posteriors, and its verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

OURS, RIVALS = "Spectral.posterior", ("IVON", "last-layer Laplace")
SHARE = 2 / 3
"""Ours should be at least as good as each rival on this share of the test sets."""


def values(
    found: Mapping[str, Any], problem: str, method: str, test: str, score: str
) -> list[float]:
    """Return one score of all seeds; runs that failed have none."""
    runs = found[problem].get(method, {"runs": []})["runs"]
    return [
        run["tests"][test][score] for run in runs if score in run.get("tests", {}).get(test, {})
    ]


def mean(found: Mapping[str, Any], problem: str, method: str, test: str, score: str) -> float:
    """Return the mean over seeds, infinite if a run failed."""
    own = values(found, problem, method, test, score)
    return (
        statistics.fmean(own)
        if own and len(own) == len(found[problem][method]["runs"])
        else float("inf")
    )


def tests_of(found: Mapping[str, Any], problem: str) -> list[str]:
    """Return the names of a problem's test sets."""
    return list(
        next(run["tests"] for m in found[problem].values() for run in m["runs"] if "tests" in run)
    )


def tables_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all tables."""
    methods = list(dict.fromkeys(method for own in found.values() for method in own))
    cases = [(problem, test) for problem in found for test in tests_of(found, problem)]
    result = [
        {
            "title": title,
            "columns": ["test set", *methods],
            "rows": [
                [f"{p}, {t}", *(f"{mean(found, p, m, t, score):.{digits}f}" for m in methods)]
                for p, t in cases
                if any(values(found, p, m, t, score) for m in methods)
            ],
        }
        for title, score, digits in (
            ("Log loss in nats", "nll", 4),
            ("Calibration error", "ece", 4),
            ("Log loss after temperature scaling", "scaled nll", 4),
            ("Calibration error after temperature scaling", "scaled ece", 4),
            ("Brier score", "brier", 4),
            ("Accuracy", "accuracy", 3),
            ("Root mean square error", "rmse", 3),
        )
    ]
    for title, score in (
        ("Foreign inputs: area under the curve", "detection"),
        ("Training, CPU seconds", "seconds"),
    ):
        rows = [
            [p, *own] for p in found if any(own := [_other(found, p, m, score) for m in methods])
        ]
        result.append({"title": title, "columns": ["problem", *methods], "rows": rows})
    result.append(
        {
            "title": "Verdicts",
            "columns": ["claim", "measured", "verdict"],
            "rows": verdicts(found, cases),
        }
    )
    return [table for table in result if table["rows"]]


def _other(found: Mapping[str, Any], problem: str, method: str, name: str) -> str:
    own = [run[name] for run in found[problem].get(method, {"runs": []})["runs"] if name in run]
    return f"{statistics.fmean(own):.3f}" if own else ""


def verdicts(found: Mapping[str, Any], cases: list[tuple[str, str]]) -> list[list[str]]:
    """Return whether ours is at or below its rivals on enough test sets, after temperature scaling
    and before.
    """
    rows = []
    for scaled in (True, False):
        for score, title in (("nll", "log loss"), ("ece", "calibration error")):
            for rival in RIVALS:
                both = [case for case in cases if {OURS, rival} <= found[case[0]].keys()]
                won = [
                    case
                    for case in both
                    if judged(found, case, OURS, score, scaled)
                    <= judged(found, case, rival, score, scaled)
                ]
                if both:
                    holds = "holds" if len(won) >= SHARE * len(both) else "does not hold"
                    claim = f"{title}{', scaled,' if scaled else ' as it is'} at or below {rival}'s"
                    rows.append([claim, f"{len(won)} of {len(both)} test sets", holds])
    return rows


def judged(
    found: Mapping[str, Any], case: tuple[str, str], method: str, score: str, scaled: bool
) -> float:
    """Return a mean over seeds, after temperature scaling if asked and if there is any: regressions
    have none.
    """
    after = f"scaled {score}"
    return mean(
        found,
        *_at(case, method),
        after if scaled and values(found, *_at(case, method), after) else score,
    )


def _at(case: tuple[str, str], method: str) -> tuple[str, str, str]:
    return case[0], method, case[1]
