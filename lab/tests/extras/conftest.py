"""All tests here calculate in double precision and draw the same numbers at every run."""

import pytest


@pytest.fixture(autouse=True)
def _always(float64):
    """Every test here."""
