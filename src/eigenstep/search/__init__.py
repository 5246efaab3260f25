"""Search without gradients: minimize functions of which only values are known."""

from .choice import METHODS
from .driver import SearchResult, minimize, run
from .history import History
from .runs import REASONS, SCHEDULES, Start
from .search import Search
from .spectral import Distribution

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
