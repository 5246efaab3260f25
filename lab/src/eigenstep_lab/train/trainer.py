"""The training loop: from settings to trained weights, in steps that can be repeated exactly.

All chance in a step comes from the seed and the step's number. What a checkpoint must hold is
therefore only the weights, the optimizer's state and how far the run has come; a run that was
killed ends with the very weights, bit for bit, that it would have had without the accident.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eigenstep import __version__

from ..console import UserError, atomic_write, write_json
from ..tasks import learning_rate_factor
from . import checkpoint, folder, parallel
from .augment import mix
from .building import build_model, build_optimizer, choose_device
from .feeds import MIX, STEP, Batch, chance, open_feed
from .parallel import Team
from .runlog import RunLog
from .settings import DURATIONS, Settings, count_steps


class Diverged(UserError):
    """The loss or the gradients are no longer finite."""


@dataclass(frozen=True)
class Result:
    """How far a run has come.

    Attributes:
        step: Steps taken.
        steps: Steps to take.
        test_loss: Held-out loss after the last step; NaN if the run was stopped before.
        test_error: Held-out fraction of wrong predictions.
        seconds: Time spent on training steps.
        parameters: Size of the network.
    """

    step: int
    steps: int
    test_loss: float
    test_error: float
    seconds: float
    parameters: int


class Run:
    """A network, its optimizer and its data, as the settings say."""

    def __init__(
        self, settings: Settings, team: Team | None = None, device: str | None = None
    ) -> None:
        """Load the data and build everything in its first state.

        Args:
            settings: What to train, and how.
            team: The processes that train together; by default this one alone.
            device: This process's device, if it is not that of the settings.
        """
        self.settings = settings
        self.team = Team() if team is None else team
        self.team.check_batch(settings.batch, settings.accumulate)
        self.device = choose_device(settings.device if device is None else device)
        _configure_torch(settings, self.device)
        self.feed = open_feed(settings)
        self.steps, self.warmup, self.evaluate_every, self.log_every, self.checkpoint_every = (
            count_steps(getattr(settings, name), self.feed.per_epoch, name) for name in DURATIONS
        )
        if settings.warmup == "auto":
            self.warmup = min(self.warmup, self.steps // 10)
        if self.steps <= self.warmup:
            raise UserError(
                f"train_for must be longer than warmup: {self.steps} steps against {self.warmup}"
            )
        self.dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
        self.model = build_model(settings, self.feed).to(self.device, self.dtype)
        self.network = self.team.wrap(self.model, settings.optimizer)
        self.optimizer = build_optimizer(settings, self.model)
        self.highest = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, number: int, batch: Batch) -> Tensor:
        """Take one step and return this process's loss, still on the device."""
        settings = self.settings
        # Some optimizers use chance
        torch.manual_seed(int(chance(settings.seed, STEP, number).integers(2**63)))
        inputs, targets = self._on_device(batch)
        if settings.mixup or settings.cutmix:
            random = chance(settings.seed, MIX, number)
            shares = {"mixup": settings.mixup, "cutmix": settings.cutmix}
            inputs, targets = mix(inputs, targets, self.feed.classes, random, **shares)
        inputs, targets = self.team.part(inputs), self.team.part(targets)
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        parts = settings.accumulate
        chunks = zip(range(1, parts + 1), inputs.chunk(parts), targets.chunk(parts), strict=True)
        for part, some_inputs, some_targets in chunks:
            with self.team.accumulating(self.network, last=part == parts):
                logits = self._predict(some_inputs)
                loss = cross_entropy(logits, some_targets, settings.label_smoothing) / parts
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        for group, highest in zip(self.optimizer.param_groups, self.highest, strict=True):
            group["lr"] = highest * self.schedule(number)
        try:
            self.optimizer.step()
        except (ValueError, RuntimeError) as error:  # what optimizers do about NaN differs
            if "nothing was changed" not in str(error) and self._gradients_are_finite():
                raise
            raise Diverged(
                f"training diverged at step {number + 1}, its gradients are not finite"
            ) from error
        return total

    def _gradients_are_finite(self) -> bool:
        return all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.model.parameters())

    def schedule(self, number: int) -> float:
        """Return the factor of the learning rate in a step."""
        return learning_rate_factor(
            number, self.steps, self.warmup / self.steps, self.settings.floor
        )

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Return loss and error rate on the held-out data."""
        losses, errors, count = 0.0, 0, 0
        for batch in self.feed.held_out():
            inputs, targets = self._on_device(batch)
            logits = self._predict(inputs)
            losses += cross_entropy(logits, targets).item() * targets.numel()
            errors += int((logits.argmax(-1) != targets).sum())
            count += targets.numel()
        return losses / count, errors / count

    def _on_device(self, batch: Batch) -> Batch:
        inputs, targets = (part.to(self.device, non_blocking=True) for part in batch)
        return (inputs.to(self.dtype) if inputs.is_floating_point() else inputs), targets

    def _predict(self, inputs: Tensor) -> Tensor:
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.settings.precision == "mixed"
        ):
            logits: Tensor = self.network(inputs)
        return logits.float()


def train(
    settings: Settings,
    directory: Path,
    *,
    command: str = "",
    on_step: Callable[[int, int, float], None] = lambda step, steps, loss: None,
    stop: Callable[[], bool] = lambda: False,
    fresh: bool = False,
) -> Result:
    """Train from the newest checkpoint in `directory`, or from the beginning if there is none.

    Args:
        settings: What to train, and how.
        directory: Gets log, checkpoints, `model.pt` (the trained weights) and `result.json`.
        command: The command line, to be noted in `result.json`.
        on_step: Called after each step with its number, the number of all steps and the newest mean
            loss.
        stop: Asked after each step whether to write a checkpoint and end here.
        fresh: Whether to delete a run that is in `directory` first.
    """
    with parallel.together(settings.parallel, settings.device) as (team, device):
        # First: settings that do not fit leave no folder, and delete nothing
        run = Run(settings, team, device)
        with folder.occupied(directory) if team.leads else contextlib.nullcontext():
            if team.leads and fresh:
                folder.delete_run(directory)
            if team.leads:
                checkpoint.clean(directory)
            team.wait()
            training = Training(run, directory)
            with training.logging():
                training.take_steps(on_step, stop)
            return training.finish(command)


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        losses: Sum of the losses since the last line of the log, of this process.
        step: Steps taken.
        seconds: Time spent on them.
        count: Number of the losses in the sum.
    """

    losses: Tensor
    step: int = 0
    seconds: float = 0.0
    count: int = 0


