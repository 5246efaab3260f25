"""Search an optimizer's hyperparameters at random, as the paper does: 80 runs.

  eigenstep tune --optimizer soap --data fashion-mnist --train-for '2 epochs' --jobs 2
  eigenstep tune --config plainvit-imagewoof --data ~/imagewoof2 --optimizer muon

Takes all settings of `eigenstep train`, which every run shares; options of the optimizer that are
given are not searched. The hyperparameters of run number k depend on --seed alone, not on --jobs or
--runs.

The search lives in runs/tune/... or --directory: Optuna's journal, one folder for each run, and at
the end best.json and best.toml, which `eigenstep train --config .../best.toml` takes. Interrupted,
the same command goes on: runs that had begun continue from their checkpoints. A larger --runs adds
to a search.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna

from ..console import UserError, atomic_write, print_table, track, write_json
from ..processes import Call, call_all
from . import checkpoint, folder
from . import settings as settings_module
from .settings import Settings
from .spaces import Range, Space, apply, space_of
from .trainer import Diverged, Result, Run, train

ROOT = "runs/tune"
OUTCOME = tuple(field.name for field in dataclasses.fields(Result))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how much to search, and all settings of a run."""
    parser.add_argument(
        "--runs", type=int, default=80, help="runs of the search (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs side by side, in processes (default: %(default)s)"
    )
    parser.add_argument(
        "--objective",
        choices=["test_error", "test_loss"],
        default="test_error",
        help="what is to be small",
    )
    settings_module.add_arguments(parser, ROOT)


