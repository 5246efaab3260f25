"""A start for smooth functions: quasi-Newton descent, with slopes from differences, before the
Gaussian takes over.

The inverse Hessian is held as a factor, ``S^-1 = L L^T``, and points as ``m + L z``. In these
coordinates the curvature is one if it is known: the descent goes along the slope, ``z = -t g`` with
``g = L^T grad f``, differences have the same step in every direction, and the update of BFGS (in
product form, Brodlie et al., 1973) needs no solve. For a move ``s`` that changed the slope by
``y``::

    L <- L - L s w^T,    g <- g - w (s^T g),    w = (y + sqrt(s^T y / s^T s) s) / s^T y

Curvature that is too large is unlearned slowly, and one that is too small at once. So wherever a
move finds less curvature than expected, all of it is reduced first (Oren and Luenberger, 1974), and
what was too much comes back.

A move lowers a smooth function by about half of what the slope at its start promises: a parabola
does so at its bottom, where the search along a line ends. Where one of the first moves gains much
less, the slope has told of a ripple, and the descent gives up, mostly after one slope; later where
most moves gain nothing or it falls nowhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..core.numpy_twin import Array

EPS = float(np.finfo(np.float64).eps)
NOISE = 10 * EPS  # Rounding errors of values, relative to them
SMALLEST = 1e-200  # Squared slopes below this could vanish in products
LONGEST_DIFFERENCE = 1e-7  # Of the points for slopes, in units of sigma0
DECREASE = 1e-4  # The part of what the slope promises that a move must gain, Armijo's constant
PRECISION = 1.2  # Factor by which a step may be longer or shorter than a parabola suggests
MOST_TRIALS = 12  # Points along one direction
LEAST_CURVATURE = (
    0.05  # Smaller ones, also negative ones, count as this, relative to what was known
)
SOFTENING = (
    0.75  # By which power of the curvature found, relative to that expected, the factor is enlarged
)
LOOK_BACK = 10  # Moves whose gains tell whether a function is smooth
LEAST_GAIN = 0.001  # Median of them, relative to half the squared slope
# What the first moves must gain, relative to parabolas at their bottom
FIRST_SHARES = (0.5, 0.3, 0.3, 0.3)
FIRST_TRIALS = 4  # Points in the first direction that parabolas of a smooth function may need
MOST_MOVES = (150, 15)  # In all, and for each dimension
FARTHEST = 1e4  # Longest way, in units of sigma0: beyond it there seems to be no minimum
# Why a descent is over: a minimum; not smooth; no minimum in sight
ENDS = ("converged", "rough", "far")


@dataclass(frozen=True)
class Descent:
    """Where the descent is, and what it waits for: slopes, or the value of one trial. All methods
    return a new one.
    """

    mean: Array  # m, where it is
    factor: Array  # L, shape (d, d)
    start: Array  # where it began
    unit: float  # sigma0
    tolfun: float  # it is over when moves promise less
    slope: Array  # g at m, or at the last point while the new one is measured
    rising: Array  # the new one, as far as it is measured
    gains: Array  # what the last moves gained, relative to half the squared slope, latest last
    value: float = 0.0  # f(m)
    known: bool = False  # whether there is a value
    measuring: bool = True  # whether it waits for slopes
    measured: int = 0  # of how many directions the slope is known
    trial: float = 0.0  # t that it waits for
    step: float = 0.0  # the best t so far along this direction; 0 if none is good enough
    reached: float = 0.0  # the value there
    trials: int = 0  # along this direction
    moves: int = 0  # so far
    scaled: bool = False  # whether L knows a curvature
    fresh: bool = (
        False  # whether all that L knew of directions was forgotten since the last good move
    )
    over: str | None = None  # why it is over, one of ENDS

    @classmethod
    def begin(cls, mean: Array, sigma: float, tolfun: float = 0.0) -> Descent:
        """Return a descent from ``mean``, at first with a step of ``sigma``."""
        zeros = np.zeros_like(mean)
        return cls(
            mean, sigma * np.eye(len(mean)), mean, sigma, tolfun, zeros, zeros, np.ones(LOOK_BACK)
        )

    @property
    def sigma(self) -> Array:
        """The step size with which it began."""
        return np.array(self.unit)

    @property
    def points(self) -> int:
        """How many samples it asks for."""
        first, last = self.span
        return min(self.block, last - first - self.measured) if self.known and self.measuring else 1

    @property
    def block(self) -> int:
        """How many slopes are measured at once."""
        return len(self.mean)

    @property
    def span(self) -> tuple[int, int]:
        """First direction whose slope is needed, and the one after the last."""
        return 0, len(self.mean)

    @property
    def direction(self) -> Array:
        """Where it goes, in its own coordinates."""
        return -self.slope

    def draw(self, rng: np.random.Generator, population: int) -> Array:
        """Return what it waits for, in its own coordinates: at first its own value, then slopes and
        trials in turn.
        """
        if not self.known:
            return np.zeros((1, len(self.mean)))
        if not self.measuring:
            return self.trial * self.direction[None]
        rows = np.arange(min(population, self.points))
        z, directions = np.zeros((len(rows), len(self.mean))), self.span[0] + self.measured + rows
        z[rows, directions] = self._differences()[directions]
        return z

    def sample(self, z: Array, stretch: Array | None = None) -> Array:
        """Return ``m + L z``."""
        return self.mean + z @ self.factor.T

    def whiten(self, x: Array, stretch: Array | None = None) -> Array:
        """Return the ``z`` of points."""
        return np.asarray(np.linalg.solve(self.factor, (x - self.mean).T).T)

    def update(self, z: Array, values: Array, stretch: Array | None = None) -> Descent:
        """Go on with the values of what it waited for; with anything else, or a failure, it is
        over.
        """
        z, values = (array[z.argmax(-1).argsort()] for array in (z, values))
        if not np.array_equal(z, self.draw(np.random.default_rng(0), self.points)):
            return replace(self, over="rough")
        if not self.measuring:
            return self._tried(float(values[0]))
        if not np.isfinite(values).all():
            return replace(self, over="rough")
        if not self.known:
            return replace(self, value=float(values[0]), known=True)
        first, last = self.span
        rows, rising = (
            slice(first + self.measured, first + self.measured + len(z)),
            self.rising.copy(),
        )
        with np.errstate(over="ignore"):
            rising[rows] = (values - self.value) / self._differences()[rows]
        if rows.stop < last:
            return replace(self, rising=rising, measured=self.measured + len(z))
        return replace(self, measured=0)._measured(rising)

    def _differences(self) -> Array:
        """Return the steps for slopes: at best the root of what rounding does to values, where the
        curvature is one.
        """
        step = 2 * math.sqrt(NOISE * abs(self.value)) or 1e-8
        return np.minimum(
            step if self.scaled else np.inf, LONGEST_DIFFERENCE * self.unit / self.axes()
        )

    def _measured(self, slope: Array) -> Descent:
        """Learn from a slope, and choose a direction."""
        if not np.isfinite(slope).all():
            return replace(self, over="rough")
        state = (
            self._learned(self.step * self.direction, slope, slope - self.slope)
            if self.step > 0
            else self
        )
        state = replace(
            state,
            slope=slope if self.step == 0 else state.slope,
            measuring=False,
            step=0.0,
            trials=0,
        )
        squared = state.squared
        if not math.isfinite(squared) or (squared == 0 and self.moves == 0):
            return replace(state, over="rough")
        if squared <= 2 * max(NOISE * abs(self.value), 0.01 * self.tolfun, SMALLEST):
            return replace(state, over="converged")
        return replace(state, trial=1.0 if state.scaled else self._first_trial(squared))

    def _first_trial(self, squared: float) -> float:
        """Return a step before there is any curvature: as long as sigma0."""
        return 1 / math.sqrt(squared)

    @property
    def squared(self) -> float:
        """How much a step of 1 promises to gain, to first order."""
        with np.errstate(over="ignore"):
            return -float(self.slope @ self.direction)

    def _learned(self, s: Array, slope: Array, y: Array) -> Descent:
        """Learn the factor, and the slope in its coordinates, after a move ``s`` that changed the
        slope by ``y``.
        """
        factor, length, product = self.factor, float(s @ s), float(s @ y)
        if not self.scaled:
            if product <= 0:
                return replace(self, slope=slope)
            size = math.sqrt(product / float(y @ y))
        else:
            if product < LEAST_CURVATURE * length:
                share = (1 - LEAST_CURVATURE) * length / (length - product)
                y = share * y + (1 - share) * s
                product = LEAST_CURVATURE * length
            early = self.moves <= 3 * len(s)
            size = max(1.0, (length / product) ** SOFTENING) if early else 1.0
        factor, slope, s, y = factor * size, slope * size, s / size, y * size
        length = length / size**2
        w = (y + math.sqrt(product / length) * s) / product
        factor = factor - np.outer(factor @ s, w)
        return replace(self, factor=factor, slope=slope - w * float(s @ slope), scaled=True)

    def _tried(self, value: float) -> Descent:
        """Look further along the direction, or nearer, or move."""
        squared, t = self.squared, self.trial
        bend = value - self.value + t * squared  # t^2 / 2 times the curvature
        best = (
            t * t * squared / (2 * bend)
            if bend > 0 and math.isfinite(bend)
            else math.inf
            if bend <= 0
            else 0.0
        )
        state = replace(self, trials=self.trials + 1)
        if self.step == 0 and not value <= self.value - DECREASE * t * squared:
            if state.trials > MOST_TRIALS:
                return state._failed()
            nearest = 0.1 if self.moves else 0.001  # sigma0 may be much too large
            return replace(state, trial=min(max(best, nearest * t), 0.5 * t))
        if self.step == 0 or value < self.reached:
            state = replace(state, step=t, reached=value)
            if not 1 / PRECISION < best / t < PRECISION and state.trials <= MOST_TRIALS:
                return replace(state, trial=min(max(best, 0.1 * t), 4 * t))
        return state._moved(squared)

    def _moved(self, squared: float) -> Descent:
        mean = self.sample(self.step * self.direction[None])[0]
        # It says nothing before L is known
        gain = 2 * (self.value - self.reached) / squared if self.scaled else 1.0
        gains, moves = np.append(self.gains[1:], gain), self.moves + 1
        rough = np.median(gains) < LEAST_GAIN or moves > MOST_MOVES[0] + MOST_MOVES[1] * len(mean)
        # 1 at the bottom of a parabola
        share = 2 * (self.value - self.reached) / (self.step * squared)
        rough |= moves <= len(FIRST_SHARES) and share < FIRST_SHARES[moves - 1]
        rough |= moves == 1 and self.trials > FIRST_TRIALS and self.step * math.sqrt(squared) < 1
        far = np.abs(mean - self.start).max() > FARTHEST * self.unit
        return replace(
            self,
            mean=mean,
            value=self.reached,
            gains=gains,
            moves=moves,
            measuring=True,
            fresh=self.fresh and self.step <= 0.1,
            over="rough" if rough else "far" if far else None,
        )

    def _failed(self) -> Descent:
        """Forget the directions, once; then it is over."""
        if self.fresh or not self.scaled:
            return replace(self, over="rough")
        size = math.exp(float(np.log(self.axes()).mean()))
        return replace(
            self, factor=size * np.eye(len(self.mean)), fresh=True, measuring=True, step=0.0
        )

    def deviations(self) -> Array:
        """Return the lengths of the factor's rows."""
        return np.sqrt((self.factor * self.factor).sum(1))

    def axes(self) -> Array:
        """Return the lengths of the factor's columns."""
        return np.sqrt((self.factor * self.factor).sum(0))

    def reflected(self, mean: Array, flipped: NDArray[np.bool_]) -> Descent:
        """Return the mirror image with a given mean, in which the coordinates ``flipped`` point the
        other way.
        """
        return replace(self, mean=mean, factor=np.where(flipped, -1.0, 1.0)[:, None] * self.factor)


