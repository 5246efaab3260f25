"""Random configurations of Spectral on random streams of gradients."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eigenstep.optim import Spectral

from .streams import PATTERNS, gradients

SHAPES = ((1,), (7,), (1, 1), (1, 9), (3, 5), (8, 8), (12, 4), (4, 16), (16, 8), (2, 3, 4), (4, 2, 3, 3), (24, 6))
LARGEST_STEP = 3.0
"""Largest root mean square of one step: of a matrix in learning rates, of a vector in AdamW's largest steps."""
LARGEST_MOVE = 3.0
"""Largest root mean square of a matrix's whole move, in moves of AdamW with the same betas."""
TYPICAL: Mapping[str, tuple[Any, ...]] = {
    "interval": (1, 2, 5, [(0, 1), (7, 3)]),
    "nesterov": (0.0, 0.1, 0.2),
    "structure": ("kronecker", "axes", "full", "diagonal"),
    "max_dim": (2048, 6),
    "max_ratio": (None, 1.0, 2.0),
    "start": (1.0, 2.0, 4.0, 20.0),
    "turn_first": (False, True),
    "rotation": ("bounded", "normalized", "moore_penrose"),
    "basis_lr": (None, 0.1, 0.5),
    "maps": ("quadratic", "truncated", "exact"),
    "residual": (False, True),
    "foreach": (True, False),
}
"""Options that change how curvature is learned; steps keep their bound."""
RARE: Mapping[str, tuple[Any, ...]] = {
    "nesterov": (0.0, 0.2, True, 1.0),
    "start": (0.0, 1.0, 4.0, 20.0),
    "eigenvalues": ("corrected", "kronecker"),
    "root": (2.0, 1.0, 4.0),
    "clip": (None, 1.0),
    "grafting": ("descent", None, "adam", "rms"),
    "decay": (1.0, 0.9),
    "damping": (1e-10, 1e-4),
    "relative_damping": (True, False),
    "weight_decay": (0.0, 0.1),
    "basis_dtype": (None, torch.bfloat16, torch.float64),
    "state_dtype": (None, torch.bfloat16, torch.float64),
    "stochastic_rounding": (False, True),
    "maximize": (False, True),
}
"""Options that change how large steps are, or how exact."""
BETAS = ((0.5, 0.9), (0.9, 0.9), (0.9, 0.95), (0.95, 0.95), (0.9, 0.99), (0.95, 0.99))
"""Second moments forget at most twice as fast as the momentum; with others, AdamW's own steps exceed the bound."""
ODD_BETAS = ((0.0, 0.9), (0.0, 0.95), (0.99, 0.5), (0.95, 0.5), (0.9, 0.5), (0.9, 0.999), (0.99, 0.999), (0.99, 0.9))


@dataclass(frozen=True)
class Plan:
    """One configuration.

    Attributes:
        options: Of Spectral, beside learning rate and betas.
        lr: Learning rate.
        betas: Decay rates.
        dtype: Number format of the weights.
        start: First weights.
        streams: Gradients of each parameter, steps × shape.
        missing: Steps × parameters, where a gradient is None.
        broken: What every entry of some gradient is at a step, NaN or infinite; 0 if all is well.
        kills: Steps before which the training is killed and restored.
        bounded: Whether moves have a bound.
    """

    options: Mapping[str, Any]
    lr: float
    betas: tuple[float, float]
    dtype: torch.dtype
    start: list[Tensor]
    streams: list[Tensor]
    missing: np.ndarray
    broken: np.ndarray
    kills: frozenset[int]
    bounded: bool

    def describe(self) -> str:
        """Say what is needed to write the configuration down by hand."""
        shapes = [tuple(start.shape) for start in self.start]
        largest = [f"{float(stream.abs().max()):.1e}" for stream in self.streams]
        return (
            f"options {dict(self.options)}, lr {self.lr:.3g}, betas {self.betas}, {self.dtype}, shapes {shapes}, "
            f"largest gradients {largest}, {len(self.missing)} steps, killed before {sorted(self.kills)}"
        )


