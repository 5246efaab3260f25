"""Settings of these tests: float64 and the same random numbers in every run."""

import pytest


@pytest.fixture(autouse=True)
def _always(float64: None) -> None:
    """Every test here."""
