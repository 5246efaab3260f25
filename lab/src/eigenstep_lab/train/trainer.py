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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

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
            inputs, targets = mix(
                inputs,
                targets,
                self.feed.classes,
                random,
                mixup=settings.mixup,
                cutmix=settings.cutmix,
            )
        inputs, targets = self.team.part(inputs), self.team.part(targets)
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        parts = settings.accumulate
        chunks = zip(range(1, parts + 1), inputs.chunk(parts), targets.chunk(parts), strict=True)
        for part, some_inputs, some_targets in chunks:
            with self.team.accumulating(self.network, last=part == parts):
                loss = (
                    cross_entropy(
                        self._predict(some_inputs), some_targets, settings.label_smoothing
                    )
                    / parts
                )
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
            if team.leads:
                if fresh:
                    folder.delete_run(directory)
                checkpoint.clean(directory)
            team.wait()
            return _train(run, directory, command, on_step, stop)


def _train(
    run: Run,
    directory: Path,
    command: str,
    on_step: Callable[[int, int, float], None],
    stop: Callable[[], bool],
) -> Result:
    settings, team = run.settings, run.team
    step, seconds, losses, count = _resume(run, directory)
    parameters = sum(p.numel() for p in run.model.parameters())
    tested = (math.nan, math.nan)
    mean, log = math.nan, RunLog(directory, step) if team.leads else None
    try:
        clock = time.perf_counter() - seconds
        for batch in run.feed.batches(step, run.steps):
            losses, count, step = losses + run.step(step, batch), count + 1, step + 1
            last, line = step == run.steps, {}
            if last or step % run.log_every == 0:
                mean = float(team.mean(losses)) / count
                if not math.isfinite(mean):
                    raise Diverged(
                        f"training diverged: the loss is {mean} at step {step}; try a lower "
                        "learning rate"
                    )
                line = {"loss": mean, "lr": settings.lr * run.schedule(step - 1)}
                losses, count = torch.zeros_like(losses), 0
            seconds = time.perf_counter() - clock
            if last or step % run.evaluate_every == 0:
                tested = run.evaluate()
                line.update(test_loss=tested[0], test_error=tested[1])
            if line and log is not None:
                log.write(step, epoch=step / run.feed.per_epoch, **line, seconds=seconds)
            stopped = team.any(stop(), run.device)
            if last or stopped or step % run.checkpoint_every == 0:
                losses = team.mean(losses)
                _save(run, directory, step, seconds, losses, count)
            clock = time.perf_counter() - seconds  # testing and saving do not count
            on_step(step, run.steps, mean)
            if stopped and not last:
                return Result(step, run.steps, math.nan, math.nan, seconds, parameters)
    finally:
        if log is not None:
            log.close()
    if not math.isfinite(tested[0]):  # the run had ended before
        tested = run.evaluate()
    result = Result(step, run.steps, *tested, seconds, parameters)
    weights = run.model.state_dict() if team.size == 1 else parallel.whole_weights(run.network)
    if team.leads:
        with atomic_write(directory / "model.pt") as file:
            torch.save(weights, file)
        made_by = {"command": command, "eigenstep": __version__, "torch": torch.__version__}
        write_json(
            directory / "result.json",
            {**made_by, "settings": settings.identity(), **asdict(result)},
        )
    team.wait()
    return result


def _save(run: Run, directory: Path, step: int, seconds: float, losses: Tensor, count: int) -> None:
    team = run.team
    progress = {"step": step, "seconds": seconds, "losses": losses.cpu(), "count": count}
    progress["settings"] = json.dumps(run.settings.identity())
    if team.splits(run.optimizer):
        parallel.save(
            directory / f"step-{step:09d}.dcp", team, run.network, run.optimizer, progress
        )
        if team.leads:
            checkpoint.drop_old(directory)
    elif team.leads:
        state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        checkpoint.save(directory, step, {**progress, **state})
    team.wait()


def _resume(run: Run, directory: Path) -> tuple[int, float, Tensor, int]:
    """Return how far the run has come."""
    found = checkpoint.list_checkpoints(directory)
    if not found:
        return 0, 0.0, torch.zeros((), device=run.device), 0
    newest = found[-1]
    saved = (
        {"settings": parallel.peek(newest, "settings")}
        if newest.is_dir()
        else checkpoint.load(newest)
    )
    try:
        ours, theirs = run.settings.identity(), dict(json.loads(saved["settings"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise checkpoint.damaged(newest, error) from error
    changed = [name for name in ours if ours[name] != theirs.get(name)]
    if changed:
        details = ", ".join(
            f"{name} ({theirs.get(name)!r}, now {ours[name]!r})" for name in changed
        )
        raise UserError(
            f"{directory} holds a run with other settings: {details}. "
            "Choose another --directory, or --fresh to delete that run and begin anew"
        )
    try:
        if newest.is_dir():
            blank = {"step": 0, "seconds": 0.0, "losses": torch.zeros(()), "count": 0}
            saved = parallel.load(newest, run.network, run.optimizer, blank)
        else:
            parallel.load_whole_weights(run.network, saved["model"])
            checkpoint.restore(run.optimizer, saved["optimizer"])
        return (
            int(saved["step"]),
            float(saved["seconds"]),
            saved["losses"].to(run.device),
            int(saved["count"]),
        )
    except UserError:
        raise
    except Exception as error:  # what does not fit the network can make torch raise anything
        raise checkpoint.damaged(newest, error) from error


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
