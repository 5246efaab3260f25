"""The options of a parameter group, as one typed object that checks itself."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_number, show
from ..core.step import Turning

Interval = int | Sequence[tuple[int, int]]

CHOICES: Mapping[str, tuple[str, ...]] = {
    "eigenvalues": ("corrected", "kronecker"),
    "structure": ("auto", "kronecker", "full", "diagonal"),
    "nonfinite": ("raise", "skip", "ignore"),
}
POSITIVE = ("root", "clip")
"""Options that must be greater than 0, if they are numbers."""
FLAGS = (
    "cautious_weight_decay",
    "grafting",
    "stochastic_rounding",
    "maximize",
    "capturable",
)
LAYOUT = ("structure", "max_dim", "max_ratio", "fused")
"""Options that decide how a parameter is laid out; they are fixed once it has state."""
STATE_FORMATS = (None, torch.float64, torch.float32, torch.bfloat16, torch.int8)
BASIS_FORMATS = (None, torch.float64, torch.float32, torch.bfloat16)
IMPOSSIBLE: Mapping[str, str] = {
    "amsgrad": "its second moments can fall again",
    "differentiable": "its steps have no gradient",
}
"""Arguments of torch's optimizers that can only be ``False``, and why."""
SCHEDULED = (
    "lr_scale",
    "initial_lr",
    "max_lr",
    "min_lr",
    "swa_lr",
    "base_momentum",
    "max_momentum",
)
FOREIGN = ("params", "param_names", "count", "use_fallback", "name", *SCHEDULED)
"""What torch, learning-rate schedulers and trainers put into parameter groups."""
POSTERIOR = ("ess", "batch_size", "prior_precision", "seed")
"""What checkpoints of posteriors have besides, with which training can go on without one."""
CUSTOM_PREFIX = "custom: "


@dataclass(frozen=True, repr=False)
class Fused:
    """Which matrices lie in one parameter, side by side or stacked.

    Attributes:
        sizes: rows of each matrix that was fused, such as queries, keys and values.
        heads: step so many heads as a matrix each: equal parts of all rows, or of each of
            ``sizes`` if there is one number for each.
        axis: 1 if columns were fused, as in weights that multiply from the right; 0 for rows.
        batch_dims: how many of the first axes count matrices of their own; ``None`` for what
            ``structure="auto"`` recognizes.
    """

    sizes: Sequence[int] | None = None
    heads: int | Sequence[int] | None = None
    axis: int = 0
    batch_dims: int | None = None

    def __post_init__(self) -> None:
        """Check all numbers."""
        several = "None or positive whole numbers"
        sized = self.sizes is None or _are_counts(self.sizes)
        headed = self.heads is None or _is_count(self.heads, 1) or _are_counts(self.heads)
        stacked = self.batch_dims is None or _is_count(self.batch_dims, 0)
        _check_that(sized, "sizes of Fused", several, self.sizes)
        _check_that(headed, "heads of Fused", several, self.heads)
        _check_that(stacked, "batch_dims of Fused", "None or a number of axes", self.batch_dims)
        _check_that(self.axis in (0, 1), "axis of Fused", "0 or 1", self.axis)
        for name in ("sizes", "heads"):
            value = getattr(self, name)
            if isinstance(value, list):  # files hold lists
                object.__setattr__(self, name, tuple(value))

    def __repr__(self) -> str:
        """Show what is not the default."""
        return show(self)

    @property
    def cuts(self) -> bool:
        """Whether an axis is cut into parts."""
        return bool(self.sizes) or self.heads not in (None, 1)

    def heads_of(self, parts: int) -> list[int]:
        """Return the number of heads of each part."""
        if isinstance(self.heads, Sequence):
            return list(self.heads)
        return [self.heads or 1] * parts


def _check_that(possible: bool, name: str, expected: str, value: object) -> None:
    """Raise unless a value is possible; say what is expected and what came."""
    if not possible:
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_counts(values: object) -> bool:
    if not isinstance(values, (tuple, list)) or not values:
        return False
    return all(_is_count(value, 1) for value in values)


