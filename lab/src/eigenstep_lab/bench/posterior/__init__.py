"""Posteriors of small networks: log loss, calibration, shifted data and foreign inputs, by method.

Each method gets the same number of random trials, judged by the log loss on validation data with a
seed of their own; the best then trains with other seeds, and these are what tables show. The
validation data also choose the temperature of draws, by which the variances of all Gaussian
posteriors are multiplied. All predictions are shown as they are and after temperature scaling on
the validation data (for regressions, the variance of the noise is always chosen there); the latter
are what the aim is about. Every run is kept in a file, and none is repeated.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...store import Cells
from . import scores
from .methods import METHODS, ON_TOP, Options, Predict, fit, posterior_optimizer, spectral
from .problems import PROBLEMS, Problem
from .tables import tables_of

TRIAL_SEED = 100


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
        "--results", type=Path, help="file in which every run is kept, and looked for before"
    )
    parser.add_argument(
        "--plot", type=Path, help="draw how reliable confidence is on the first problem of classes"
    )
    parser.add_argument(
        "--time", action="store_true", help="measure training time against plain Spectral instead"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run what is missing and return the figures."""
    if args.time:
        return training_time(args.problems)
    cells = Cells(args.results)
    found: dict[str, dict[str, Any]] = {}
    for name in args.problems:
        problem, best = PROBLEMS[name](), dict[str, Options]()
        for method in args.methods:
            if method in ON_TOP and "weights alone" not in best:
                continue
            start = best["weights alone"] if method in ON_TOP else {}
            trials = [{**start, **options} for options in chosen(method, args.trials)]
            tried = [
                measured(cells, name, problem, method, options, TRIAL_SEED)["valid"]
                for options in trials
            ]
            best[method] = trials[min(range(len(trials)), key=tried.__getitem__)]
            runs = [
                measured(cells, name, problem, method, best[method], seed)
                for seed in range(args.seeds)
            ]
            found.setdefault(name, {})[method] = {"options": best[method], "runs": runs}
    if args.plot:
        draw(found, args.plot)
    return {"problems": found, "tables": tables_of(found)}


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


def measured(
    cells: Cells, name: str, problem: Problem, method: str, options: Options, seed: int
) -> Any:
    """Return the scores of one run, from the file if they are there."""
    own = {"options": dict(options), "seed": seed, "version": METHODS[method].version}
    return cells.get(
        {"problem": name, "method": method, **own}, lambda: compute(problem, method, options, seed)
    )


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
    losses = {t: valid_loss(problem, each) for t, each in draws.items()}
    cold = min(losses, key=losses.__getitem__)
    if not math.isfinite(losses[cold]):
        return {"valid": math.inf, "failed": "predictions are not finite"}
    found: dict[str, Any] = {"valid": losses[cold], "draws at": cold, "tests": {}}
    if problem.variance is not None:
        variance = scores.best_variance(draws[cold], y)
        for test, (inputs, targets) in problem.tests.items():
            found["tests"][test] = scores.value_scores(predict(inputs, cold), variance, targets)
        return found
    found["temperature"] = temperature = scores.best_temperature(draws[cold].mean(0), y)
    for test, (inputs, targets) in problem.tests.items():
        mean = predict(inputs, cold).mean(0)
        after = scores.class_scores(scores.scaled(mean, temperature), targets)
        own = scores.class_scores(mean, targets)
        found["tests"][test] = {**own, "scaled nll": after["nll"], "scaled ece": after["ece"]}
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


def training_time(names: list[str], repeats: int = 3) -> dict[str, Any]:
    """Return the CPU time of training beside that of plain Spectral, in turn, with one
    draw a step.
    """
    rows = []
    for name in names:
        problem = PROBLEMS[name]()
        times: dict[str, list[float]] = {"Spectral": [], "posterior": []}
        for seed in range(repeats):
            for kind, own in times.items():
                torch.manual_seed(seed)
                model = problem.build(0.0)
                if kind == "Spectral":
                    optimizer = spectral(problem, model, {"lr": 2e-3, "weight_decay": 0.01})
                else:
                    optimizer = posterior_optimizer(
                        problem, model, {"lr": 0.02, "ess": 20, "decay": 1.5}
                    )
                start = time.process_time()
                fit(problem, model, optimizer, seed, epochs=2, sampled=kind != "Spectral")
                own.append(time.process_time() - start)
        ratios = [b / a for a, b in zip(times["Spectral"], times["posterior"], strict=True)]
        rows.append(
            [
                name,
                *(f"{statistics.median(own):.2f}" for own in times.values()),
                statistics.median(ratios),
            ]
        )
    columns = ["problem", "Spectral, CPU s", "posterior, CPU s", "ratio"]
    shown = [[*row[:3], f"{row[3]:.2f}"] for row in rows]
    return {
        "ratios": {row[0]: row[3] for row in rows},
        "tables": [{"title": "Time", "columns": columns, "rows": shown}],
    }