def draw(chance: np.random.Generator) -> Plan:
    """Draw a configuration."""
    steps = int(chance.integers(5, 61))
    shapes = [SHAPES[k] for k in chance.integers(len(SHAPES), size=int(chance.integers(1, 5)))]
    bounded = bool(chance.random() < 0.5)
    tables = [TYPICAL] if bounded else [TYPICAL, RARE]
    options = {name: values[chance.integers(len(values))] for table in tables for name, values in table.items()}
    # Most of them as they are by default, so that the few that are not stand out.
    options = {name: value for name, value in options.items() if chance.random() < 0.4}
    options = {"weight_decay": 0.0, **options, "nonfinite": str(chance.choice(["raise", "skip"]))}
    dtype = torch.bfloat16 if not bounded and chance.random() < 0.15 else torch.float32
    scales = 10.0 ** chance.choice([-44, -30, -10, -3, 0, 0, 0, 3, 10, 30, 37.5], size=len(shapes))
    limit = torch.finfo(dtype).max
    streams = [
        gradients(chance, str(chance.choice(list(PATTERNS))), shape, steps, scale).clamp(-limit, limit).to(dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    count = int(chance.integers(0, 4))
    return Plan(
        options=options,
        lr=float(10.0 ** chance.uniform(-5, -1)),
        betas=(BETAS + ODD_BETAS)[chance.integers(len(BETAS) + len(ODD_BETAS) * (not bounded))],
        dtype=dtype,
        start=[torch.from_numpy(chance.standard_normal(shape)).to(dtype) for shape in shapes],
        streams=streams,
        missing=chance.random((steps, len(shapes))) < chance.choice([0.0, 0.1, 0.5]),
        broken=np.where(chance.random(steps) < 0.05, chance.choice([math.nan, math.inf, -math.inf], size=steps), 0.0),
        kills=frozenset(chance.integers(0, steps, size=count).tolist()),
        bounded=bounded,
    )


class Training:
    """Weights and an optimizer, fed with the gradients of a plan."""

    def __init__(self, plan: Plan) -> None:
        """Begin."""
        self.plan, self.taken = plan, 0
        self.weights = [torch.nn.Parameter(start.clone()) for start in plan.start]
        self.optimizer = Spectral(self.weights, plan.lr, plan.betas, **plan.options)

    def saved(self) -> list[Any]:
        """Write everything that decides how the training goes on to a file, and return what is in the file."""
        file = io.BytesIO()
        torch.save([self.taken, [w.detach() for w in self.weights], self.optimizer.state_dict()], file)
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
        with torch.no_grad():
            for ours, theirs in zip(training.weights, weights, strict=True):
                ours.copy_(theirs)
        training.optimizer.load_state_dict(state)
        return training

    def step(self, number: int) -> bool:
        """Take a step, and tell whether there was one to take."""
        plan = self.plan
        for weight, stream, missing in zip(self.weights, plan.streams, plan.missing[number], strict=True):
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
            if not broken or plan.options["nonfinite"] != "raise" or "nothing was changed" not in str(error):
                raise
        if broken:
            check(same(self.saved(), before), "a step with gradients that are not finite changed something")
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
        undisturbed = Training(plan)
    except ValueError:  # options that do not go together are refused when they are given
        return {"options refused": 1}
    disturbed = Training(plan)
    counts = dict.fromkeys(("steps", "kills", "steps left out", "moves compared with AdamW"), 0)
    adam = _Adam(plan) if plan.bounded else None
    for number in range(len(plan.missing)):
        before = [w.detach().clone() for w in undisturbed.weights]
        moved = undisturbed.step(number)
        counts["steps" if moved else "steps left out"] += 1
        _check_finite(undisturbed, number)
        if adam is not None and moved:
            adam.step(undisturbed)
            _check_step(adam, before, undisturbed, number)
        if number in plan.kills:
            disturbed = Training.restored(plan, disturbed.saved())
            counts["kills"] += 1
        disturbed.step(number)
    if adam is not None:
        counts["moves compared with AdamW"] = adam.compare(undisturbed)
    check(same(undisturbed.saved(), disturbed.saved()), f"a training that was killed at {sorted(plan.kills)} differs")
    for weight, missing in zip(undisturbed.weights, plan.missing.T, strict=True):
        had_gradients = bool((~missing & (plan.broken == 0)).any())
        check(
            not had_gradients or bool(undisturbed.optimizer.state.get(weight)),
            "a parameter with gradients has no state",
        )
    return counts


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
        step = rms(new.detach().double() - old.double()) / plan.lr
        rounding = 2 * torch.finfo(plan.dtype).eps * rms(old) / plan.lr
        usual = 1.0 if old.ndim > 1 else max(1.0, adam.largest[index] / plan.lr)  # on vectors, Spectral is Adam
        check(
            step <= LARGEST_STEP * usual + rounding,
            f"step {number} moves weights {index} of shape {tuple(old.shape)} by {step:.3g} learning rates",
        )


class _Adam:
    """AdamW on the same gradients, in double precision, where no square is too small or too large."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.weights = [torch.nn.Parameter(start.double()) for start in plan.start]
        self.optimizer = torch.optim.AdamW(self.weights, plan.lr, plan.betas, eps=1e-300, weight_decay=0.0)
        self.farthest = [0.0 for _ in self.weights]
        self.theirs = [0.0 for _ in self.weights]
        self.largest = [0.0 for _ in self.weights]

    def step(self, training: Training) -> None:
        """Take a step with the gradients of a training, and note how far both are from where they began."""
        for weight, same in zip(self.weights, training.weights, strict=True):
            weight.grad = None if same.grad is None else same.grad.double()
        before = [weight.detach().clone() for weight in self.weights]
        self.optimizer.step()
        for index, start in enumerate(self.plan.start):
            self.largest[index] = max(self.largest[index], rms(self.weights[index].detach() - before[index]))
            self.farthest[index] = max(self.farthest[index], rms(self.weights[index].detach() - start.double()))
            move = rms(training.weights[index].detach().double() - start.double())
            self.theirs[index] = max(self.theirs[index], move)

    def compare(self, training: Training) -> int:
        """Check that no matrix went too far."""
        for index, (ours, adams) in enumerate(zip(self.theirs, self.farthest, strict=True)):
            rounding = len(self.plan.missing) * torch.finfo(self.plan.dtype).eps * rms(self.plan.start[index])
            check(
                ours <= LARGEST_MOVE * adams + rounding,
                f"weights {index} of shape {tuple(self.plan.start[index].shape)} move by "
                f"{ours / self.plan.lr:.3g} learning rates where AdamW moves by {adams / self.plan.lr:.3g}",
            )
        return len(self.weights)
