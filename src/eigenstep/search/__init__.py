"""Search without gradients: minimize functions of which only values are known."""

from .choice import METHODS
from .distribution import Distribution
from .minimize import SearchResult, minimize, run
from .record import History
from .search import Search
from .stopping import REASONS, SCHEDULES, Start

__all__ = [
    "METHODS",
    "REASONS",
    "SCHEDULES",
    "Distribution",
    "History",
    "Search",
    "SearchResult",
    "Start",
    "minimize",
    "run",
]
