"""What `eigenstep tune` searches, for each optimizer, and where.

Learning rate and weight decay are settings of a run, all others options of the optimizer. A name
such as "1-beta1" stands for one minus that option: decay rates are searched by their distance from
1, on a logarithmic scale (Choi et al., 2019). `beta1` and `beta2` go into the option `betas`, and
those of Muon's other half, which AdamW steps, into `adamw_betas`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .settings import Settings


class Range(NamedTuple):
    """Numbers from `low` to `high`, uniform in their logarithm."""

    low: float
    high: float


Space = Mapping[str, Range | tuple[Any, ...]]
"""For each hyperparameter a range, or the values to choose from."""

COMMON: Space = {"lr": Range(1e-4, 3e-2), "weight_decay": Range(1e-3, 1.0)}
BETAS: Space = {"1-beta1": Range(0.02, 0.3), "1-beta2": Range(1e-3, 0.2)}
EPS: Space = {"eps": Range(1e-12, 1e-4)}
PAPER: Space = {**COMMON, **BETAS, "damping": Range(1e-14, 1e-4)}
SPECTRAL: Space = {**PAPER, "nesterov": Range(0.05, 0.5), "basis_lr": Range(0.02, 0.5)}
SOAP: Space = {**COMMON, **BETAS, **EPS, "1-shampoo_beta": Range(1e-3, 0.2)}
MUON: Space = {
    **COMMON,
    **EPS,
    "nesterov": (True, False),
    "1-momentum": Range(0.02, 0.3),
    "adamw_ratio": Range(0.03, 3.0),
    **{f"1-adamw_{name.removeprefix('1-')}": values for name, values in BETAS.items()},
    "adamw_eps": EPS["eps"],
}

SPACES: Mapping[str, Space] = {
    "spectral": SPECTRAL,
    "spectral_fast": SPECTRAL,
    "spectral_paper": {
        **PAPER,
        "basis_lr": Range(0.02, 1.9),
        "gamma": (0.0, 1.0),
        "clip": (0.5, 1.0, 2.0),
    },
    "adamw": {**COMMON, **BETAS, **EPS},
    "muon": MUON,
    "muon_float32": MUON,
    "soap": SOAP,
    "soap_2048": SOAP,
    "klsoap": SOAP,
    "klshampoo": SOAP,
    "psgdkron": {**COMMON, **BETAS, "precond_lr": Range(0.01, 1.0)},
    "soap_reference": SOAP,
    "scalable_shampoo": {
        **COMMON,
        **BETAS,
        "matrix_eps": Range(1e-12, 1e-4),
        "diagonal_eps": Range(1e-12, 1e-4),
    },
}
"""The search space of every optimizer."""


def space_of(settings: Settings) -> dict[str, Range | tuple[Any, ...]]:
    """Return the search space of a run's optimizer, without the options that the settings give."""
    space = SPACES[settings.optimizer]
    return {name: values for name, values in space.items() if _option(name) not in settings.option}


def _option(name: str) -> str:
    return re.sub("beta[12]$", "betas", name.removeprefix("1-"))


def apply(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return the settings with hyperparameters from a search space.

    Args:
        settings: The run to change.
        values: One value for each name in the space.
    """
    options = dict(settings.option)
    for name, value in values.items():
        options[name.removeprefix("1-")] = 1 - value if name.startswith("1-") else value
    for part in ("", "adamw_"):
        if f"{part}beta1" in options:
            options[f"{part}betas"] = [options.pop(f"{part}beta1"), options.pop(f"{part}beta2")]
    known = {name: options.pop(name) for name in ("lr", "weight_decay")}
    return dataclasses.replace(settings, **known, option=options)
