"""What mutation testing (`make mutants`) needs."""

import gc
import os

import pytest

if "MUTANT_UNDER_TEST" in os.environ:  # mutmut 3.8 reads an attribute that pytest 9.2 no longer has
    pytest.Item._nodeid = property(lambda item: item.nodeid)
    gc.freeze()  # each mutant is a fork: looking for garbage would copy its parent's memory
    gc.disable()