@dataclass(frozen=True)
class Options:
    """All options of a parameter group; ``eigenstep.Spectral`` explains each."""

    lr: float | Tensor
    betas: tuple[float, float]
    weight_decay: float | Tensor
    eps: float
    cautious_weight_decay: bool
    root: float
    interval: Interval
    eigenvalues: str
    nesterov: float | bool
    clip: float | None
    grafting: bool
    structure: str
    max_dim: int | None
    max_ratio: float | None
    fused: Fused | None
    damping: float
    turning: Turning
    state_dtype: torch.dtype | None
    stochastic_rounding: bool
    nonfinite: str
    maximize: bool
    capturable: bool

    def __post_init__(self) -> None:
        """Raise unless all options are possible."""
        self._check_numbers()
        self._check_kinds()
        self._check_turning()
        interval_at(self.interval, 0)
        if self.capturable and (self.interval != 1 or self.nonfinite != "ignore"):
            raise ValueError(
                'capturable=True needs interval=1 and nonfinite="ignore", which need no host'
            )

    def _check_numbers(self) -> None:
        for name in ("lr", "weight_decay"):
            check_scalar(getattr(self, name), name)
        check_betas(self.betas)
        for name in ("eps", "damping"):
            check_number(getattr(self, name), name, 0.0)
        for name in POSITIVE:
            check_positive(getattr(self, name), name, optional=name != "root")
        share = 0.0 if isinstance(self.nesterov, bool) else self.nesterov
        check_number(share, "nesterov", 0.0, 1.0)
        if self.max_ratio is not None:
            check_number(self.max_ratio, "max_ratio", 1.0)
        whole = self.max_dim is None or _is_count(self.max_dim, 1)
        _check_that(whole, "max_dim", "a whole number, at least 1", self.max_dim)

    def _check_kinds(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            _check_that(value in choices, name, f"one of {', '.join(map(repr, choices))}", value)
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.fused is not None and not isinstance(self.fused, Fused):
            raise TypeError(
                f"fused must be None or a Fused(...), which says which matrices a parameter "
                f"holds, got {self.fused!r}"
            )
        formats = "None, float64, float32, bfloat16 or int8"
        known = self.state_dtype in STATE_FORMATS
        _check_that(known, "state_dtype", formats, self.state_dtype)

    def _check_turning(self) -> None:
        turning = self.turning
        if not isinstance(turning, Turning):
            raise TypeError(f"turning must be None or a Turning(...), got {turning!r}")
        if turning.dtype not in BASIS_FORMATS:
            raise ValueError(
                "dtype of Turning must be None, float64, float32 or bfloat16, got "
                f"{turning.dtype!r}"
            )
        if isinstance(turning.rate, Tensor) or not 0 < (turning.rate or 0.0) <= 1:
            raise ValueError(
                f"rate of Turning must be greater than 0 and at most 1, got {turning.rate!r}"
            )
        if turning.rayleigh:
            raise ValueError("Turning(rayleigh=True) is for eigenstep.update: leave it out")
        # Quadratic maps stretch bases by up to sqrt(1 + 4 |N|^4), and Newton-Schulz steps come
        # back from below sqrt(3).
        if turning.map == "quadratic" and not turning.mend:
            raise ValueError(
                'Turning(map="quadratic") needs mend=True, for it stretches bases a little at '
                'every turn: use map="truncated_cayley" or "cayley" to do without'
            )


def check_scalar(value: object, name: str) -> None:
    """Raise unless a value is a number, or a tensor that holds one."""
    if not isinstance(value, Tensor):
        check_number(value, name, 0.0)
    elif value.numel() != 1 or not value.is_floating_point():
        raise ValueError(
            f"{name} must be a number or a real tensor with one element, got {value.dtype} of "
            f"shape {tuple(value.shape)}"
        )


def check_positive(value: object, name: str, *, optional: bool = False) -> None:
    """Raise unless a value is a positive number, or ``None`` if it is optional."""
    if value is None and optional:
        return
    check_number(value, name, 0.0)
    if value == 0:
        raise ValueError(f"{name} must be greater than 0, got {value}")


def check_betas(betas: object) -> None:
    """Raise unless ``betas`` are two numbers from 0 up to but not including 1."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be a pair of numbers, got {betas!r}")
    for index, beta in enumerate(betas):
        check_number(beta, f"betas[{index}]", 0.0, 1.0)
        if beta == 1:
            raise ValueError(f"betas[{index}] must be less than 1, got {beta}")


def interval_at(interval: Any, count: int) -> int:
    """Return how many steps go by between turns, at a given step of an interval or a schedule."""
    schedule = [(0, interval)] if _is_count(interval, 1) else interval
    try:
        pairs = [(int(start), int(every)) for start, every in schedule]
    except (TypeError, ValueError):
        pairs = []
    starts = [start for start, _ in pairs]
    rising = starts == sorted(set(starts)) and starts[:1] == [0]
    if not rising or any(every < 1 for _, every in pairs):
        raise ValueError(
            "interval must be a positive integer, or pairs (first step, interval) in rising order "
            f"from step 0, such as [(0, 1), (1000, 4)], got {interval!r}"
        )
    return [every for start, every in pairs if start <= count][-1]


def names_of(kind: type[Options]) -> tuple[str, ...]:
    """Return the names of all options of a kind of optimizer."""
    return tuple(kind.__dataclass_fields__)


def check_names(
    group: Collection[str], kind: type[Options], place: str = " in a parameter group"
) -> None:
    """Raise if there is an option that does not exist; ``place`` says where, for people."""
    names = names_of(kind)
    foreign = (*FOREIGN, *POSTERIOR) if set(POSTERIOR) <= set(group) else FOREIGN
    for name in group:
        if name not in names and name not in foreign:
            near = difflib.get_close_matches(str(name), names, 1, 0.7)
            hint = "Spectral has no such option"
            if near:
                hint = f"did you mean {near[0]}?"
            raise ValueError(f"unknown option {name!r}{place}: {hint}")


def from_torch(options: dict[str, Any]) -> dict[str, Any]:
    """Return options without those that mean nothing here but are arguments of torch's optimizers.

    Trainers pass them to every optimizer. Those that cannot be done raise an error.
    """
    kept = dict(options)
    for name, reason in IMPOSSIBLE.items():
        if kept.pop(name, False):
            raise ValueError(f"Spectral cannot do {name}=True: {reason}; leave it out")
    # Both choose an implementation for torch; there is one here, in batches.
    kept.pop("foreach", None)
    if isinstance(kept.get("fused"), bool):
        kept["fused"] = None
    return kept


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in plain types, as files hold them: functions become their names."""
    saved = dict(options)
    for name, value in options.items():
        if isinstance(value, (Fused, Turning)):
            parts = asdict(value)
            saved[name] = {
                part: custom_name(content) if callable(content) else content
                for part, content in parts.items()
            }
    return saved


def restored(saved: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``plain``; functions, of which files hold the names, are those that are present."""
    options = dict(saved)
    if isinstance(options.get("fused"), dict):
        options["fused"] = Fused(**options["fused"])
    if isinstance(options.get("turning"), dict):
        parts = dict(options["turning"])
        for name in ("rotation", "map"):
            text = parts.get(name)
            if isinstance(text, str) and text.startswith(CUSTOM_PREFIX):
                parts[name] = _present_function(text, name, present["turning"])
        options["turning"] = Turning(**parts)
    return options


def _present_function(text: str, name: str, turning: Turning) -> object:
    function = getattr(turning, name)
    if not callable(function) or custom_name(function) != text:
        raise ValueError(
            f"{name} of Turning was a function, {text!r}; make the optimizer with that function "
            "before loading"
        )
    return function


def custom_name(function: object) -> str:
    """Return what checkpoints hold in place of a user's own function."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{CUSTOM_PREFIX}{named.__module__}.{named.__qualname__}"
