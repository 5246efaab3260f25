"""Settings of the core's tests: float64 unless a test says otherwise, and the same random numbers in every run."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Derandomized: a test that passes today passes tomorrow. HYPOTHESIS_PROFILE=explore looks for new cases.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def _float64_and_seed() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
