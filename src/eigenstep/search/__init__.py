"""Search without gradients: minimize functions of which only values are known."""

from .batch import ManyResults, minimize_many
from .driver import Result, minimize, run
from .history import History
from .search import Search
from .stopping import REASONS

__all__ = ["REASONS", "History", "ManyResults", "Result", "Search", "minimize", "minimize_many", "run"]
