"""Random configurations of Spectral on random streams of gradients."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigenstep.optim import Spectral

from .plans import Network, Plan, draw

LARGEST_STEP = 3.0
"""Largest root mean square of a step, in learning rates or AdamW's largest steps."""
LARGEST_MOVE = 3.0
"""Largest root mean square of a matrix's whole move, in moves of AdamW with the same betas."""


COUNTED = (
    "steps",
    "kills",
    "steps left out",
    "steps without old bases",
    "moves compared with AdamW",
)
"""What a plan's counts are of."""


class Training:
    """Weights and an optimizer, fed with the gradients of a plan."""

    def __init__(self, plan: Plan) -> None:
        """Begin."""
        self.plan = plan
        self.taken = 0
        if plan.model:
            network = Network().to(plan.dtype)
            self.weights = list(network.parameters())
            self._copy(plan.start)
            self.optimizer = Spectral.for_model(network, plan.lr, plan.betas, **plan.options)
            return
        self.weights = [torch.nn.Parameter(start.clone()) for start in plan.start]
        pairs = list(zip(self.weights, plan.layouts, strict=True))
        groups: list[dict[str, Any]] = [
            {"params": [weight], **layout} for weight, layout in pairs if layout
        ]
        usual = [weight for weight, layout in pairs if not layout]
        groups += [{"params": usual}] if usual else []
        self.optimizer = Spectral(groups, plan.lr, plan.betas, **plan.options)

    @property
    def rates(self) -> list[float]:
        """The learning rate of each parameter: tables of a model have larger ones."""
        rates = {
            weight: group["lr"]
            for group in self.optimizer.param_groups
            for weight in group["params"]
        }
        return [rates[weight] for weight in self.weights]

    def _copy(self, weights: list[Tensor]) -> None:
        with torch.no_grad():
            for ours, theirs in zip(self.weights, weights, strict=True):
                ours.copy_(theirs)

    def copied(self) -> list[Tensor]:
        """Return the weights as they are now."""
        return [weight.detach().clone() for weight in self.weights]

    def saved(self, bases: bool = True) -> list[Any]:
        """Write everything that training needs to go on to a file; return its content."""
        file = io.BytesIO()
        weights = [weight.detach() for weight in self.weights]
        torch.save([self.taken, weights, self.optimizer.state_dict(bases=bases)], file)
        file.seek(0)
        content: list[Any] = torch.load(file, weights_only=True)
        for group in content[-1]["param_groups"]:
            group.pop("differentiable", None)  # torch adds it when it loads
        return content

    @classmethod
    def restored(cls, plan: Plan, content: list[Any]) -> Training:
        """Go on from a file."""
        training = cls(plan)
        training.taken, weights, state = content
        training._copy(weights)
        training.optimizer.load_state_dict(state)
        return training

    def step(self, number: int) -> bool:
        """Take a step, and tell whether there was one to take."""
        plan = self.plan
        gradients = zip(self.weights, plan.streams, plan.missing[number], strict=True)
        for weight, stream, missing in gradients:
            weight.grad = None if missing else stream[number].clone()
        there = [weight for weight in self.weights if weight.grad is not None]
        broken = bool(there) and plan.broken[number] != 0
        if broken:
            assert there[0].grad is not None
            there[0].grad.flatten()[-1] = float(plan.broken[number])
            before = self.saved()
        torch.manual_seed(number)
        try:
            self.optimizer.step()
        except ValueError as error:
            expected = broken and plan.options["nonfinite"] == "raise"
            if not expected or "nothing was changed" not in str(error):
                raise
        if broken:
            check(
                same(self.saved(), before),
                "a step with gradients that are not finite changed something",
            )
            return False
        self.taken += 1
        return bool(there)


def check(holds: bool, otherwise: str) -> None:
    """Raise unless something holds."""
    if not holds:
        raise AssertionError(otherwise)


def same(ours: Any, theirs: Any) -> bool:
    """Tell whether two contents of files are the same, bit for bit."""
    if isinstance(ours, Tensor):
        raw = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (ours, theirs)]
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(*raw)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def train(chance: np.random.Generator) -> dict[str, int]:
    """Train as one random plan says, undisturbed and with kills; return what was done."""
    plan = draw(chance)
    try:
        trial = Trial(plan)
    except ValueError:  # options that do not go together are refused when they are given
        return {"options refused": 1}
    for number in range(len(plan.missing)):
        trial.step(number)
    return trial.finish()