class Training:
    """A run in its folder."""

    def __init__(self, run: Run, directory: Path) -> None:
        """Go on from the newest checkpoint in the folder."""
        self.run = run
        self.directory = directory
        self.progress = _resume(run, directory)
        self.mean_loss = math.nan
        self.tested = (math.nan, math.nan)
        self._log: RunLog | None = None

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Keep the log open; only the process that leads writes one."""
        if not self.run.team.leads:
            yield
            return
        self._log = RunLog(self.directory, self.progress.step)
        try:
            yield
        finally:
            self._log.close()

    def take_steps(
        self, on_step: Callable[[int, int, float], None], stop: Callable[[], bool]
    ) -> None:
        """Take steps until the last one or until one is asked to stop; log, test and save."""
        run, now = self.run, self.progress
        clock = time.perf_counter() - now.seconds
        for batch in run.feed.batches(now.step, run.steps):
            now.losses = now.losses + run.step(now.step, batch)
            now.step += 1
            now.count += 1
            line = self._average() if self._is_due(run.log_every) else {}
            now.seconds = time.perf_counter() - clock
            if self._is_due(run.evaluate_every):
                self.tested = run.evaluate()
                line.update(test_loss=self.tested[0], test_error=self.tested[1])
            if line and self._log is not None:
                epoch = now.step / run.feed.per_epoch
                self._log.write(now.step, epoch=epoch, **line, seconds=now.seconds)
            stopped = run.team.any(stop(), run.device)
            if stopped or self._is_due(run.checkpoint_every):
                now.losses = run.team.mean(now.losses)
                _save(run, self.directory, now)
            clock = time.perf_counter() - now.seconds  # testing and saving do not count
            on_step(now.step, run.steps, self.mean_loss)
            if stopped:
                return

    def _is_due(self, every: int) -> bool:
        return self.progress.step == self.run.steps or self.progress.step % every == 0

    def _average(self) -> dict[str, float]:
        """Return the columns of the log for the losses since its last line, and forget these."""
        run, now = self.run, self.progress
        self.mean_loss = float(run.team.mean(now.losses)) / now.count
        if not math.isfinite(self.mean_loss):
            raise Diverged(
                f"training diverged: the loss is {self.mean_loss} at step {now.step}; try a lower "
                "learning rate"
            )
        now.losses = torch.zeros_like(now.losses)
        now.count = 0
        return {"loss": self.mean_loss, "lr": run.settings.lr * run.schedule(now.step - 1)}

    def finish(self, command: str) -> Result:
        """Write weights and result if all steps are taken, and return the result."""
        run = self.run
        now = self.progress
        team = self.run.team
        parameters = sum(p.numel() for p in run.model.parameters())
        if now.step < run.steps:
            return Result(now.step, run.steps, math.nan, math.nan, now.seconds, parameters)
        if not math.isfinite(self.tested[0]):  # the run had ended before
            self.tested = run.evaluate()
        result = Result(now.step, run.steps, *self.tested, now.seconds, parameters)
        weights = run.model.state_dict() if team.size == 1 else parallel.whole_weights(run.network)
        if team.leads:
            with atomic_write(self.directory / "model.pt") as file:
                torch.save(weights, file)
            made_by = {"command": command, "eigenstep": __version__, "torch": torch.__version__}
            content = {**made_by, "settings": run.settings.identity(), **asdict(result)}
            write_json(self.directory / "result.json", content)
        team.wait()
        return result


def _save(run: Run, directory: Path, now: Progress) -> None:
    team = run.team
    progress = {"step": now.step, "seconds": now.seconds, "losses": now.losses.cpu()}
    progress |= {"count": now.count, "settings": json.dumps(run.settings.identity())}
    if team.splits(run.optimizer):
        path = directory / f"step-{now.step:09d}.dcp"
        parallel.save(path, team, run.network, run.optimizer, progress)
        if team.leads:
            checkpoint.drop_old(directory)
    elif team.leads:
        state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        checkpoint.save(directory, now.step, {**progress, **state})
    team.wait()


def _resume(run: Run, directory: Path) -> Progress:
    """Return how far the run has come."""
    checkpoints = checkpoint.list_checkpoints(directory)
    if not checkpoints:
        return Progress(torch.zeros((), device=run.device))
    newest = checkpoints[-1]
    if newest.is_dir():
        _check_settings(run, newest, parallel.peek(newest, "settings"))
        read = partial(_read_folder, run, newest)
    else:
        content = checkpoint.load(newest)
        _check_settings(run, newest, content.get("settings"))
        read = partial(_read_content, run, content)
    try:
        saved = read()
        losses = saved["losses"].to(run.device)
        return Progress(losses, int(saved["step"]), float(saved["seconds"]), int(saved["count"]))
    except UserError:
        raise
    except Exception as error:  # what does not fit the network can make torch raise anything
        raise checkpoint.damaged(newest, error) from error


def _check_settings(run: Run, path: Path, text: Any) -> None:
    """Raise unless a checkpoint is of a run with the same settings."""
    try:
        ours = run.settings.identity()
        theirs = dict(json.loads(text))
    except (TypeError, ValueError, RecursionError) as error:
        raise checkpoint.damaged(path, error) from error
    changed = [name for name in ours if ours[name] != theirs.get(name)]
    if changed:
        details = ", ".join(f"{n} ({theirs.get(n)!r}, now {ours[n]!r})" for n in changed)
        raise UserError(
            f"{path.parent} holds a run with other settings: {details}. "
            "Choose another --directory, or --fresh to delete that run and begin anew"
        )


def _read_folder(run: Run, path: Path) -> dict[str, Any]:
    blank = {"step": 0, "seconds": 0.0, "losses": torch.zeros(()), "count": 0}
    return parallel.load(path, run.network, run.optimizer, blank)


def _read_content(run: Run, content: dict[str, Any]) -> dict[str, Any]:
    parallel.load_whole_weights(run.network, content["model"])
    checkpoint.restore(run.optimizer, content["optimizer"])
    return content


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy; targets are class numbers or probabilities."""
    soft = targets.is_floating_point()
    return F.cross_entropy(
        logits.flatten(0, -2), targets if soft else targets.flatten(), label_smoothing=smoothing
    )


def _configure_torch(settings: Settings, device: torch.device) -> None:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if device.type == "cuda":  # the same numbers every time, at some cost
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
