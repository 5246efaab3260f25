"""Put the library through thousands of random configurations, and look for anything that breaks.

  eigenstep soak                    15 minutes; ends with status 1 if anything was found
  eigenstep soak --only 4711        repeat one configuration, with the error's whole story

Each configuration is a function of --seed and its number alone. Most train parameters of random
shapes with random options of Spectral on a random stream of gradients (missing, NaN, zero, sparse,
with spikes, fading, taking turns, huge and tiny) twice: once undisturbed, once killed and restored
from a file now and then. Others search without gradients. What must hold: nothing is lost, both
trainings end with the same bits, no NaN comes from finite gradients, and no step or move is beyond
its bound.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..console import LARGEST_SEED, UserError, between, print_table
from ..processes import Call, call_all
from .plans import draw
from .searches import search
from .training import train

Trial = Callable[[np.random.Generator], Mapping[str, int]]
KINDS: Mapping[str, tuple[Trial, float]] = {
    "train": (train, 0.85),
    "search": (search, 0.1),
}
"""What is tried, and how often. A trial returns counts, or raises."""
ROUND = 10
"""Configurations that a process does before it reports."""
ENOUGH = 20
"""Failures after which there is no point in going on."""


@dataclass(frozen=True)
class Failure:
    """Something that broke.

    Attributes:
        number: Of the configuration.
        size: How many numbers its gradients have, so that the smallest can be looked at first.
        error: What was found, one line.
        story: The same with the configuration and where it was found.
    """

    number: int
    size: int
    error: str
    story: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how long, and which configurations."""
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="when to stop (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=between(0, LARGEST_SEED), default=0, help="decides all chance (default: 0)"
    )
    parser.add_argument(
        "--only", type=between(0, 10**9), metavar="N", help="do this configuration alone"
    )
    cores = min(2, os.cpu_count() or 1)
    parser.add_argument(
        "--jobs", type=between(1, 256), default=cores, help="processes (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> None:
    """Try configurations until the time is over, and say what was found."""
    if args.only is not None:
        _, failures = attempt(args.seed, range(args.only, args.only + 1))
        if failures:
            print(failures[0].story)
            raise SystemExit(1)
        print(f"Configuration {args.only} of seed {args.seed} is fine.")
        return
    if not args.minutes > 0:
        raise UserError(f"--minutes must be greater than 0, got {args.minutes}")
    counts, failures = soak(args.seed, args.minutes, args.jobs)
    rows = [(name, f"{count:,}") for name, count in sorted(counts.items())]
    print_table(f"Soak, seed {args.seed}", ("what", "count"), rows)
    if failures:
        for failure in failures:
            print(f"configuration {failure.number}: {failure.error}")
        smallest = min(failures, key=lambda failure: (failure.size, failure.number))
        print(
            f"{len(failures)} failed. Repeat: eigenstep soak --seed {args.seed} --only "
            f"{smallest.number}"
        )
        raise SystemExit(1)
    print("Nothing broke.")


def soak(seed: int, minutes: float, jobs: int) -> tuple[Counter[str], list[Failure]]:
    """Try configurations 0, 1, 2 and so on in several processes for some minutes."""
    end = time.monotonic() + 60 * minutes
    counts: Counter[str] = Counter()
    failures: list[Failure] = []

    def rounds() -> Iterator[Call[None]]:
        for start in itertools.count(0, ROUND):
            if time.monotonic() >= end or len(failures) >= ENOUGH:
                return
            yield None, (seed, range(start, start + ROUND))

    for _, (more, broken) in call_all(attempt, rounds(), jobs):
        counts.update(more)
        failures.extend(broken)
    return counts, failures


def begin(seed: int, number: int) -> tuple[str, np.random.Generator]:
    """Return what a configuration tries, and the chance that decides the rest."""
    chance = np.random.default_rng([seed, number])
    shares = np.array([share for _, share in KINDS.values()])
    return str(chance.choice(list(KINDS), p=shares / shares.sum())), chance


def attempt(seed: int, numbers: range) -> tuple[Counter[str], list[Failure]]:
    """Try some configurations, and return counts and what broke."""
    import torch

    torch.set_num_threads(1)  # the matrices are small: threads would only wait for each other
    counts: Counter[str] = Counter()
    failures = []
    for number in numbers:
        kind, chance = begin(seed, number)
        try:
            counts.update(KINDS[kind][0](chance))
        except Exception as error:
            size = 0
            described = kind
            if kind == "train":
                plan = draw(begin(seed, number)[1])
                size = sum(stream.numel() for stream in plan.streams)
                described = plan.describe()
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            story = f"{traceback.format_exc()}{described}"
            failures.append(Failure(number, size, said, story))
        counts.update({"configurations": 1, f"configurations: {kind}": 1})
    return counts, failures