def run(args: argparse.Namespace) -> None:
    """Do the runs that are missing, then show and write the best."""
    shared = settings_module.from_arguments(args)
    if args.runs < 1 or args.jobs < 1:
        raise UserError(f"runs and jobs must be at least 1, got {args.runs} and {args.jobs}")
    if args.jobs > 1 and not shared.threads:  # they would only wait for each other
        shared = dataclasses.replace(shared, threads=max(1, (os.cpu_count() or 1) // args.jobs))
    directory = shared.place(ROOT)
    space = space_of(shared)
    Run(shared)  # settings that do not fit leave no folder
    with folder.occupied(directory):
        study = open_study(directory, shared, args.objective)
        queue(study, space, args.runs, shared.seed)
        print(f"The search is in {directory}", flush=True)
        try:
            search(study, shared, directory, args.jobs, args.objective)
        except KeyboardInterrupt:
            print(
                f"Interrupted. The same command goes on from the last checkpoints: {args.command}"
            )
            raise
        report(study, shared, directory, args.objective, args.command)


def open_study(directory: Path, shared: Settings, objective: str) -> Any:
    """Open the search in a folder, or begin one."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = directory / "journal.log"
    identity = {**shared.identity(), "objective": objective}
    try:
        backend = optuna.storages.journal.JournalFileBackend(str(path))
        storage = optuna.storages.JournalStorage(backend)
        study = optuna.create_study(storage=storage, study_name="search", load_if_exists=True)
        before = study.user_attrs.get("identity")
    except OSError:
        raise
    except Exception as error:  # a damaged file can make a decoder raise anything
        raise UserError(
            f"{path} is damaged ({error}): delete it; runs that are complete will not be repeated"
        ) from error
    if before is None:
        study.set_user_attr("identity", identity)
    elif before != identity:
        changed = [name for name in identity if identity[name] != before.get(name)]
        raise UserError(
            f"{directory} holds a search with other {', '.join(changed)}: choose another "
            "--directory"
        )
    return study


def queue(study: Any, space: Space, runs: int, seed: int) -> None:
    """Queue all runs that are not in the study, or that cannot have finished."""
    for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    queued = {t.user_attrs["run"] for t in study.get_trials() if not _abandoned(t)}
    for number, values in enumerate(draw(space, runs, seed)):
        if number not in queued:
            study.enqueue_trial(values, user_attrs={"run": number})


def _abandoned(trial: Any) -> bool:
    return bool(trial.state.name == "FAIL" and "diverged" not in trial.user_attrs)


def draw(space: Space, runs: int, seed: int) -> list[dict[str, Any]]:
    """Draw the hyperparameters of all runs; the first ones do not depend on how many there are."""
    fixed = distributions(space)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    return [study.ask(fixed).params for _ in range(runs)]


def distributions(space: Space) -> dict[str, Any]:
    """Translate a search space for Optuna."""
    return {
        name: optuna.distributions.FloatDistribution(*values, log=True)
        if isinstance(values, Range)
        else optuna.distributions.CategoricalDistribution(values)
        for name, values in space.items()
    }


def search(study: Any, shared: Settings, directory: Path, jobs: int, objective: str) -> None:
    """Do the waiting runs, `jobs` at a time, and tell the study how each went."""
    waiting = len(study.get_trials(states=[optuna.trial.TrialState.WAITING]))
    calls = _calls(study, shared, directory, waiting)
    title = f"{shared.optimizer}: {waiting} runs"
    for trial, outcome in track(call_all(attempt, calls, jobs), title, waiting):
        value = outcome.get(objective, math.nan)
        if math.isfinite(value):
            trial.set_user_attr("outcome", outcome)
            study.tell(trial, value)
        else:
            trial.set_user_attr("diverged", True)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)


def _calls(study: Any, shared: Settings, directory: Path, count: int) -> Iterator[Call[Any]]:
    space = distributions(space_of(shared))
    for _ in range(count):
        trial = study.ask(space)
        place = directory / f"run-{trial.user_attrs['run']:04d}"
        yield trial, (apply(shared, trial.params), place)


def attempt(settings: Settings, directory: Path) -> dict[str, Any]:
    """Do one run, finish it, or read how it ended; nothing comes of a run that diverges."""
    outcome = finished(settings, directory)
    if outcome is None:
        try:
            outcome = dataclasses.asdict(train(settings, directory))
        except Diverged:
            outcome = {}
    # Weights of many large networks would fill a disk, and the best run can be repeated exactly.
    for path in checkpoint.list_checkpoints(directory):
        checkpoint.delete(path)
    (directory / "model.pt").unlink(missing_ok=True)
    return outcome


def finished(settings: Settings, directory: Path) -> dict[str, Any] | None:
    """Return what came of a run if it has already been done with these settings."""
    try:
        written = json.loads((directory / "result.json").read_text())
        same = written["settings"] == settings.identity()
        return {name: written[name] for name in OUTCOME} if same else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # not there, or damaged: the run is done again


def report(study: Any, shared: Settings, directory: Path, objective: str, command: str) -> None:
    """Print the five best runs; write the best as JSON and as a configuration."""
    done = [trial for trial in study.get_trials() if trial.value is not None]
    diverged = sum("diverged" in trial.user_attrs for trial in study.get_trials())
    if not done:
        raise UserError(f"all {diverged} runs diverged; their logs are in {directory}")
    ranked = sorted(done, key=lambda trial: trial.value)
    first = ranked[0]
    shown = ranked[:5]
    title = f"{shared.optimizer}: the best of {len(done)} runs ({diverged} more diverged)"
    rows = [(name, *(_short(trial.params[name]) for trial in shown)) for name in first.params]
    rows.append((objective, *(_short(trial.value) for trial in shown)))
    print_table(title, ("", *(f"run {trial.user_attrs['run']}" for trial in shown)), rows)
    best = dataclasses.replace(apply(shared, first.params), directory="")
    content = {
        "command": command,
        "finished": len(done),
        "diverged": diverged,
        "run": first.user_attrs["run"],
        "outcome": first.user_attrs["outcome"],
        "settings": best.identity(),
    }
    write_json(directory / "best.json", content)
    with atomic_write(directory / "best.toml") as file:
        file.write(f"# {title}\n{best.as_toml()}".encode())
    print(f"Train with it: eigenstep train --config {directory / 'best.toml'}")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
