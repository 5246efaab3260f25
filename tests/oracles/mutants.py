"""Mutation testing (`make mutants`): change the arithmetic in thousands of small ways; the tests must notice.

mutmut makes the mutants and runs the tests, as ``[tool.mutmut]`` of pyproject.toml says. This script tells the score,
and compares those that survive with ``survivors.toml``, which gives the reason for each. It fails if fewer than 95 %
are killed, or if a mutant survives without a reason.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import tomllib

GOAL = 0.95
KILLED = ("killed", "timeout", "segfault", "caught by type check")
REASONS = Path(__file__).with_name("survivors.toml")


def mutmut(*arguments: str) -> str:
    """Return what a command of mutmut prints."""
    command = [sys.executable, "-m", "mutmut", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def change_of(mutant: str) -> str:
    """Return a mutant's new line, without indentation; names of mutants are numbers that change with the code."""
    diff = [line for line in mutmut("show", mutant).splitlines() if not line.startswith(("+++", "---"))]
    return " ".join(line[1:].strip() for line in diff if line.startswith("+"))


def main() -> int:
    """Make and test the mutants named on the command line, all by default; print the score and the survivors."""
    subprocess.run([sys.executable, "-m", "mutmut", "run", *sys.argv[1:]], check=True)
    lines = [line.strip().rsplit(": ", 1) for line in mutmut("results", "--all", "true").splitlines() if ": " in line]
    results = {name: status for name, status in lines if status != "not checked"}
    reasons = {entry["change"]: entry["reason"] for entry in tomllib.loads(REASONS.read_text())["survivor"]}
    unexplained, stale = 0, set(reasons)
    for name in (name for name, status in results.items() if status not in KILLED):
        change = change_of(name)
        unexplained += change not in reasons
        stale.discard(change)
        print(f"{name} ({results[name]})\n    {change}\n    {reasons.get(change, 'NO REASON GIVEN')}")
    if stale and len(sys.argv) == 1:
        print(f"{REASONS.name} explains mutants that do not survive:", *sorted(stale), sep="\n    ")
    killed = sum(status in KILLED for status in results.values())
    print(", ".join(f"{count} {status}" for status, count in Counter(results.values()).most_common()))
    print(f"score: {killed} of {len(results)} killed, {killed / len(results):.1%}; {unexplained} survivors unexplained")
    return int(unexplained > 0 or killed < GOAL * len(results))


if __name__ == "__main__":
    sys.exit(main())
