"""Evaluate a population: one by one, in one call, or on workers. What fails costs its evaluations, never the search."""

import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import BrokenExecutor, Future
from typing import Any

import numpy as np

from ..core.arguments import check_number
from ..core.numpy_twin import Array
from .inputs import Point, copy_point, to_number, to_numpy


class Evaluator:
    """Calls the user's function with copies of points, and keeps what went wrong.

    Attributes:
        first_error: the first exception of an evaluation: what the function raised, or that it took too long.
    """

    def __init__(
        self,
        fun: Callable[[Point], object],
        *,
        batched: bool = False,
        executor: Any = None,
        timeout: float | None = None,
    ) -> None:
        """Choose how to evaluate."""
        if batched and executor is not None:
            raise ValueError("batched evaluates all points in one call, so it cannot be combined with an executor")
        if timeout is not None and executor is None:
            raise ValueError("timeout needs an executor: without one, nothing could interrupt fun")
        if timeout is not None:
            check_number(timeout, "timeout", 0.0)
        self.first_error: BaseException | None = None
        self._fun, self._batched, self._timeout = fun, batched, timeout
        self._factory = None if executor is None or hasattr(executor, "submit") else executor
        if self._factory is not None and not callable(self._factory):
            raise TypeError(f"executor must have a method submit, or return such an object; got {executor!r}")
        self._executor = self._prepare(executor) if self._factory is None else None
        self._values: list[float] = []

    @property
    def first_failure(self) -> str | None:
        """What the first exception said."""
        return None if self.first_error is None else f"{type(self.first_error).__name__}: {self.first_error}"

    @property
    def finished(self) -> Array:
        """Values of the first points of a population whose evaluation was interrupted."""
        return np.array(self._values)

    def __call__(self, points: Sequence[Point]) -> Array:
        """Return the values of points (rows); NaN stands for a failure."""
        self._values = []
        if self._batched:
            values = self._call_batched(points)
        elif self._executor is None and self._factory is None:
            values = self._collect(lambda point: self._fun(copy_point(point)), points)
        else:
            values = self._call_on_workers(points)
        self._values = []
        return values

    def explain_failure(self, count: int, generation: int) -> None:
        """Raise because nothing could be evaluated so far, if it was for an exception that will come again.

        Args:
            count: evaluations so far.
            generation: 0 for the first. One whose workers died of a single point may be followed by a better one.
        """
        lost = isinstance(self.first_error, BrokenExecutor) and self._factory is not None
        if self.first_error is not None and generation == int(lost):
            raise RuntimeError(
                f"fun failed at all {count} points of the first {'two generations' if lost else 'generation'}, so "
                f"there is nothing to learn from; the first failure was {self.first_failure}. If only some points "
                "cannot be evaluated, start elsewhere or with a smaller sigma0, or return NaN for them"
            ) from self.first_error

    def close(self) -> None:
        """Give up the executor if it was made here; workers that still hang are ended."""
        if self._factory is not None and self._executor is not None:
            _discard(self._executor)
            self._executor = None

    def _collect(self, evaluate: Callable[[Any], object], arguments: Sequence[Any]) -> Array:
        for argument in arguments:
            self._values.append(self._guard(evaluate, argument))
        return np.array(self._values)

    def _call_batched(self, points: Any) -> Array:
        try:
            values = self._fun(copy_point(points))
        except Exception as error:
            self._note(error)
            return np.full(len(points), np.nan)
        try:
            array = to_numpy(values)
        except (TypeError, ValueError) as error:
            raise TypeError(f"fun must return one real number per row ({error})") from error
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
            return future.result(left)

        try:
            values = self._collect(wait, submitted)
        finally:
            # A running evaluation cannot be canceled: it hangs, or the search was interrupted.
            canceled = [future is None or future.done() or future.cancel() for future in submitted]
            if not all(canceled):
                self.close()
        return values

    def _submit(self, point: Point) -> Future[object] | None:
        for _ in range(2):  # the second time on a new executor
            if self._executor is None:
                assert self._factory is not None
                self._executor = self._prepare(self._factory())
            try:
                future: Future[object] = self._executor.submit(self._fun, copy_point(point))
                return future
            except BrokenExecutor as error:
                self._note(error)
                self.close()
        return None

    def _guard(self, evaluate: Callable[[Any], object], argument: Any) -> float:
        try:
            value = evaluate(argument)
        except (Exception, futures.CancelledError) as error:
            self._note(error)
            return float("nan")
        return to_number(value)

    def _note(self, error: BaseException) -> None:
        if self.first_error is None:
            self.first_error = error

    @staticmethod
    def _prepare(executor: Any) -> Any:
        if executor is None:
            return None
        if not hasattr(executor, "submit"):
            raise TypeError(f"executor must have a method submit, or return such an object; got {executor!r}")
        # A Dask client takes equal calls for one unless told otherwise; its executor does what others do.
        return executor.get_executor(pure=False) if hasattr(executor, "get_executor") else executor


def _discard(executor: Any) -> None:
    """Shut an executor down without waiting, and end its processes, which may hang; threads cannot be ended."""
    processes = list((getattr(executor, "_processes", None) or {}).values())
    executor.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
