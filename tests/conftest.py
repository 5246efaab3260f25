"""Settings that must be in place before any test imports torch."""

import os

from eigenstep import cpu

# pytest-xdist keeps every core busy with processes: more threads in each would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # its workers inherit what their parent set
    cpu.prepare()
