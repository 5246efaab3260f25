"""Settings of the core's tests: float64 unless a test says otherwise, and the same random numbers
in every run.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

from eigenstep.core.matrices import SPD

from .cases import BATCHES, STRUCTURES

# Derandomized: a test that passes today passes tomorrow. HYPOTHESIS_PROFILE=explore looks for new
# cases, and quick has few of them, for `make mutants`.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=5)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def _always(float64: None) -> None:
    """Every test here."""


@pytest.fixture(params=STRUCTURES)
def structure(request: pytest.FixtureRequest) -> str:
    """Every structure by name."""
    return str(request.param)


@pytest.fixture(params=BATCHES, ids=str)
def S(structure: str, request: pytest.FixtureRequest) -> SPD:
    """One of every structure, alone and in batches."""
    return STRUCTURES[structure](request.param)
