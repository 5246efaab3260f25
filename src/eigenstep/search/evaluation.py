"""Evaluate a population: one by one, in one call, or on workers. What fails costs its evaluations, never the search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import BrokenExecutor, Future
from typing import Any

import numpy as np

from ..core.numpy_twin import Array

Point = Any
"""A numpy array or a torch tensor, as the user's start is."""


class Evaluator:
    """Calls the user's function and keeps count of what went wrong.

    Attributes:
        failures: how many evaluations raised, timed out or were lost with their worker.
        first_failure: what the first of them said.
    """

    def __init__(
        self,
        fun: Callable[[Point], object],
        *,
        batched: bool = False,
        executor: Any = None,
        timeout: float | None = None,
    ) -> None:
        """Choose how to evaluate.

        Args:
            fun: takes one point, or the whole population if ``batched``.
            batched: call ``fun`` once, with the population as rows, for all values.
            executor: has ``submit``, like every ``concurrent.futures.Executor``; or is a Dask client; or a function
                without arguments that returns an executor, called again should the executor break.
            timeout: seconds that the evaluation of one population may take on the executor; what is not done by then
                has failed.
        """
        if batched and executor is not None:
            raise ValueError("batched evaluates all points in one call, so it cannot be combined with an executor")
        if timeout is not None and executor is None:
            raise ValueError("timeout needs an executor: without one, nothing could interrupt fun")
        self.failures = 0
        self.first_failure: str | None = None
        self._fun, self._batched, self._timeout = fun, batched, timeout
        self._factory = None if executor is None or hasattr(executor, "submit") else executor
        if self._factory is not None and not callable(self._factory):
            raise TypeError(f"executor must have a method submit, or return such an object; got {executor!r}")
        self._executor = self._prepare(executor if self._factory is None else self._factory())

    def __call__(self, points: Sequence[Point]) -> Array:
        """Return the values of points (rows); NaN stands for a failure."""
        if self._batched:
            return self._call_batched(points)
        if self._executor is None:
            return np.array([self._guard(self._fun, point) for point in points])
        return self._call_on_workers(points)

    def _call_batched(self, points: Any) -> Array:
        try:
            values = self._fun(points)
        except Exception as error:
            self._note(error, len(points))
            return np.full(len(points), np.nan)
        array = to_numpy(values)
        if array.shape != (len(points),):
            raise ValueError(f"fun must return one value per row, {len(points)} in all; got shape {array.shape}")
        return array

    def _call_on_workers(self, points: Sequence[Point]) -> Array:
        submitted = [self._submit(point) for point in points]
        deadline = None if self._timeout is None else time.monotonic() + self._timeout

        def wait(future: Future[object] | None) -> object:
            if future is None:  # could not be submitted, which is on record
                return float("nan")
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                return future.result(left)
            except futures.TimeoutError:  # the built-in one from Python 3.11 on
                future.cancel()
                raise

        return np.array([self._guard(wait, future) for future in submitted])

    def _submit(self, point: Point) -> Future[object] | None:
        try:
            future: Future[object] = self._executor.submit(self._fun, point)
            return future
        except BrokenExecutor as error:
            self._note(error, 1)
            if self._factory is not None:
                self._executor = self._prepare(self._factory())
            return None

    def _guard(self, evaluate: Callable[[Any], object], argument: Any) -> float:
        try:
            value = evaluate(argument)
        except (Exception, futures.CancelledError) as error:
            self._note(error, 1)
            return float("nan")
        return to_number(value)

    def _note(self, error: BaseException, count: int) -> None:
        self.failures += count
        if self.first_failure is None:
            self.first_failure = f"{type(error).__name__}: {error}"

    @staticmethod
    def _prepare(executor: Any) -> Any:
        # A Dask client takes equal calls for one unless told otherwise; its executor does what others do.
        return executor.get_executor(pure=False) if hasattr(executor, "get_executor") else executor


def to_number(value: object) -> float:
    """Return a function value as a float, or say what is wrong with it."""
    if isinstance(value, (int, float)):
        return float(value)
    try:
        array = to_numpy(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"fun must return a number, got {type(value).__name__}") from error
    if array.size != 1:
        raise TypeError(f"fun must return a number, got an array of shape {array.shape}")
    return float(array.reshape(()))


def to_numpy(values: object) -> Array:
    """Return numbers as a float64 array, from any device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    array: Array = np.asarray(values, dtype=np.float64)
    return array
