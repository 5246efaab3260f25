"""Checks of plain arguments, without torch: each raises a sentence that names the argument and what
is expected.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Choice = TypeVar("Choice", bound=Callable[..., Any])


def describe(value: object) -> str:
    """Say what an argument is, for error messages: the number format of a tensor, or the name of
    another type.
    """
    return str(getattr(value, "dtype", type(value).__name__))


def check_number(value: object, name: str, low: float, high: float = math.inf) -> None:
    """Raise unless ``value`` is a real number with ``low <= value <= high``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {describe(value)}")
    if not low <= value <= high or abs(value) == math.inf:
        wanted = f"at least {low}" if math.isinf(high) else f"between {low} and {high}"
        raise ValueError(f"{name} must be finite and {wanted}, got {value}")


def check_size(value: object, name: str) -> None:
    """Raise unless ``value`` is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {describe(value)}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_function(value: object, name: str) -> None:
    """Raise unless ``value`` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {describe(value)}")


def choose(value: str | Choice, table: Mapping[str, Choice], name: str) -> Choice:
    """Return what a choice, given by its name in ``table`` or as a function, stands for."""
    if isinstance(value, str) and value in table:
        return table[value]
    if isinstance(value, str) or not callable(value):
        kind, got = (
            (ValueError, repr(value)) if isinstance(value, str) else (TypeError, describe(value))
        )
        raise kind(f"{name} must be one of {', '.join(table)} or a function, got {got}")
    return value
