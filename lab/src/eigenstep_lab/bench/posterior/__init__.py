"""Posteriors of small networks: log loss, calibration, shifted data and foreign inputs, by method.

Each method gets the same number of random trials, judged by the log loss on validation data with a
seed of their own; the best then trains with other seeds, and these are what tables show. The
validation data also choose the temperature of draws, by which the variances of all Gaussian
posteriors are multiplied. All predictions are shown as they are and after temperature scaling on
the validation data (for regressions, the variance of the noise is always chosen there); the latter
are what the aim is about.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...behavior import behavior
from ...results import Table
from ...study import Cell, Plans
from . import scores
from .methods import METHODS, ON_TOP, Options, Predict, fit, posterior_optimizer, spectral
from .problems import PROBLEMS, Problem, problem_of
from .tables import tables_of

RESULTS = Path("lab/results/posterior/results.jsonl")
TRIAL_SEED = 100
ROUNDS = 3
"""How often training is timed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to run."""
    parser.add_argument(
        "--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="default: all"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all"
    )
    parser.add_argument(
        "--trials", type=int, default=8, help="random trials of each method (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, default=4, help="seeds of the best one (default: %(default)s)"
    )
    parser.add_argument(
        "--plot", type=Path, help="draw how reliable confidence is on the first problem of classes"
    )
    parser.add_argument(
        "--time", action="store_true", help="measure training time against plain Spectral instead"
    )


def cells(args: argparse.Namespace, found: Mapping[Any, Any]) -> Plans:
    """List the trials and runs of all methods; those on top of others wait for these."""
    if args.time:
        return {
            name: Cell({"time of": name}, partial(training_time, name)) for name in args.problems
        }
    how = args.trials, args.seeds
    plans: dict[Any, Callable[[], Any]] = {}
    for problem in args.problems:
        mode = found.get((problem, "weights alone"))
        for method in args.methods:
            if method not in ON_TOP:
                plans[problem, method] = partial(choose, problem, method, {}, *how)
            elif mode is not None:
                plans[problem, method] = partial(choose, problem, method, mode["options"], *how)
    return plans


def choose(
    problem: str, method: str, start: Options, count: int, seeds: int
) -> Generator[Cell, Any, dict[str, Any]]:
    """Choose options by random trials, and make the runs that count."""
    losses = []
    trials = [{**start, **options} for options in chosen(method, count)]
    for options in trials:
        losses.append((yield cell(problem, method, options, TRIAL_SEED))["valid"])
    best = trials[losses.index(min(losses))]
    runs = []
    for seed in range(seeds):
        runs.append((yield cell(problem, method, best, seed)))
    return {"options": best, "runs": runs}


def cell(problem: str, method: str, options: Options, seed: int) -> Cell:
    """Return a run of a method."""
    key = {"problem": problem, "method": method, "options": dict(options), "seed": seed}
    part = METHODS[method].part
    return Cell(
        key, partial(compute_named, problem, method, options, seed), behavior(part) if part else ""
    )


def report(args: argparse.Namespace, found: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the figures."""
    if args.time:
        return time_report(found)
    problems: dict[str, dict[str, Any]] = {}
    for problem, method in product(args.problems, args.methods):
        if (problem, method) in found:
            problems.setdefault(problem, {})[method] = found[problem, method]
    if args.plot:
        draw(problems, args.plot)
    return {"problems": problems, "tables": tables_of(problems)}


def chosen(method: str, count: int) -> list[dict[str, Any]]:
    """Return random options of a method, the same ones for all problems."""
    return spread(METHODS[method].space, count)


