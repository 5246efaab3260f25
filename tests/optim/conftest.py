"""Settings of the optimizer's tests: the same random numbers in every run."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
