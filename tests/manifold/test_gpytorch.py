"""The worked example with GPyTorch: any optimizer finds the best variational Gaussian, which is
known.
"""

from __future__ import annotations

import runpy
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from eigenstep import Spectral

gpytorch = pytest.importorskip("gpytorch")


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, Any]]:
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield runpy.run_path(str(Path(__file__).parents[2] / "examples" / "posterior_gpytorch.py"))
    torch.set_default_dtype(torch.float32)


def test_natural_gradients_find_the_best_gaussian_which_checks_its_bound(
    example: dict[str, Any],
) -> None:
    natural = gpytorch.variational.NaturalVariationalDistribution
    gap = example["gap"](natural, partial(gpytorch.optim.NGD, num_data=200, lr=0.1))
    assert abs(gap) < 1e-4


def test_spectral_finds_the_best_gaussian(example: dict[str, Any]) -> None:
    found = example["gap"](
        example["SPDVariationalDistribution"], lambda params: Spectral(params, lr=0.1)
    )
    assert abs(found) < 1e-4