def spread(space: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return random options that cover each range evenly (a Latin hypercube): few trials leave no
    large gaps.
    """
    generator = random.Random(0)
    trials: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, values in space.items():
        for place, trial in zip(generator.sample(range(count), count), trials, strict=True):
            share = (place + generator.random()) / count
            if isinstance(values, list):
                trial[name] = values[int(share * len(values))]
            else:
                low, high = map(math.log, values)
                trial[name] = float(f"{math.exp(low + share * (high - low)):.3g}")
    return trials


def compute_named(name: str, method: str, options: Options, seed: int) -> dict[str, Any]:
    """Make a run on the problem of a name."""
    torch.set_num_threads(1)
    return compute(problem_of(name), method, options, seed)


def compute(problem: Problem, method: str, options: Options, seed: int) -> dict[str, Any]:
    """Train and predict; a run that diverges has infinite scores."""
    start = time.process_time()
    try:
        predict = METHODS[method].train(problem, seed, options)
        seconds = time.process_time() - start
        with torch.no_grad():
            return {**scored(problem, predict, METHODS[method].temperatures), "seconds": seconds}
    except (ValueError, FloatingPointError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        return {
            "valid": math.inf,
            "failed": str(error)[:200],
            "seconds": time.process_time() - start,
        }


def scored(problem: Problem, predict: Predict, temperatures: Sequence[float]) -> dict[str, Any]:
    """Return all scores of a method that has been trained; validation data choose the temperature
    of its draws.
    """
    x, y = problem.valid
    draws = {temperature: predict(x, temperature) for temperature in temperatures}
    losses = {t: valid_loss(problem, drawn) for t, drawn in draws.items()}
    cold = min(losses, key=losses.__getitem__)
    if not math.isfinite(losses[cold]):
        return {"valid": math.inf, "failed": "predictions are not finite"}
    chosen = {"valid": losses[cold], "draws at": cold}
    if problem.variance is None:
        temperature = scores.best_temperature(draws[cold].mean(0), y)
        return {**chosen, **class_figures(problem, predict, cold, temperature)}
    variance = scores.best_variance(draws[cold], y)
    tests = {
        test: scores.value_scores(predict(inputs, cold), variance, targets)
        for test, (inputs, targets) in problem.tests.items()
    }
    return {**chosen, "tests": tests}


def class_figures(
    problem: Problem, predict: Predict, cold: float, temperature: float
) -> dict[str, Any]:
    """Return the scores of classes on all test sets, as they are and after temperature scaling."""
    found: dict[str, Any] = {"tests": {}, "temperature": temperature}
    for test, (inputs, targets) in problem.tests.items():
        mean = predict(inputs, cold).mean(0)
        after = scores.class_scores(scores.scaled(mean, temperature), targets)
        plain = scores.class_scores(mean, targets)
        scaled = {"scaled nll": after["nll"], "scaled ece": after["ece"]}
        found["tests"][test] = {**plain, **scaled}
        if test == "clean":
            found["reliability"] = scores.reliability(mean, targets)
            if problem.foreign is not None:
                found["detection"] = scores.detection(mean, predict(problem.foreign, cold).mean(0))
    return found


def valid_loss(problem: Problem, draws: Tensor) -> float:
    """Return the log loss on validation data, infinite if predictions are not finite."""
    targets = problem.valid[1]
    if not draws.isfinite().all():
        return math.inf
    if problem.variance is not None:
        return scores.value_scores(draws, scores.best_variance(draws, targets), targets)["nll"]
    return scores.log_loss(draws.mean(0), targets)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw confidence against accuracy for the first problem of classes."""
    for name, methods in found.items():
        rows = {
            m: each["runs"][0]["reliability"]
            for m, each in methods.items()
            if "reliability" in each["runs"][0]
        }
        if rows:
            scores.plot_reliability(rows, f"{name}, seed 0", path)
            return


def training_time(name: str) -> dict[str, list[float]]:
    """Return CPU times of training by plain Spectral and by ours, in turn, with one draw a step."""
    problem = problem_of(name)
    times: dict[str, list[float]] = {"Spectral": [], "posterior": []}
    point = {"lr": 2e-3, "weight_decay": 0.01}
    gaussian = {"lr": 0.02, "ess": 20, "decay": 1.5}
    for seed in range(ROUNDS):
        for kind, spent in times.items():
            torch.manual_seed(seed)
            model = problem.build(0.0)
            if kind == "Spectral":
                optimizer = spectral(problem, model, point)
            else:
                optimizer = posterior_optimizer(problem, model, gaussian)
            start = time.process_time()
            fit(problem, model, optimizer, seed, epochs=2, sampled=kind != "Spectral")
            spent.append(time.process_time() - start)
    return times


def time_report(found: Mapping[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Return medians of times, and of their ratios."""
    ratios = {}
    rows = []
    for name, times in found.items():
        pairs = zip(times["Spectral"], times["posterior"], strict=True)
        ratios[name] = statistics.median(ours / plain for plain, ours in pairs)
        medians = [f"{statistics.median(spent):.2f}" for spent in times.values()]
        rows.append([name, *medians, f"{ratios[name]:.2f}"])
    columns = ["problem", "Spectral, CPU s", "posterior, CPU s", "ratio"]
    return {"ratios": ratios, "tables": [asdict(Table("Time", columns, rows, timed=True))]}