class Trial:
    """A plan, trained undisturbed, with kills, and from a checkpoint without bases."""

    def __init__(self, plan: Plan) -> None:
        """Begin all of them."""
        self.plan = plan
        self.undisturbed, self.disturbed = Training(plan), Training(plan)
        self.light: Training | None = None
        self.adam = _Adam(plan, self.undisturbed.rates) if plan.bounded else None
        self.counts = Counter(dict.fromkeys(COUNTED, 0))

    def step(self, number: int) -> None:
        """Take one step of each, and check it."""
        plan = self.plan
        if number == plan.light:
            self.light = Training.restored(plan, self.undisturbed.saved(bases=False))
        before = self.undisturbed.copied()
        moved = self.undisturbed.step(number)
        self.counts["steps" if moved else "steps left out"] += 1
        _check_finite(self.undisturbed, number)
        if self.adam is not None and moved:
            self.adam.step(self.undisturbed)
            _check_step(self.adam, before, self.undisturbed, number)
        self._step_light(number)
        if number in plan.kills:
            self.disturbed = Training.restored(plan, self.disturbed.saved())
            self.counts["kills"] += 1
        self.disturbed.step(number)

    def _step_light(self, number: int) -> None:
        if self.light is None:
            return
        before = self.light.copied()
        self.counts["steps without old bases"] += self.light.step(number)
        _check_finite(self.light, number)
        if self.adam is not None:
            _check_step(self.adam, before, self.light, number)

    def finish(self) -> dict[str, int]:
        """Compare what came out, and return what was done."""
        plan, undisturbed = self.plan, self.undisturbed
        if self.adam is not None:
            self.counts["moves compared with AdamW"] = self.adam.compare(undisturbed)
        check(
            same(undisturbed.saved(), self.disturbed.saved()),
            f"a training that was killed at {sorted(plan.kills)} differs",
        )
        for weight, missing in zip(undisturbed.weights, plan.missing.T, strict=True):
            had_gradients = bool((~missing & (plan.broken == 0)).any())
            has_state = bool(undisturbed.optimizer.state.get(weight))
            check(has_state or not had_gradients, "a parameter with gradients has no state")
        return dict(self.counts)


def _check_finite(training: Training, number: int) -> None:
    for index, weight in enumerate(training.weights):
        check(bool(weight.isfinite().all()), f"weights {index} are not finite after step {number}")
        for name, value in training.optimizer.state.get(weight, {}).items():
            finite = not isinstance(value, Tensor) or bool(value.isfinite().all())
            check(finite, f"{name!r} of weights {index} is not finite after step {number}")


def rms(tensor: Tensor) -> float:
    """Return the root mean square, also of numbers whose squares are beyond all formats."""
    return float(tensor.double().square().mean().sqrt())


def _check_step(adam: _Adam, before: list[Tensor], training: Training, number: int) -> None:
    plan = training.plan
    for index, (old, new) in enumerate(zip(before, training.weights, strict=True)):
        step = rms(new.detach().double() - old.double()) / adam.rates[index]
        rounding = 2 * torch.finfo(plan.dtype).eps * rms(old) / adam.rates[index]
        as_adam = old.ndim < 2 or plan.rare[index]  # then Spectral is AdamW
        usual = max(1.0, adam.largest[index] / adam.rates[index]) if as_adam else 1.0
        check(
            step <= LARGEST_STEP * usual + rounding,
            f"step {number} moves weights {index} of shape {tuple(old.shape)} by {step:.3g} "
            "learning rates",
        )


class _Adam:
    """AdamW on the same gradients at the same rates, in double precision.

    Where Spectral is AdamW in single precision, gradients count up to what can be squared there,
    for both.
    """

    def __init__(self, plan: Plan, rates: list[float]) -> None:
        self.plan = plan
        self.rates = rates
        self.weights = [torch.nn.Parameter(start.double()) for start in plan.start]
        groups = [
            {"params": [weight], "lr": rate}
            for weight, rate in zip(self.weights, rates, strict=True)
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=plan.betas, eps=1e-300, weight_decay=0.0)
        zeros = [0.0 for _ in self.weights]
        self.farthest, self.theirs, self.largest, self.way = (list(zeros) for _ in range(4))

    def step(self, training: Training) -> None:
        """Take a step with a training's gradients; note how far both have come."""
        most = torch.finfo(torch.float32).max ** 0.5 / 16
        for weight, same in zip(self.weights, training.weights, strict=True):
            weight.grad = None if same.grad is None else same.grad.double()
            names = training.optimizer.state.get(same, {})
            has_basis = any(name.startswith("basis") for name in names)
            if weight.grad is not None and not has_basis:
                weight.grad.clamp_(-most, most)
        before = [weight.detach().clone() for weight in self.weights]
        self.optimizer.step()
        for index, start in enumerate(self.plan.start):
            ours = self.weights[index].detach()
            length = rms(ours - before[index])
            self.largest[index] = max(self.largest[index], length)
            self.way[index] += length
            self.farthest[index] = max(self.farthest[index], rms(ours - start.double()))
            move = rms(training.weights[index].detach().double() - start.double())
            self.theirs[index] = max(self.theirs[index], move)

    def compare(self, training: Training) -> int:
        """Check that no matrix went farther than AdamW did, or than its whole way."""
        for index, (ours, adams) in enumerate(zip(self.theirs, self.farthest, strict=True)):
            eps = torch.finfo(self.plan.dtype).eps
            rounding = len(self.plan.missing) * eps * rms(self.plan.start[index])
            check(
                ours <= max(LARGEST_MOVE * adams, self.way[index]) + rounding,
                f"weights {index} of shape {tuple(self.plan.start[index].shape)} move by "
                f"{ours / self.rates[index]:.3g} learning rates where AdamW moves by "
                f"{adams / self.rates[index]:.3g}",
            )
        return len(self.weights)
