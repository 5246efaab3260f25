"""Attributes of a class that are imported when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class lazy(Generic[Value]):
    """A property of the class itself: its function gets the class."""

    def __init__(self, get: Callable[..., Value]) -> None:
        """Take the function; its docstring is the attribute's."""
        self.get = get
        self.__doc__ = get.__doc__

    def __get__(self, instance: object, owner: type) -> Value:
        """Return what the function says of the class that is asked."""
        return self.get(owner)
