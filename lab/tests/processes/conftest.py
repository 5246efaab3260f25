"""Starts the ranks once, for all tests and all processes that run tests."""

from many_processes.ranks import fixtures

ranks_folder, ranks = fixtures("processes.checks")
