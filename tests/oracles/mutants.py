"""Mutation testing (`make mutants`): change the arithmetic in thousands of small ways; the tests
must notice.

mutmut makes the mutants and runs the tests, as ``[tool.mutmut]`` of pyproject.toml says. This
script tells the score of each file, and compares the mutants that survive with ``survivors.toml``,
which gives the reason for each. It fails if fewer than 95 % are killed, or if a mutant survives
without a reason.

Results are kept in ``mutants/``: a run that was stopped goes on where it was, and functions that
did not change are not tested again. Names select mutants, which are then tested anew, and so does
``--survivors`` after tests were added::

    make mutants MUTANTS="--max-children 1"
    make mutants MUTANTS="eigenstep.core.step.*"
    make mutants MUTANTS=--survivors
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import tomllib

GOAL = 0.95
KILLED = ("killed", "timeout", "segfault", "caught by type check")
REASONS = Path(__file__).with_name("survivors.toml")
QUICK = {
    "EIGENSTEP_ORACLE_STEPS": "6",
    "HYPOTHESIS_PROFILE": "quick",
    "OMP_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
"""Environment of the tests: each mutant that survives has seen all of them."""
MUTMUT = (sys.executable, "-m", "mutmut")


def mutmut(*arguments: str) -> str:
    """Return what a command of mutmut prints."""
    return subprocess.run([*MUTMUT, *arguments], capture_output=True, text=True, check=True).stdout


def results() -> dict[str, str]:
    """Return what became of each mutant that was tested."""
    lines = [
        line.strip().rsplit(": ", 1)
        for line in mutmut("results", "--all", "true").splitlines()
        if ": " in line
    ]
    return {name: status for name, status in lines if status != "not checked"}


def survivors(found: dict[str, str]) -> list[str]:
    """Return the mutants that no test noticed."""
    return [name for name, status in found.items() if status not in KILLED]


def change_of(mutant: str) -> str:
    """Return a mutant's new lines, without indentation; names of mutants are numbers that change
    with the code.
    """
    diff = [
        line for line in mutmut("show", mutant).splitlines() if not line.startswith(("+++", "---"))
    ]
    return " ".join(line[1:].strip() for line in diff if line.startswith("+"))


def explain(mutants: list[str]) -> int:
    """Print each survivor with its reason, and reasons without a survivor; return how many have
    none.
    """
    entries = tomllib.loads(REASONS.read_text())["survivor"]
    unused, unexplained = list(entries), 0
    for mutant in mutants:
        change = change_of(mutant)
        fits = [
            e
            for e in entries
            if e.get("change") == change or re.search(e.get("pattern", "$^"), change)
        ]
        unused = [entry for entry in unused if entry not in fits]
        unexplained += not fits
        print(f"{mutant}\n    {change}\n    {fits[0]['reason'] if fits else 'NO REASON GIVEN'}")
    for entry in unused:
        print(
            f"{REASONS.name} explains what does not survive: "
            f"{entry.get('change', entry.get('pattern'))}"
        )
    return unexplained


def main() -> int:
    """Make and test mutants, with the arguments of ``mutmut run``; print the survivors and the
    score.
    """
    os.environ.update(QUICK)
    arguments = sys.argv[1:]
    if "--survivors" in arguments:
        arguments.remove("--survivors")
        arguments += survivors(results())
    subprocess.run([*MUTMUT, "run", *arguments], check=True)
    found = results()
    alive = survivors(found)
    unexplained = explain(alive)
    total = Counter(name.split(".x")[0] for name in found)
    lost = Counter(name.split(".x")[0] for name in alive)
    for module, count in total.items():
        print(f"{module}: {count - lost[module]} of {count} killed, {1 - lost[module] / count:.1%}")
    score = 1 - len(alive) / len(found)
    print(
        f"all: {len(found) - len(alive)} of {len(found)} killed, {score:.1%}; {unexplained} "
        "survivors unexplained"
    )
    return int(unexplained > 0 or score < GOAL)


if __name__ == "__main__":
    sys.exit(main())
