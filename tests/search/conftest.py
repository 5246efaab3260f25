"""Settings of these tests: warnings of numpy are errors, because they would hide a mistake in a
formula.
"""

from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _strict_numpy() -> Iterator[None]:
    with np.errstate(divide="raise", invalid="raise"):
        yield
