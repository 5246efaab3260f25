"""Everything that decides a training run, as one record."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..console import LARGEST_SEED, MOST_THREADS, UserError
from ..rivals import TRAINERS

CONFIGS = Path(__file__).with_name("configs")
"""Folder of the configurations that come with the package."""

MODELS = ("auto", "vit", "hiera", "gpt", "plainvit", "hieravit")
PRECISIONS = ("fp32", "bf16", "mixed")
LONGEST = 1e12
"""Most steps or epochs of a duration."""
PRECISION_OPTIONS = ("basis_dtype", "state_dtype")
"""Options of our optimizers that belong to the precision of a run."""
RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("size", "length", "interval", "batch", "accumulate"), (1, math.inf)),
    **dict.fromkeys(("mixup", "cutmix", "lr", "weight_decay", "test_batches"), (0, math.inf)),
    **dict.fromkeys(("threads", "workers"), (0, MOST_THREADS)),
    "seed": (0, LARGEST_SEED),
    "label_smoothing": (0, 0.999),
    "floor": (0, 1),
    "crop": (1e-6, 1),
}
"""The least and the largest value of settings that are numbers."""
DURATIONS = ("train_for", "warmup", "evaluate_every", "log_every", "checkpoint_every")


def _setting(default: Any, help: str, **more: Any) -> Any:
    """Declare a setting; with `result=False` the weights do not depend on it."""
    return field(
        default_factory=lambda: default, metadata={"default": default, "help": help, **more}
    )


@dataclass(frozen=True)
class Settings:
    """One training run. The help texts say what each setting means; `--name-of-setting` sets it."""

    data: str = _setting(
        "digits",
        "name of a dataset, folder of pictures (train/<class>/*, val/<class>/*) or text file",
    )
    size: int = _setting(224, "pictures from a folder are scaled to this many pixels square")
    length: int = _setting(64, "characters in a passage of text")
    crop: float = _setting(
        1.0,
        "train on random parts of pictures of at least this fraction of the area; 1: whole ones",
    )
    flip: bool = _setting(False, "train on mirror images, too")
    mixup: float = _setting(
        0.0, "MixUp: parameter of the Beta distribution of shares; 0 turns it off"
    )
    cutmix: float = _setting(0.0, "CutMix: the same; with both on, a coin decides for each batch")
    label_smoothing: float = _setting(
        0.0, "share of the probability that is spread over all classes"
    )

    model: str = _setting("auto", "network; auto: gpt for text, vit for pictures", choices=MODELS)
    model_option: dict[str, Any] = _setting({}, "an option of the network, such as depth=6")  # noqa: RUF009
    precision: str = _setting(
        "fp32",
        "weights in fp32 or bf16; mixed: fp32 weights, bf16 arithmetic (autocast)",
        choices=PRECISIONS,
    )

    optimizer: str = _setting("spectral", "optimizer", choices=TRAINERS)
    lr: float = _setting(3e-3, "highest learning rate")
    weight_decay: float = _setting(0.1, "decoupled weight decay")
    interval: int = _setting(2, "steps between two updates of the preconditioner")
    option: dict[str, Any] = _setting({}, "an option of the optimizer, such as root=4")  # noqa: RUF009

    train_for: str = _setting("20 epochs", "how long: '20 epochs' or '1000 steps'")
    warmup: str = _setting(
        "auto",
        "the learning rate rises this long, then falls as a cosine; 'auto': an epoch, or a tenth "
        "of short runs",
    )
    floor: float = _setting(0.0, "the learning rate ends at this fraction of the highest")
    batch: int = _setting(32, "examples per step")
    accumulate: int = _setting(
        1, "parts that a batch is cut into, one after the other, to save memory"
    )
    seed: int = _setting(0, "decides first weights, order of data and all other chance")

    evaluate_every: str = _setting("1 epoch", "how often the held-out data is tried")
    test_batches: int = _setting(0, "try only so many batches of it; 0: all")
    log_every: str = _setting("10 steps", "how often a line goes to the log")
    checkpoint_every: str = _setting("1 epoch", "how often a checkpoint is written", result=False)
    directory: str = _setting("", "where the run is kept (default: {root}/...)", result=False)
    device: str = _setting(
        "auto", "cpu, cuda, cuda:1, mps; auto: a GPU if there is one", result=False
    )
    parallel: str = _setting(
        "ddp",
        "under torchrun: replicate the network or shard it",
        choices=("ddp", "fsdp2"),
        result=False,
    )
    threads: int = _setting(0, "threads for torch; 0: as many as it likes", result=False)
    workers: int = _setting(
        0, "processes that read pictures from a folder; 0: none but the main one", result=False
    )

    def __post_init__(self) -> None:
        """Check every setting on its own."""
        for setting in dataclasses.fields(self):
            _check(setting, getattr(self, setting.name))
        if self.batch % self.accumulate:
            raise UserError(
                f"accumulate must divide batch, got batch {self.batch} in {self.accumulate} parts"
            )
        for name in DURATIONS:
            count_steps(getattr(self, name), 10**9, name)  # the steps in an epoch are not known yet

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide weights and log, as plain JSON."""
        chosen = {
            s.name: getattr(self, s.name)
            for s in dataclasses.fields(self)
            if s.metadata.get("result", True)
        }
        plain: dict[str, Any] = json.loads(json.dumps(chosen))
        return plain

    def digest(self) -> str:
        """Return eight characters that differ for runs with different results."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:8]

    def place(self, root: str) -> Path:
        """Return the folder of the run: `directory`, or one of its own under `root`."""
        name = f"{Path(self.data).stem}-{self.model}-{self.optimizer}-{self.digest()}"
        return Path(self.directory) if self.directory else Path(root) / name

    def as_toml(self) -> str:
        """Write the settings that differ from their defaults as a configuration file."""
        changed = {s.name: getattr(self, s.name) for s in dataclasses.fields(self)}
        changed = {
            name: value for name, value in changed.items() if value != getattr(Settings(), name)
        }
        tables = {name: changed.pop(name) for name in ("option", "model_option") if name in changed}
        lines = [f"{name} = {json.dumps(value)}" for name, value in changed.items()]
        for name, table in tables.items():
            lines += [
                f"\n[{name}]",
                *(f"{key} = {json.dumps(value)}" for key, value in table.items()),
            ]
        return "\n".join(lines) + "\n"


def _check(setting: dataclasses.Field[Any], value: Any) -> None:
    declared = setting.metadata
    kind = type(declared["default"])
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or isinstance(value, bool) != (kind is bool):
        raise UserError(f"{setting.name} must be of type {kind.__name__}, got {value!r}")
    options = value if isinstance(value, dict) else {"": value}
    for name, item in options.items():
        _check_plain(f"{setting.name} {name}".strip(), item)
    choices = declared.get("choices")
    if choices and value not in choices:
        raise UserError(f"{setting.name} must be one of {', '.join(choices)}, got {value!r}")
    if setting.name in RANGES:
        _check_range(setting.name, value, *RANGES[setting.name])


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        top = f"between {least:.10g} and {most:.10g}"
        wanted = top if math.isfinite(most) else f"at least {least:.10g}"
        raise UserError(f"{name} must be {wanted}, got {value}")


def _check_plain(name: str, value: Any) -> None:
    """Raise unless JSON keeps a value as it is, unlike dates."""
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(name, item)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{name} must have at most 64 bits, got a number of {value.bit_length()}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} must be finite, got {value}")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise UserError(
            f"{name} must be a number, a text, true, false or a list of them, got {value!r}"
        )


def count_steps(duration: str, per_epoch: int, name: str) -> int:
    """Turn a duration such as "20 epochs", "1000 steps" or "1000" into a number of steps.

    Args:
        duration: What was asked for.
        per_epoch: Steps in an epoch.
        name: Name of the setting, for errors.
    """
    if name == "warmup" and duration == "auto":
        return per_epoch
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(epochs?|steps?|)\s*", duration)
    if match is None:
        raise UserError(
            f"{name} must be a duration such as '20 epochs' or '1000 steps', got {duration!r}"
        )
    if float(match[1]) > LONGEST:
        raise UserError(
            f"{name} must be at most {LONGEST:g}, got a number of {len(match[1])} characters"
        )
    steps = round(float(match[1]) * (per_epoch if match[2].startswith("epoch") else 1))
    if steps < 1 and name != "warmup":
        raise UserError(
            f"{name} must be at least one step, got {duration!r} with {per_epoch} steps in an epoch"
        )
    return steps


def add_arguments(parser: argparse.ArgumentParser, root: str = "runs/train") -> None:
    """Add `--config`, and one option for each setting; by default a run is kept below `root`."""
    shipped = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.toml")))
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"take settings from a TOML file, or from one that comes with us: {shipped}",
    )
    for setting in dataclasses.fields(Settings):
        default = setting.metadata["default"]
        choices = setting.metadata.get("choices")
        flag = "--" + setting.name.replace("_", "-")
        # Without defaults here, what was given can be told from what was not.
        told = setting.metadata["help"].replace("{root}", root)
        common: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS, "help": told}
        if isinstance(default, dict):
            parser.add_argument(flag, action="append", metavar="NAME=VALUE", type=_pair, **common)
        elif isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        else:
            common["help"] += f": {', '.join(choices)}" if choices else ""
            common["help"] += "" if default == "" else f" (default: {default})"
            text = "DURATION" if setting.name in DURATIONS else setting.name.upper()
            metavar = {int: "N", float: "X"}.get(type(default), text)
            parser.add_argument(flag, type=type(default), metavar=metavar, **common)


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    constants = {"true": True, "false": False, "none": None}
    if value.lower() in constants:
        return name, constants[value.lower()]
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def from_arguments(args: argparse.Namespace) -> Settings:
    """Join the configuration file and the command line, which wins."""
    settings = read_config(args.config) if args.config else {}
    names = {setting.name for setting in dataclasses.fields(Settings)}
    words = {name: value for name, value in vars(args).items() if name in names}
    for chosen, options in (("optimizer", "option"), ("model", "model_option")):
        name = words.get(chosen, settings.get(chosen))
        # Options were meant for another one, but for those of the precision.
        if name != settings.get(chosen):
            ours = chosen == "optimizer" and str(name).startswith("spectral")
            old = settings.pop(options, {})
            settings[options] = {
                key: value for key, value in old.items() if ours and key in PRECISION_OPTIONS
            }
        words[options] = {**settings.get(options, {}), **dict(words.get(options, []))}
    return Settings(**{**settings, **words})


def read_config(source: str) -> dict[str, Any]:
    """Read a TOML file with settings: a path, or the name of a file that comes with the package.

    With `base = "..."` it changes some settings of another one that comes with the package.
    """
    path = _find_config(source)
    settings = _read_toml(path)
    if "base" in settings:
        base = CONFIGS / f"{settings.pop('base')}.toml"
        if not base.is_file() or base.parent != CONFIGS:
            raise UserError(
                f"{path}: base must name a configuration that comes with the package, got "
                f"{base.stem!r}"
            )
        settings = {**_read_toml(base), **settings}
    unknown = sorted(set(settings) - {setting.name for setting in dataclasses.fields(Settings)})
    if unknown:
        raise UserError(
            f"{path} has unknown settings {', '.join(unknown)}; see `eigenstep train --help`"
        )
    try:
        Settings(**settings)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return settings


def _find_config(source: str) -> Path:
    for path in (Path(source), CONFIGS / f"{source}.toml"):
        if path.is_file():
            return path
    shipped = ", ".join(sorted(known.stem for known in CONFIGS.glob("*.toml")))
    raise UserError(f"no configuration {source!r}: expected a TOML file or one of {shipped}")


def _read_toml(path: Path) -> dict[str, Any]:
    if sys.version_info < (3, 11):
        raise UserError("--config needs Python 3.11 or newer, whose library reads TOML")
    import tomllib

    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}") from error
    return content
