"""The whole state of a search as plain arrays and numbers, and back: unlike a pickle, it can be
read from strangers.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .descent import ENDS
from .domain import read_vector
from .history import LIMIT, LISTS, Asked, History
from .runs import Progress, Start, Tally, known_reason
from .sampling import Reevaluation

if TYPE_CHECKING:
    from .search import Search

COUNTS = ("evaluations", "iterations", "failures", "restarts", "best_fun", "_run_start", "_used")


def save(search: Search) -> dict[str, Any]:
    """Return everything that changes during a search."""
    asked, best_x, restarts = search._asked, search.best_x, search._restarts
    memory = _entries(restarts) if is_dataclass(restarts) else {}  # a plain function has none
    return {
        "distribution": _entries(search.distribution),
        "rng": search._rng.bit_generator.state,
        "present": asdict(search._present),
        "restarts": None if restarts is None else memory,
        "progress": asdict(search._progress),
        "tally": asdict(search._tally),
        "decisions": list(search.decisions),
        "noise": None if search.noise is None else asdict(search.noise),
        "history": {name: copy(value) for name, value in vars(search.history).items()},
        "asked": None if asked is None else [asked.x, asked.z, asked.plan],
        "injected": list(search._injected),
        "counts": {name: getattr(search, name) for name in COUNTS},
        "best_x": None if best_x is None else best_x.copy(),
        "reason": search._reason,
        "seconds": search.seconds,
    }


def load(search: Search, state: Mapping[str, Any]) -> None:
    """Give a search, started with the same arguments, the state that another one had; or leave it
    as it is.
    """
    try:
        attributes = _read(search, state)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the state is not one of a search, or is damaged ({error!r})") from error
    for name, value in attributes.items():
        setattr(search, name, value)


def _read(search: Search, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that a search gets from a state."""
    loaded = state["distribution"]
    kinds = {frozenset(_entries(kind)): kind for kind in search.kinds()}
    if frozenset(loaded) not in kinds or np.shape(loaded.get("mean", search._start)) != (
        search.dimension,
    ):
        raise ValueError(
            "the state is of a search with another method or dimension: start with the same "
            "arguments"
        )
    if (state["restarts"] is None) != (search._restarts is None) or (state["noise"] is None) != (
        search.noise is None
    ):
        raise ValueError(
            "the state is of a search with other restarts or noise: start with the same arguments"
        )
    distribution = _rebuild(kinds[frozenset(loaded)], loaded)
    rng = np.random.default_rng()
    rng.bit_generator.state = state["rng"]
    restarts = copy(search._restarts)
    for name, value in (state["restarts"] or {}).items():
        setattr(restarts, name, value)
    lists = {name: list(state["progress"][name]) for name in ("best", "median")}
    best_x = state["best_x"]
    return {
        "distribution": distribution,
        "_rng": rng,
        "_present": Start(**state["present"]),
        "_restarts": restarts,
        "_progress": Progress(**{**state["progress"], **lists}),
        "_tally": Tally(**state["tally"]),
        "decisions": [text + "" for text in state["decisions"] + []],
        "noise": None if state["noise"] is None else Reevaluation(**state["noise"]),
        "history": _read_history(state["history"]),
        "_asked": None if state["asked"] is None else Asked(*state["asked"]),
        "_injected": [read_vector(point, "injected") for point in state["injected"]],
        **{name: state["counts"][name] + 0 for name in COUNTS},
        "best_x": None if best_x is None else read_vector(best_x, "best_x"),
        "_reason": None if state["reason"] is None else known_reason(state["reason"]),
        "_seconds": float(state["seconds"]),
        "_clock": None,
    }


def _rebuild(kind: Any, loaded: Mapping[str, Any]) -> Any:
    """Return a distribution of a kind with other entries, if they fit; some may be distributions
    themselves.
    """
    own, entries = _entries(kind), dict(loaded)
    for name, value in loaded.items():
        if isinstance(own[name], dict):
            entries[name] = _rebuild(getattr(kind, name), value)
            continue
        if name == "over" and value in ENDS:
            continue
        fits = own[name] is None or value is None or np.shape(value) == np.shape(own[name])
        if not fits or (value is not None and not np.isfinite(value).all()):
            raise ValueError(
                f"the state is damaged: {name!r} of its distribution has another shape, or is not "
                "finite"
            )
    return replace(kind, **entries)


def _entries(thing: Any) -> dict[str, Any]:
    """Return the entries of a dataclass, without copying them."""
    if not is_dataclass(thing):
        got = type(thing).__name__
        raise TypeError(
            f"a state needs a method that makes dataclasses, got {got}: pickle the search instead"
        )
    entries = {entry.name: getattr(thing, entry.name) for entry in fields(thing)}
    return {
        name: _entries(value) if is_dataclass(value) else value for name, value in entries.items()
    }


def _read_history(state: Mapping[str, Any]) -> History:
    """Return a history of lists that are equally long and hold numbers."""
    stride, seen, *lists = (
        np.array(state[name], dtype=float).tolist() for name in ("stride", "seen", *LISTS)
    )
    if (
        stride < 1
        or seen < 0
        or {len(records) for records in lists} != {len(lists[0])}
        or len(lists[0]) >= LIMIT
    ):
        raise ValueError("the state is damaged: its history is not one of a search")
    return History(
        **{name: list(state[name]) for name in LISTS}, stride=int(stride), seen=int(seen)
    )
