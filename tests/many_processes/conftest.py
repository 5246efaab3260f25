"""Starts the ranks once, for all tests and all processes that run tests."""

from .ranks import fixtures

ranks_folder, ranks = fixtures("many_processes.checks")
