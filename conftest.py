"""Settings of all tests; some must be in place before any test imports torch."""

import os
from collections.abc import Iterator

import pytest

from eigenstep_lab import cpu

# pytest-xdist keeps every core busy with processes: more threads in each would only wait for each
# other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # its workers inherit what their parent set
    cpu.prepare()


@pytest.fixture
def float64() -> Iterator[None]:
    """Calculate in double precision unless told otherwise, with the same random numbers in every
    run.
    """
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