MEMORY = 16  # Moves that are remembered in large dimensions
BLOCK = 20  # Slopes measured at once there
# Into how many the coordinates are divided for the first moves, and how often it goes through
BLOCKS, SWEEPS = (20, 2)
FLAT_BLOCKS = (
    2  # Blocks without any slope, before the first move, that are taken for steps of a function
)


@dataclass(frozen=True)
class LimitedDescent(Descent):
    """The same with memory and time linear in the dimension, L-BFGS (Nocedal, 1980): it remembers
    the last moves alone.

    Its coordinates are those of the space, in units of sigma0. A whole slope is expensive there,
    and where few directions have most of the curvature, a move along a small part of it gains
    nearly as much. So it first moves along the slopes of blocks of coordinates, one after the
    other.
    """

    # Moves and changes of the slope, latest last
    memory: Array = field(default_factory=lambda: np.zeros(0))
    remembered: int = 0  # how many of them
    swept: int = 0  # blocks of coordinates in which it has moved; then the slopes are whole ones

    @classmethod
    def begin(cls, mean: Array, sigma: float, tolfun: float = 0.0) -> LimitedDescent:
        """Return a descent from ``mean``, at first with a step of ``sigma``."""
        zeros = np.zeros_like(mean)
        arrays = zeros, zeros, np.ones(LOOK_BACK)
        return cls(
            mean,
            np.array(sigma),
            mean,
            sigma,
            tolfun,
            *arrays,
            memory=np.zeros((MEMORY, 2, len(mean))),
        )

    @property
    def pairs(self) -> Array:
        """The moves that are remembered, with changes of the slope."""
        return self.memory[MEMORY - self.remembered :]

    @property
    def block(self) -> int:
        """How many slopes are measured at once."""
        return BLOCK

    @property
    def span(self) -> tuple[int, int]:
        """First direction whose slope is needed, and the one after the last."""
        d, block = len(self.mean), self.swept % BLOCKS
        return (block * d // BLOCKS, (block + 1) * d // BLOCKS) if self._sweeping else (0, d)

    @property
    def _sweeping(self) -> bool:
        return self.swept < SWEEPS * BLOCKS and len(self.mean) >= BLOCKS

    def _measured(self, slope: Array) -> Descent:
        if not self._sweeping:
            return super()._measured(slope)
        first, last = self.span
        block = np.zeros_like(slope)
        block[first:last] = slope[first:last]
        state = super()._measured(block)
        if not block.any() and not self.moves and self.swept + 1 >= FLAT_BLOCKS:
            return state
        if (
            state.over == "converged" or not block.any()
        ):  # nothing to gain in this block: on to the next one
            return replace(self, swept=self.swept + 1)
        return state

    def _first_trial(self, squared: float) -> float:
        return self.trial if self.moves else super()._first_trial(squared)

    def _moved(self, squared: float) -> Descent:
        state = super()._moved(squared)
        return replace(state, swept=self.swept + 1, step=0.0) if self._sweeping else state  # type: ignore[call-arg]

    @property
    def direction(self) -> Array:
        """Where it goes: minus the inverse Hessian times the slope, by the two-loop recursion."""
        q, shares = -self.slope, []
        for s, y in self.pairs[::-1]:
            shares.append(float(s @ q) / float(s @ y))
            q = q - shares[-1] * y
        if self.scaled:
            q = q * self._softness
        for s, y in self.pairs:
            q = q + (shares.pop() - float(y @ q) / float(s @ y)) * s
        return q

    @property
    def _softness(self) -> float:
        s, y = self.pairs[-1]
        return float(s @ y) / float(y @ y)

    def sample(self, z: Array, stretch: Array | None = None) -> Array:
        """Return ``m + sigma0 z``."""
        return self.mean + self.unit * z

    def whiten(self, x: Array, stretch: Array | None = None) -> Array:
        """Return the ``z`` of points."""
        return (x - self.mean) / self.unit

    def _differences(self) -> Array:
        step = LONGEST_DIFFERENCE
        if self.scaled:
            step = min(step, 2 * math.sqrt(NOISE * abs(self.value) * self._softness) or step)
        return np.full(len(self.mean), step)

    def _learned(self, s: Array, slope: Array, y: Array) -> Descent:
        if float(s @ y) <= 1e-10 * float(y @ y):
            return replace(self, slope=slope)
        memory = np.concatenate([self.memory[1:], np.stack([s, y])[None]])
        return replace(
            self,
            memory=memory,
            remembered=min(self.remembered + 1, MEMORY),
            slope=slope,
            scaled=True,
        )

    def _failed(self) -> Descent:
        """Forget all pairs, once; then it is over."""
        if self.fresh or not self.scaled:
            return replace(self, over="rough")
        return replace(self, remembered=1, fresh=True, measuring=True, step=0.0)

    def deviations(self) -> Array:
        """Return the step size for every coordinate."""
        return np.full(len(self.mean), self.unit)

    axes = deviations

    def reflected(self, mean: Array, flipped: NDArray[np.bool_]) -> Descent:
        """Return the mirror image with a given mean, in which the coordinates ``flipped`` point the
        other way.
        """
        signs = np.where(flipped, -1.0, 1.0)
        slope, rising, memory = signs * self.slope, signs * self.rising, signs * self.memory
        return replace(self, mean=mean, slope=slope, rising=rising, memory=memory)
