"""Settings of these tests: float64 and the same random numbers in every run."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _float64_and_seed() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
